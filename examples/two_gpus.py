"""The target on one GPU, the draft on another: python examples/two_gpus.py TARGET DRAFT [DEVICES]

Each side works on a stream of its own. With both on "cuda:0" the two streams share that GPU. Loaded
models work as well, where they lie; on the command line it is --device and --draft-device.
"""

import sys

from saguaro_runtime import Engine, EngineConfig, SamplingParams


def main(target: str, draft: str, device: str = "cuda:0", draft_device: str = "cuda:1") -> None:
    config = EngineConfig(device=device, draft_device=draft_device)
    with Engine(target, draft, config) as engine:
        for piece in engine.stream("Once upon a time", SamplingParams(max_new_tokens=32)):
            print(piece, end="", flush=True)
        stats = engine.stats()
    print(f"\nhit rate {stats['hit_rate']:.2f}, overlap {stats['overlap']:.2f}")


if __name__ == "__main__":
    sys.exit(__doc__) if len(sys.argv) < 3 else main(*sys.argv[1:])
