"""Exact laws of the verification rules over large vocabularies, and of rare ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from live_ids import noise_of_ids, scattered_ids, spread
from rounds_drawn import (
    DRAWS,
    P_ROW,
    Q_ROW,
    draw,
    first,
    iid_counts,
    keys_of,
    logs,
    noise_of_rows,
    ones,
)

import oracles
from saguaro_kernels import (
    Draft,
    Keys,
    Stream,
    rng,
    verify,
)
from saguaro_kernels.verification import reference, verify_reference
from saguaro_kernels.verification.contract import Inputs


@pytest.fixture(autouse=True)
def _faster_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "gumbel_reference", noise_of_rows)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("vocab", [4096, 128256])
def test_live_ids_scattered_over_tiles(
    vocab: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law of the live ids' columns; whole rows give the same tokens, kernels too."""
    # What is left of p over q lies between the ends, or at both of them.
    p_row, q_row = (P_ROW, Q_ROW) if vocab == 4096 else (Q_ROW, P_ROW)
    steps, ids, keys = 2, scattered_ids(vocab, 6), keys_of(DRAWS, seed=12, base=3)
    drawn = "COUPLED" if rule == "coupled" else "DRAFT"
    tokens, logq = [], []
    for i in range(steps):
        score = logs(q_row) + noise_of_ids(keys, i, Stream[drawn], ids)
        tokens.append(score.argmax(1))
        logq.append(logs(q_row)[tokens[-1]])
    columns = Draft(
        torch.stack(tokens, 1),
        torch.full((DRAWS,), steps, dtype=torch.int32),
        logs(q_row).expand(DRAWS, steps, 6),
        logq=torch.stack(logq, 1),
        sampling=ones(DRAWS),
    )
    noise = lambda keys, offset, stream, _: noise_of_ids(keys, offset, stream, ids)  # noqa: E731
    never, some = torch.tensor([0.0] * 5 + [-torch.inf]), DRAWS // 4
    with monkeypatch.context() as patch:
        patch.setattr(reference, "gumbel_reference", noise)
        target = logs(p_row).expand(DRAWS, steps + 1, 6)
        verdict = verify_reference(target, columns, ones(DRAWS), keys, rule=rule)
        # The control: the last id never wins what is drawn here.
        patch.setattr(reference, "gumbel_reference", lambda *call: noise(*call) + never)
        cut = verify_reference(
            target[:some], first(columns, some), ones(some), first(keys, some), rule=rule
        )
    assert oracles.follows(*iid_counts(verdict.tokens, np.array(p_row), 12))
    assert not oracles.follows(*iid_counts(cut.tokens, np.array(p_row), 12))
    rows = 2**18 // vocab
    for impl, count in (("reference", rows), ("triton", rows // 8 + 2)):
        wide = dataclasses.replace(
            first(columns, count),
            tokens=ids[columns.tokens[:count]],
            logits=spread(logs(q_row), ids, vocab).expand(count, steps, vocab),
        )
        target = spread(logs(p_row), ids, vocab).expand(count, steps + 1, vocab)
        whole = verify(target, wide, ones(count), first(keys, count), rule=rule, impl=impl)
        assert torch.equal(whole.num_accepted, verdict.num_accepted[:count])
        expected = verdict.tokens[:count]
        assert torch.equal(whole.tokens, torch.where(expected < 0, -1, ids[expected]))


TAIL = 4096


def tail_noise(
    keys: Keys, offset: torch.Tensor, stream: Stream
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of 6 live ids and of the tail as one id, and which of the tail's it is.

    Ids of one logit compete by their noise alone, and the largest of n Gumbels, less log n, adds
    to the log of their mass what it adds to the log of the winner's.
    """
    counters = torch.stack(rng._counters(keys, offset, stream), 1)
    columns, winners = [], []
    for part in counters.split(16):
        noise = rng._gumbel(part, stream, 6 + TAIL)
        best, winner = noise[:, 6:].max(1)
        columns.append(torch.cat((noise[:, :6], best[:, None] - np.log(TAIL)), 1))
        winners.append(winner)
    return torch.cat(columns), torch.cat(winners)


def test_tail_of_rare_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 ids of mass .01 beside the live ones: a coarse uniform or log(1 - x) misses them."""
    p, q = logs([*(0.99 * x for x in P_ROW), 0.01]), logs([*(0.998 * x for x in Q_ROW), 0.002])
    keys = keys_of(DRAWS, seed=14, base=3)
    token, logq = draw(q.expand(DRAWS, 7), torch.Generator().manual_seed(14))
    draft = Draft(
        token[:, None],
        torch.ones(DRAWS, dtype=torch.int32),
        q.expand(DRAWS, 1, 7),
        logq=logq[:, None],
        sampling=ones(DRAWS),
    )
    drawn = []

    def noise(keys: Keys, offset: torch.Tensor, stream: Stream, _: int) -> torch.Tensor:
        drawn.append(tail_noise(keys, offset, stream))
        return drawn[-1][0]

    monkeypatch.setattr(reference, "gumbel_reference", noise)
    # Of a draft that stands nothing more is drawn.
    given = Inputs(bonus_tokens=token)
    target, options = p.expand(DRAWS, 2, 7), {"rule": "token", "inputs": given}
    verdict = verify_reference(target, draft, ones(DRAWS), keys, **options)
    first, law = verdict.tokens[:, 0], np.append(0.99 * np.array(P_ROW), 0.01)
    refused = verdict.num_accepted == 0
    ((columns, winner),) = drawn
    assert len(columns) == refused.sum()
    assert oracles.follows(np.bincount(first.numpy(), minlength=7), law)
    # Within the tail no id is preferred.
    recovered = winner[first[refused] == 6]
    counts = np.bincount((recovered // (TAIL // 8)).numpy(), minlength=8)
    assert oracles.follows(counts, np.full(8, 1 / 8))
    # The control: noise that never reaches the tail.
    columns[:, 6] = -torch.inf
    monkeypatch.setattr(reference, "gumbel_reference", lambda *_: columns)
    without = verify_reference(target, draft, ones(DRAWS), keys, **options).tokens[:, 0]
    assert not oracles.follows(np.bincount(without.numpy(), minlength=7), law)
    # Whole rows give the same tokens.
    monkeypatch.setattr(reference, "gumbel_reference", noise_of_rows)
    some = 128
    ids = torch.cat((torch.arange(6), torch.tensor([6 + TAIL // 2])))
    even = lambda row: torch.cat((row[:6], (row[6] - np.log(TAIL)).expand(TAIL)))  # noqa: E731
    wide = Draft(
        ids[token[:some, None]],
        draft.num_draft[:some],
        even(q).expand(some, 1, -1),
        logq=(logq - np.log(TAIL) * (token == 6))[:some, None],
        sampling=ones(some),
    )
    few = Keys(keys.seed[:some], keys.base[:some])
    target = even(p).expand(some, 2, -1)
    whole = verify_reference(target, wide, ones(some), few, rule="token").tokens[:, 0]
    assert torch.equal(whole.clamp(max=6), first[:some])
    own = refused[:some] & (first[:some] == 6)
    assert torch.equal(
        whole[own] - 6, winner[: refused[:some].sum()][first[:some][refused[:some]] == 6]
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_rows_refused_all_the_same(rule: str) -> None:
    """p == q and an injected u that refuses: no residual is left, the extra token follows p."""
    draws = 1 << 15
    keys = keys_of(draws, seed=13)
    token, logq = draw(logs(P_ROW).expand(draws, 6), torch.Generator().manual_seed(13))
    draft = Draft(
        token[:, None],
        torch.ones(draws, dtype=torch.int32),
        logs(P_ROW).expand(draws, 1, 6),
        logq=logq[:, None],
        sampling=ones(draws),
    )
    target = logs(P_ROW).expand(draws, 2, 6)
    verdict = verify_reference(
        target, draft, ones(draws), keys, rule=rule, uniforms=torch.full((draws, 1), 1.0)
    )
    # a = 1 cannot be refused by the block rule, to rounding.
    refused = verdict.num_accepted == 0
    assert refused.all() if rule == "token" else True
    assert (verdict.status == 0).all() and (verdict.tokens[:, 0] >= 0).all()
    if refused.sum() > 1000:
        counts = np.bincount(verdict.tokens[refused, 0].numpy(), minlength=6)
        assert oracles.follows(counts, np.array(P_ROW))
