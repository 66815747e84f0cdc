"""placeholder"""


def main(a):
    return 2
