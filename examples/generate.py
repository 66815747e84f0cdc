"""Text of a target with a draft, in three lines: python examples/generate.py TARGET DRAFT [PROMPT]

Both are folders or hub names of transformers models with the same token ids.
"""

import sys

from saguaro_runtime import Engine


def main(target: str, draft: str, prompt: str = "Once upon a time") -> None:
    with Engine(target, draft) as engine:
        for piece in engine.stream(prompt):
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    sys.exit(__doc__) if len(sys.argv) < 3 else main(*sys.argv[1:])
