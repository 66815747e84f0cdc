"""Exact laws in float64, written independently of the packages, and the statistics to compare with.

Nothing here imports saguaro_kernels or saguaro_runtime: a wrong idea shared by a kernel and its
reference would still differ from these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).parent / "data"
ALPHA = 1e-6


def load_golden() -> dict[str, dict[str, Any]]:
    """Cases of tests/data/golden.json by name; the file's `layout` says how to index the arrays."""
    return {case["name"]: case for case in json.loads((DATA / "golden.json").read_text())["cases"]}


def load_controls() -> list[dict[str, Any]]:
    """Models on which a wrong variant is caught, and with how many draws."""
    return json.loads((DATA / "controls.json").read_text())


# -- random numbers -------------------------------------------------------------------------------


def philox4x32(counter: list[int], key: list[int], rounds: int = 10) -> list[int]:
    """Philox4x32 in Python integers, from the paper's definition (Salmon et al., SC 2011)."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def random_word(seed: int, base: int, offset: int, stream: int, token: int) -> int:
    """The 32-bit word of one token id under the key layout; stream 3 is keyed by base + offset."""
    if stream == 3:
        base, offset = base + offset, 0
    seed %= 1 << 64
    counter = [token // 4, base % (1 << 32), offset | stream << 24, 0]
    return philox4x32(counter, [seed % (1 << 32), seed >> 32])[token % 4]


def uniform(word: int) -> float:
    """(word + 1/2) * 2^-32 as the packages round it: to float32, held below 1."""
    w = np.float32(np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32)
    return float(min(w, np.float32(1 - 2.0**-24)))


def gumbel(word: int) -> float:
    """-log(-log(1 - w)) in float64."""
    return float(-np.log(-np.log1p(-uniform(word))))


# -- the distribution of a row --------------------------------------------------------------------


def ranking(z: np.ndarray) -> np.ndarray:
    """Ids by logit, the largest first; equal logits by id, the lowest first; -inf left out."""
    order = np.lexsort((np.arange(len(z)), -z))
    return order[np.isfinite(z[order])]


def row_law(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    downweight: float = 1.0,
    scale_f: int = 0,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Probabilities [V]: temperature, top-k, top-p, min-p, then C on the F largest kept ids."""
    z = np.asarray(logits, np.float32)
    if bias is not None:
        z = z + np.asarray(bias, np.float32)
    z = np.where(z < np.inf, z, -np.inf).astype(np.float64)
    law = np.zeros(len(z))
    kept = ranking(z)
    if len(kept) == 0 or temperature <= 0:
        law[kept[0] if len(kept) else 0] = 1.0
        return law
    if top_k > 0:
        kept = kept[:top_k]
    weight = np.exp((z[kept] - z[kept[0]]) / temperature)
    if top_p < 1:
        before = np.cumsum(weight) - weight
        count = max(1, int((before < top_p * weight.sum()).sum()))
        kept, weight = kept[:count], weight[:count]
    if min_p > 0:
        count = int((weight >= min_p).sum())
        kept, weight = kept[:count], weight[:count]
    if 0 < scale_f < len(kept):
        # In log space: with C = 0 the rest may be too small to survive beside the largest.
        log_weight = (z[kept] - z[kept[0]]) / temperature
        with np.errstate(divide="ignore"):
            log_weight[:scale_f] += np.log(downweight)
        weight = np.exp(log_weight - log_weight.max())
    law[kept] = weight / weight.sum()
    return law


def coupled_match(p: np.ndarray, q: np.ndarray) -> float:
    """P(argmax log p + g == argmax log q + g) when both see the same Gumbel noise g."""
    total = 0.0
    for i in np.flatnonzero((p > 0) & (q > 0)):
        total += 1.0 / np.maximum(p / p[i], q / q[i]).sum()
    return float(total)


# -- statistics -----------------------------------------------------------------------------------


def noise_floor(law: np.ndarray, draws: int) -> float:
    """Expected total variation between the law and the histogram of this many draws from it."""
    law = np.asarray(law, np.float64)
    return float(0.5 * np.sqrt(2 / np.pi * law * (1 - law) / draws).sum())


def total_variation(counts: np.ndarray, law: np.ndarray) -> float:
    counts = np.asarray(counts, np.float64)
    return float(0.5 * np.abs(counts / counts.sum() - law).sum())


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of a histogram; cells of expectation < 5 are pooled, impossible ones fail."""
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if counts[law <= 0].any():
        return 0.0
    counts, expected = counts[law > 0], law[law > 0] / law.sum() * counts.sum()
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if len(counts) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def kolmogorov_p(sample: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """p-value of a large sample under a continuous law, by its largest distance from the cdf."""
    at = cdf(np.sort(np.asarray(sample, np.float64)))
    n = len(at)
    distance = max((np.arange(1, n + 1) / n - at).max(), (at - np.arange(n) / n).max())
    return float(min(1.0, 2 * np.exp(-2 * n * distance**2)))


def follows(counts: np.ndarray, law: np.ndarray, alpha: float = ALPHA) -> bool:
    """True if a histogram passes chi-square at alpha and lies within 3 noise floors of the law."""
    draws = int(np.asarray(counts).sum())
    near = total_variation(np.ravel(counts), np.ravel(law)) <= 3 * noise_floor(law, draws)
    return near and chi_square_p(counts, law) >= alpha
