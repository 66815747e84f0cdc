"""What a round does: how much is drafted, and what a row does after an outcome not predicted.

    batch_size   fallback by batch alone: 1 retries at once, up to 32 retry together, more go on
    adaptive     fallback by the crossover b* of measured hit rates, tokens and times
    auto         also k and branches, every few rounds, by Theorem 7 on measured numbers; where it
                 predicts a loss, standard speculative decoding or none; and the ranking and C, by
                 trials of both

A policy depends on committed tokens and on the clock alone, so it does not bias the text. With
reproducible=True k and the fallback are fixed, and with them the text of a seed.
"""

from .fallback import choose_fallback, decide, retry_length
from .policy import Policy

__all__ = ["Policy", "choose_fallback", "decide", "retry_length"]
