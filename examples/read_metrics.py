"""What the rounds did: numbers, and a timeline for chrome://tracing or Perfetto.

python examples/read_metrics.py TARGET DRAFT [trace.json]
"""

import sys
from pathlib import Path

from saguaro_runtime import Engine, SamplingParams
from saguaro_runtime.metrics import trace_events


def main(target: str, draft: str, trace: str = "trace.json") -> None:
    prompts = ["Once upon a time", "The capital of France is"]
    with Engine(target, draft) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=32))
        stats = engine.stats()
        Path(trace).write_text(trace_events(engine.spans))
    print(f"speculation {stats['speculation']}, {stats['tokens_per_s']:.1f} tokens/s")
    print(f"{stats['accepted']} of {stats['drafted']} drafts accepted")
    print(f"hit rate {stats['hit_rate']:.2f}; by accepted length: {stats['hits_by_length']}")
    print(f"tokens per round after a hit or a miss: {stats['tokens_per_round_after']}")
    # SSD gains nothing where drafting ahead takes longer than a verification.
    print(f"verify {stats['t_verify_ms']:.1f} ms, ahead {stats['t_look_ahead_ms']:.1f} ms, "
          f"overlap {stats['overlap']:.2f}")  # fmt: skip
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{prompt!r}: {len(output.rounds)} rounds, the first {output.rounds[:3]}")


if __name__ == "__main__":
    sys.exit(__doc__) if len(sys.argv) < 3 else main(*sys.argv[1:])
