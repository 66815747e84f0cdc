"""The kernel cases: inputs, providers and lower bounds of every op."""

from __future__ import annotations

from typing import Any

from . import outside
from .inputs import (
    geometric_inputs,
    geometric_op,
    outcomes_inputs,
    outcomes_op,
    residual_inputs,
    residual_op,
    rows_inputs,
    sample_op,
    stats_op,
    verify_inputs,
    verify_op,
)
from .inputs_slots import (
    attention_inputs,
    attention_op,
    cache_inputs,
    chain_attention_inputs,
    chain_attention_op,
    chain_layout_inputs,
    chain_layout_op,
    fan_out_inputs,
    fan_out_op,
    insert_op,
    layout_inputs,
    layout_op,
    lookup_op,
    ngram_inputs,
    ngram_op,
    page_promotion_inputs,
    promote_op,
    promote_pages_op,
    promotion_inputs,
)
from .registry import Case, Shape, register

V = 128256


def _ours(make: Any, *arguments: str) -> dict[str, Any]:
    return {"ours": make(*arguments, "triton"), "torch": make(*arguments, "reference")}


register(
    Case(
        name="row_stats",
        summary="max, argmax, log-normaliser and cutoff of each row",
        gate="tests/kernels/test_distribution.py::test_kernel_matches_reference_and_law",
        binaries=r"^row_(scan|merge)_kernel-plain-bf16$",
        shapes=(
            {"R": 8, "V": V, "T": 1.0},
            {"R": 8, "V": V, "T": 0.7},
            {"R": 8, "V": V, "T": 0.7, "top_k": 50},
            {"R": 8, "V": V, "T": 0.7, "top_p": 0.9},
        ),
        inputs=rows_inputs,
        providers=_ours(stats_op),
        bound=lambda s, size: s["R"] * s["V"] * size,
        limit=1.05,
    )
)
register(
    Case(
        name="saguaro_sample",
        summary="one token per row, its log q, the top-F ids",
        # The op's own comparison takes minutes in the interpreter; this is one small shape of it.
        gate="tests/bench/test_registry.py::test_ours_equals_the_torch_provider[saguaro_sample]",
        binaries=r"^row_(scan|merge)_kernel-top32-bf16$",
        shapes=(
            {"R": 8, "V": V, "T": 1.0, "F": 8},
            {"R": 1, "V": V, "T": 1.0, "F": 32},
            {"R": 1, "V": V, "T": 0.7, "F": 32},
            {"R": 8, "V": V, "T": 0.7, "F": 32},
            {"R": 24, "V": V, "T": 1.0, "F": 32},
            {"R": 24, "V": V, "T": 0.7, "F": 8},
            {"R": 24, "V": V, "T": 1.0, "F": 8, "C": 0.8},
            {"R": 8, "V": V, "T": 0.7, "F": 8, "top_p": 0.9},
        ),
        inputs=rows_inputs,
        providers=_ours(sample_op) | outside.providers("sample"),
        bound=lambda s, size: s["R"] * s["V"] * size,
        limit=1.05,
    )
)


_BINARIES = {
    "block": "(block|token)", "block-close": "(block|token)", "hsd": "(block|token)",
    "greedy": "token(-one-hot)?",
}  # fmt: skip
"""Of a rule: what counts rows is the same for token and block."""


def _verify_case(
    rule: str,
    rows: Any,
    *,
    launches: int,
    limit: float,
    summary: str = "",
    gate: str = "tests/kernels/test_verification.py::test_kernel_equals_reference",
    **extra: Any,
) -> None:
    law = rule.partition("-")[0]
    temperatures = (0.0,) if rule == "greedy" else (1.0, 0.7)
    register(
        Case(
            name=f"verify.{rule}",
            summary=summary or f"accepted drafts and the extra token, {rule}",
            gate=gate,
            binaries=rf"^verify-(stats|mass|extra)-{_BINARIES.get(rule, rule)}-bf16$",
            shapes=tuple(
                {"B": B, "K": 7, "V": V, "T": T, "rule": law, **extra}
                for B in (1, 8)
                for T in temperatures
            ),
            inputs=verify_inputs,
            providers=_ours(verify_op, "token" if law == "greedy" else law)
            | outside.providers(rule),
            bound=lambda s, size: s["B"] * rows(s["K"]) * s["V"] * size,
            limit=limit,
            launches=launches,
            quick=len(temperatures),
        )
    )


# Rows of V that must be read: K normalisers and one (p, q) pair; for block also rows 2..K of q,
# less what a backward scan can skip; greedy needs no bonus row; coupled may.
_verify_case("token", lambda K: K + 2, launches=3, limit=1.15)
_verify_case("block", lambda K: K + 2, launches=4, limit=3.2 / 2.31)
_verify_case(
    "block-close", lambda K: 2 * K + 1, launches=4, limit=5.6 / 3.85, inputs="close",
    summary="block where draft and target nearly agree: its worst case",
)  # fmt: skip
_verify_case(
    "hsd", lambda K: K + 2, launches=4, limit=3.2 / 2.31,
    summary="block by another name: why, in docs/theory.md, The rules",
    gate="tests/bench/test_registry.py::test_hsd_is_block",
)  # fmt: skip
_verify_case("coupled", lambda K: K + 1, launches=3, limit=1.15)
_verify_case("greedy", lambda K: K, launches=2, limit=1.9 / 1.8)
register(
    Case(
        name="predict_outcomes",
        summary="the M most promising (k, extra) of each request",
        gate="tests/kernels/test_outcomes.py::test_rankings_and_allocations",
        binaries=r"^predict_outcomes_.*(auto-bf16|best)$",
        shapes=(
            {"B": 1, "K": 7, "V": V, "M": 24, "T": 1.0},
            {"B": 8, "K": 7, "V": V, "M": 24, "T": 1.0},
        ),
        inputs=outcomes_inputs,
        providers=_ours(outcomes_op),
        bound=lambda s, size: s["B"] * (s["K"] + 1) * s["V"] * size,
        limit=1.05,
    )
)


def _attention_bytes(s: Shape, size: int) -> float:
    own = (s["K"] + 1) * s["M"] + s["K"] + 1
    per_slot = 2 * s["Hkv"] * s["D"]
    return s["B"] * size * ((s["L"] + own) * per_slot + 2 * s["M"] * s["Hq"] * s["D"])


register(
    Case(
        name="tree_attention",
        summary="one query per branch over the shared trunk and its own keys",
        gate="tests/kernels/test_tree_attention.py::test_every_draft_length_and_step",
        binaries=r"^tree_attention(-tree-M24-G8-D128-bf16|_merge)",
        shapes=(
            {"B": 1, "M": 24, "K": 7, "L": 1024, "Hq": 32, "Hkv": 8, "D": 64},
            {"B": 1, "M": 24, "K": 7, "L": 8192, "Hq": 32, "Hkv": 8, "D": 64},
            {"B": 8, "M": 16, "K": 7, "L": 2048, "Hq": 32, "Hkv": 8, "D": 128},
        ),
        inputs=attention_inputs,
        providers=_ours(attention_op),
        bound=_attention_bytes,
        # Partial results of a split trunk are extra traffic, paid to fill the GPU at small batches.
        limit=1.5,
        flops=lambda s: 4.0 * s["B"] * s["M"] * s["Hq"] * s["D"] * (s["L"] + s["K"] + 1),
    )
)
register(
    Case(
        name="tree_attention.chain",
        summary="the K + 1 queries of a verification: causal, over the trunk",
        gate="tests/kernels/test_tree_attention.py::test_decode_verification_and_prefill",
        binaries=r"^tree_attention(-verify-.*bf16|_merge)",
        shapes=(
            # Pages of 256 slots, the least that flash-attn takes.
            {"B": 1, "K": 7, "L": 1024, "Hq": 32, "Hkv": 8, "D": 128, "page": 256},
            {"B": 8, "K": 7, "L": 4096, "Hq": 32, "Hkv": 8, "D": 128, "page": 256},
        ),
        inputs=chain_attention_inputs,
        providers=_ours(chain_attention_op) | outside.providers("chain attention"),
        bound=lambda s, size: (
            s["B"]
            * size
            * ((s["L"] + s["K"] + 1) * 2 * s["Hkv"] + 2 * (s["K"] + 1) * s["Hq"])
            * s["D"]
        ),
        # At B = 1 the partial results of a split trunk are more than half of the keys themselves.
        limit=1.8,
        flops=lambda s: 4.0 * s["B"] * (s["K"] + 1) * s["Hq"] * s["D"] * (s["L"] + s["K"] + 1),
    )
)
register(
    Case(
        name="promote_branch",
        summary="the hit branch's keys and values, copied into the trunk",
        gate="tests/kernels/test_promotion.py::test_hits_move_and_nothing_else",
        binaries=r"^promote_branch-K5-bf16$",
        shapes=(
            {"B": 1, "M": 24, "K": 7, "layers": 16, "Hkv": 8, "D": 64},
            {"B": 8, "M": 24, "K": 7, "layers": 16, "Hkv": 8, "D": 64},
        ),
        inputs=promotion_inputs,
        providers=_ours(promote_op),
        bound=lambda s, size: (
            2 * s["B"] * (s["K"] + 1) * 2 * s["layers"] * s["Hkv"] * s["D"] * size
        ),
        launches=1,
    )
)
register(
    Case(
        name="promote_pages",
        summary="the same by the page table, where a page is one slot",
        gate="tests/kernels/test_promotion.py::test_pages_of_one_slot_change_places_instead",
        binaries=r"^promote_pages-K5$",
        shapes=({"B": 8, "M": 24, "K": 7},),
        inputs=page_promotion_inputs,
        providers=_ours(promote_pages_op),
        bound=lambda s, size: s["B"] * (4 * (s["K"] + 1) * 4 + 12),
        launches=1,
    )
)
register(
    Case(
        name="cache_lookup",
        summary="is the outcome prepared? its slot and its chain",
        gate="tests/kernels/test_cache.py::test_random_keys_against_a_dict",
        binaries=r"^cache_lookup",
        shapes=({"B": 32, "M": 24, "K": 7}, {"B": 1, "M": 24, "K": 7}),
        inputs=cache_inputs,
        providers=_ours(lookup_op),
        # The key of the outcome, one bucket, the stored key; and for half of them a chain.
        bound=lambda s, size: s["B"] * (36 + 8 + 40 + 13 + 1.5 * 8 * s["K"]),
        limit=4.0,
        launches=1,
    )
)
register(
    Case(
        name="cache_insert",
        summary="the prepared chains of a round, into the table",
        gate="tests/kernels/test_cache.py::test_random_keys_against_a_dict",
        binaries=r"^cache_insert",
        shapes=({"B": 32, "M": 24, "K": 7}, {"B": 1, "M": 24, "K": 7}),
        inputs=cache_inputs,
        providers=_ours(insert_op),
        # The five fields and the slot in, the key row out, one bucket read and written.
        bound=lambda s, size: s["B"] * s["M"] * (40 + 40 + 16),
        limit=4.0,
        launches=1,
    )
)
register(
    Case(
        name="residual",
        summary="the row that a refused draft is replaced from, for users who want it",
        gate="tests/kernels/test_residual.py::test_kernel_equals_reference",
        binaries=r"^residual-(stats|mass|probs)-.*bf16$",
        shapes=({"R": 4, "V": V, "T": 1.0}, {"R": 4, "V": V, "T": 0.7}),
        inputs=residual_inputs,
        providers=_ours(residual_op),
        # Normalisers, mass and the row itself: each needs both inputs, and the last writes.
        bound=lambda s, size: s["R"] * s["V"] * (3 * 2 * size + 4),
        limit=1.05,
        launches=3,
    )
)
register(
    Case(
        name="sample_geometric",
        summary="a token drawn from the mean of draft and residual, and the row it came from",
        gate="tests/kernels/test_sampling.py::test_geometric_mean_of_draft_and_residual",
        binaries=r"^(geometric_row_kernel|residual-(stats|mass)-bf16)$",
        shapes=({"R": 4, "V": V, "T": 1.0},),
        inputs=geometric_inputs,
        providers=_ours(geometric_op),
        # Normalisers, mass, and the row itself, drawn from as it is written; its own normaliser is
        # known then, so it is read and written once more. What is convenient here takes more.
        bound=lambda s, size: s["R"] * s["V"] * (3 * 2 * size + 3 * 4),
        limit=1.7,
        launches=12,
    )
)
register(
    Case(
        name="chain_layout",
        summary="positions and slots of the last token and its drafts",
        gate="tests/kernels/test_tree.py::test_chain_is_its_definition",
        binaries=r"^layout-chain$",
        shapes=({"B": 8, "K": 7},),
        inputs=chain_layout_inputs,
        providers=_ours(chain_layout_op),
        bound=lambda s, size: s["B"] * (s["K"] + 1) * (8 + 4 * 8 + 4),
        limit=2.0,
        launches=1,
    )
)
register(
    Case(
        name="tree_layout",
        summary="positions and slots of all branches for all steps",
        gate="tests/kernels/test_tree.py::test_tree_is_its_definition",
        binaries=r"^layout-tree$",
        shapes=({"B": 8, "M": 24, "K": 7},),
        inputs=layout_inputs,
        providers=_ours(layout_op),
        bound=lambda s, size: s["B"] * s["M"] * (12 + 8 + 24 * (s["K"] + 1)),
        limit=2.0,
        launches=1,
    )
)
register(
    Case(
        name="ngram_propose",
        summary="what followed the longest earlier match of a request's last tokens",
        gate="tests/kernels/test_ngram.py::test_random_texts",
        binaries=r"^ngram_propose",
        shapes=({"B": 8, "N": 4096, "K": 7},),
        inputs=ngram_inputs,
        providers=_ours(ngram_op),
        bound=lambda s, size: s["B"] * 8 * (s["N"] + s["K"]),
        limit=1.25,
        launches=1,
    )
)
register(
    Case(
        name="allocate_fan_out",
        summary="branches by accepted length, in proportion to P(k)^(1/(1+r))",
        gate="tests/kernels/test_fan_out.py::TestAllocateFanOut",
        binaries=r"^allocate_fan_out$",
        shapes=({"B": 8, "K": 7, "M": 24},),
        inputs=fan_out_inputs,
        providers=_ours(fan_out_op),
        bound=lambda s, size: s["B"] * (s["K"] + 1) * (8 + 4),
        limit=2.0,
        launches=1,
    )
)
