"""`python -m bench`: see `python -m bench --help`."""

import sys

from . import compile as compile_command

if __name__ == "__main__":
    sys.exit(compile_command.main(sys.argv[2:]))
