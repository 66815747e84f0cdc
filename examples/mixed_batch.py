"""One batch, every request sampled in its own way: python examples/mixed_batch.py TARGET DRAFT"""

import sys

from saguaro_runtime import Engine, EngineConfig, SamplingParams

REQUESTS = {
    "Once upon a time": SamplingParams(max_new_tokens=24),  # greedy
    "The answer is": SamplingParams(max_new_tokens=24, temperature=0.7, top_p=0.9, seed=1),
    "Dear reader,": SamplingParams(max_new_tokens=24, temperature=1.0, top_k=50, seed=2),
    "To be or not": SamplingParams(max_new_tokens=16, repetition_penalty=1.3, stop=("\n",)),
}


def main(target: str, draft: str) -> None:
    # reproducible: the text of a seed is the same here and alone.
    config = EngineConfig(reproducible=True, max_batch=len(REQUESTS))
    with Engine(target, draft, config) as engine:
        outputs = engine.generate(list(REQUESTS), list(REQUESTS.values()))
    for prompt, output in zip(REQUESTS, outputs, strict=True):
        rounds = output.metrics["tokens_per_round"]
        print(f"{prompt!r} -> {output.text!r}")
        print(f"    {output.finish_reason}, {rounds:.2f} tokens per round")


if __name__ == "__main__":
    sys.exit(__doc__) if len(sys.argv) < 3 else main(*sys.argv[1:])
