"""The target on one GPU, the draft on another: python examples/two_gpus.py TARGET DRAFT [DEVICES]

Each side works on a stream of its own. With both on "cuda:0" the two streams share that GPU. A
folder that `saguaro distill` has written is loaded beside its target instead, see `load_draft`.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from saguaro_runtime import Engine, SamplingParams


def main(target: str, draft: str, *devices: str) -> None:
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device)
        for path, device in zip((target, draft), devices or ("cuda:0", "cuda:1"), strict=True)
    ]
    tokenizer = AutoTokenizer.from_pretrained(target)
    with Engine(*models, tokenizer=tokenizer) as engine:
        for piece in engine.stream("Once upon a time", SamplingParams(max_new_tokens=32)):
            print(piece, end="", flush=True)
        stats = engine.stats()
    print(f"\nhit rate {stats['hit_rate']:.2f}, overlap {stats['overlap']:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
