"""A model of your own behind the engine: python examples/custom_model.py

Anything with these methods is a `saguaro_runtime.models.Model`. A row is one request's state. This
one needs none, as its next token depends on the last alone; a real one keeps keys and values in the
row's slots, see saguaro_runtime/models/protocol.py for what each call may read and write.
"""

import torch

from saguaro_runtime import Engine, EngineConfig, SamplingParams


class Bigram:
    """What comes after each token, as a table of logits [V, V]."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.vocab_size, self.max_length = len(logits), 1 << 20
        self.device, self.dtype = logits.device, logits.dtype

    def allocate(self, row: int, slots: int) -> None:
        """A request begins: reserve its slots."""

    def release(self, row: int) -> None:
        """It has ended."""

    def prefill(self, row: int, tokens: torch.Tensor, start: int = 0) -> None:
        """Take in a prompt, or the piece of it that begins at `start`."""

    def extend(self, rows: torch.Tensor, tokens: torch.Tensor, trunk_len: torch.Tensor):
        """Feed tokens [B, Q] behind trunk_len [B]; logits [B, Q, V]."""
        return self.logits[tokens]

    def decode_tree(self, rows, tokens, trunk_len, depth, draft_len, step):
        """One step of M branches per row: tokens [B, M] -> logits [B, M, V]."""
        return self.logits[tokens]

    def promote(self, rows, trunk_len, depth, branch, draft_len, branches) -> None:
        """Keep the state of the branch that came true."""


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    law = 2.0 * torch.randn(64, 64, generator=generator)
    draft = law + 0.7 * torch.randn(64, 64, generator=generator)
    config = EngineConfig(k=3, branches=8, lane="inline")
    with Engine(Bigram(law), Bigram(draft), config) as engine:
        greedy, sampled = engine.generate(
            [[1, 2, 3], [1, 2, 3]],
            [SamplingParams(max_new_tokens=48), SamplingParams(48, temperature=0.8, seed=7)],
        )
        print("greedy ", greedy.token_ids)
        print("sampled", sampled.token_ids)
        stats = engine.stats()
    print(f"{stats['tokens_per_round']:.2f} tokens per round, hit rate {stats['hit_rate']:.2f}")


if __name__ == "__main__":
    main()
