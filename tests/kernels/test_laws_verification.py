"""Exact laws of the verification rules, on the torch reference that the kernels are tied to.

Every law has a control that is known to be wrong and must fail on it.
"""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
import torch
from live_ids import noise_of_ids
from rounds_drawn import (
    DRAWS,
    P_ROW,
    Q_ROW,
    draw,
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
    Sampling,
    Stream,
    log_prob_reference,
    rng,
    saguaro_sample,
)
from saguaro_kernels.verification import reference, verify_reference

GOLDEN = oracles.load_golden()


@pytest.fixture(autouse=True)
def _faster_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "gumbel_reference", noise_of_rows)


def test_noise_of_rows_is_the_noise() -> None:
    keys, offset = keys_of(50, seed=1), torch.arange(50) % 3
    for stream in (Stream.EXTRA, Stream.COUPLED):
        expected = rng.gumbel_reference(keys, offset, stream, 9)
        assert torch.equal(noise_of_rows(keys, offset, stream, 9), expected)
        ids = torch.tensor([8, 0, 3, 5])
        assert torch.equal(noise_of_ids(keys, offset, stream, ids), expected[:, ids])


class Model:
    """p and q of a golden case as tables over contexts; a context is the last one or two tokens."""

    def __init__(self, case: dict) -> None:
        self.vocab, self.kind = case["V"], case["kind"]
        self.start = case["start"]
        self.p, self.q = logs(case["p"]), logs(case["q"])

    def context(self, tokens: torch.Tensor) -> torch.Tensor:
        """Row of the tables that the token after `tokens` [N, n] follows."""
        start = torch.tensor(self.start).expand(len(tokens), 2)
        last = torch.cat((start, tokens), 1)[:, -2:]
        index = {"iid": last[:, 1] * 0, "markov1": last[:, 1]}
        return index.get(self.kind, last[:, 0] * self.vocab + last[:, 1])

    def rows(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return table.view(-1, self.vocab)[self.context(tokens)]


def draw_chain(model: Model, steps: int, keys: Keys, stream: Stream | None = None) -> Draft:
    """Drafts drawn one after the other from q; under `stream`, or by noise of no stream at all."""
    draws = len(keys.seed)
    generator = torch.Generator().manual_seed(int(keys.seed[0] >> 32))
    tokens, rows, logq = torch.zeros((draws, 0), dtype=torch.int64), [], []
    for i in range(steps):
        rows.append(model.rows(model.q, tokens))
        token, log_q = draw(rows[-1], generator, keys, i, stream)
        logq.append(log_q)
        tokens = torch.cat((tokens, token[:, None]), 1)
    num_draft = torch.full((draws,), steps, dtype=torch.int32)
    logits = torch.stack(rows, 1)
    return Draft(tokens, num_draft, logits, logq=torch.stack(logq, 1), sampling=ones(draws))


def target_rows(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    prefixes = [tokens[:, :i] for i in range(tokens.shape[1] + 1)]
    return torch.stack([model.rows(model.p, prefix) for prefix in prefixes], 1)


def text_counts(model: Model, tokens: torch.Tensor, seed: int) -> np.ndarray:
    """Histogram of the first L tokens; what a short round lacks is drawn from the target."""
    generator = torch.Generator().manual_seed(seed)
    text = tokens.clone()
    for i in range(text.shape[1]):
        missing = text[:, i] < 0
        if missing.any():
            law = model.rows(model.p, text[missing, :i]).double().exp()
            text[missing, i] = torch.multinomial(law, 1, generator=generator)[:, 0]
    code = text @ (model.vocab ** torch.arange(text.shape[1] - 1, -1, -1))
    return np.bincount(code.numpy(), minlength=model.vocab ** text.shape[1])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", list(GOLDEN))
def test_joint_and_outcome_laws(name: str, rule: str) -> None:
    case = GOLDEN[name]
    model, steps, vocab = Model(case), case["K"], case["V"]
    keys = keys_of(DRAWS, seed=1)
    draft = draw_chain(model, steps, keys)
    verdict = verify_reference(
        target_rows(model, draft.tokens), draft, ones(DRAWS), keys, rule=rule
    )
    assert oracles.follows(text_counts(model, verdict.tokens, 1), case["target_joint"])
    law = case["rules"][rule]
    k = verdict.num_accepted.long()
    extra = verdict.tokens.gather(1, k[:, None])[:, 0]
    joint, exact = [], []
    for stop in range(steps + 1):
        here = k == stop
        power = vocab ** torch.arange(stop - 1, -1, -1)
        prefix = draft.tokens[here, :stop] @ power if stop else extra[here] * 0
        counts = np.bincount((prefix * vocab + extra[here]).numpy(), minlength=vocab ** (stop + 1))
        outcome = np.ravel(law["outcome_law"][stop])
        joint.append(counts)
        exact.append(outcome)
        if counts.sum() > 1000:
            # The extra token's law given where the chain stopped; a slice may have two cells only.
            assert oracles.chi_square_p(counts, outcome / outcome.sum()) >= oracles.ALPHA
    assert oracles.follows(np.concatenate(joint), np.concatenate(exact))
    assert abs(k.double().mean() - law["E_k"]) < 5 * steps / DRAWS**0.5


def two_ids(steps: int) -> Model:
    return Model({"V": 2, "kind": "iid", "start": [0, 0], "p": [1 / 3, 2 / 3], "q": [2 / 3, 1 / 3]})


@pytest.mark.parametrize(
    "rule, expected",
    [
        ("token", {1: 2 / 3, 2: 10 / 9, 3: 1.407407, 10: 1.965317}),
        ("block", {1: 2 / 3, 2: 11 / 9, 3: 1.666667, 10: 3.459347}),
        ("hsd", {2: 11 / 9, 3: 1.666667}),
        ("coupled", {1: 2 / 3, 2: 10 / 9, 3: 1.407407, 10: 1.965317}),
    ],
)
def test_expected_accepted(rule: str, expected: dict[int, float]) -> None:
    draws = 1 << 15
    for steps, mean in expected.items():
        model, keys = two_ids(steps), keys_of(draws, seed=steps)
        stream = Stream.COUPLED if rule == "coupled" else None
        draft = draw_chain(model, steps, keys, stream)
        verdict = verify_reference(
            target_rows(model, draft.tokens), draft, ones(draws), keys, rule=rule
        )
        accepted = verdict.num_accepted.double()
        assert abs(accepted.mean() - mean) < 5 * accepted.std() / draws**0.5


def test_coupled_matches_and_is_plain_sampling() -> None:
    """Match probability exact; the text is the target's own Gumbel sample, draft or no draft."""
    case = GOLDEN["markov1-V5-K3"]
    model, steps, draws = Model(case), 3, 1 << 16
    keys = keys_of(draws, seed=3)
    draft = draw_chain(model, steps, keys, Stream.COUPLED)
    verdict = verify_reference(
        target_rows(model, draft.tokens), draft, ones(draws), keys, rule="coupled"
    )
    start = model.context(torch.zeros((1, 0), dtype=torch.int64))
    match = oracles.coupled_match(
        model.p.view(-1, 5)[start[0]].exp().numpy(), model.q.view(-1, 5)[start[0]].exp().numpy()
    )
    first = (verdict.num_accepted > 0).double().mean()
    assert abs(first - match) < 5 * (match * (1 - match) / draws) ** 0.5
    some = 1 << 13
    few = Keys(keys.seed[:some], keys.base[:some])
    text = torch.zeros((some, 0), dtype=torch.int64)
    for i in range(steps + 1):
        plain = saguaro_sample(
            model.rows(model.p, text), ones(some), few, offset=i, stream=Stream.COUPLED,
            impl="reference",
        ).tokens  # fmt: skip
        text = torch.cat((text, plain[:, None]), 1)
    tokens = verdict.tokens[:some]
    assert torch.equal(tokens[tokens >= 0], text[tokens >= 0])


# -- filters and the scaled set --------------------------------------------------------------------


def filtered_sampling(draws: int, name: str) -> Sampling:
    top_k = torch.full((draws,), 2, dtype=torch.int32) if name == "top-k" else None
    top_p = torch.full((draws,), 0.9) if name == "top-p" else None
    min_p = torch.full((draws,), 0.3) if name == "min-p" else None
    return Sampling(torch.full((draws,), 0.8), top_k, top_p, min_p)


def iid_round(
    rule: str, draws: int, sampling: Sampling, seed: int, scale: float | None = None
) -> tuple[torch.Tensor, Draft, torch.Tensor, Keys]:
    """(target logits, draft, tokens, keys) of a K = 2 round on P_ROW and Q_ROW.

    q is what saguaro_sample says it is; `scale` is C of the two largest ids.
    """
    keys = keys_of(draws, seed)
    logits = logs(Q_ROW)[None]
    row = Sampling(*(v if v is None else v[:1] for v in vars(sampling).values()))
    c = None if scale is None else torch.tensor([scale])
    sample = saguaro_sample(
        logits, row, Keys(keys.seed[:1], keys.base[:1]), offset=0, impl="reference",
        scheme="plain" if c is None else "downweight", scale_f=0 if c is None else 2, downweight=c,
    )  # fmt: skip
    names = ("cutoff", "cutoff_id", "scale_logit", "scale_id")
    edges = {name: getattr(sample, name) for name in names}
    log_q = log_prob_reference(logits, row.temperature, lse=sample.lse, downweight=c, **edges)
    generator = torch.Generator().manual_seed(seed)
    token, logq = draw(log_q.expand(2 * draws, -1), generator, keys, 0, None)
    if rule == "coupled":
        noisy = [draw(log_q.expand(draws, -1), generator, keys, i, Stream.COUPLED) for i in (0, 1)]
        token, logq = (torch.stack(pair, 1) for pair in zip(*noisy, strict=True))
    draft = Draft(
        token.view(draws, 2),
        torch.full((draws,), 2, dtype=torch.int32),
        logits.expand(draws, 2, 6),
        logq=logq.view(draws, 2),
        sampling=sampling,
        downweight=None if c is None else c.expand(draws),
        **{name: value.expand(draws, 2) for name, value in edges.items()},
    )
    target = logs(P_ROW).expand(draws, 3, 6)
    return target, draft, verify_reference(target, draft, sampling, keys, rule=rule).tokens, keys


@pytest.mark.parametrize(
    "name, rule",
    [
        ("top-k", "token"),
        ("top-k", "block"),
        ("top-p", "token"),
        ("top-p", "block"),
        ("min-p", "coupled"),
    ],
)
def test_filters_on_both_sides(name: str, rule: str) -> None:
    *_, tokens, _ = iid_round(rule, DRAWS, filtered_sampling(DRAWS, name), seed=4)
    filters = {"top-k": {"top_k": 2}, "top-p": {"top_p": 0.9}, "min-p": {"min_p": 0.3}}[name]
    law = oracles.row_law(logs(P_ROW).numpy(), 0.8, **filters)
    assert oracles.follows(*iid_counts(tokens, law, 4))


def test_unfiltered_q_is_caught() -> None:
    """Raw logits kept for q while filtered ones were sampled."""
    sampling = filtered_sampling(DRAWS, "top-k")
    target, draft, _, keys = iid_round("token", DRAWS, sampling, seed=4)
    whole = (draft.logits / 0.8).log_softmax(-1).gather(2, draft.tokens[..., None])[..., 0]
    wrong = dataclasses.replace(draft, cutoff=None, cutoff_id=None, logq=whole)
    law = oracles.row_law(logs(P_ROW).numpy(), 0.8, top_k=2)
    tokens = verify_reference(target, wrong, sampling, keys, rule="token").tokens
    assert not oracles.follows(*iid_counts(tokens, law, 4))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("scale", [0.4, 0.0])
def test_scaled_drafts(rule: str, scale: float) -> None:
    """The q of a downweighted draft is the scaled one; without the scaling the law is wrong."""
    sampling = ones(DRAWS)
    target, draft, tokens, keys = iid_round(rule, DRAWS, sampling, seed=6, scale=scale)
    law = oracles.row_law(logs(P_ROW).numpy())
    assert oracles.follows(*iid_counts(tokens, law, 6))
    unscaled = draft.logits.log_softmax(-1).gather(2, draft.tokens[..., None])[..., 0]
    wrong = dataclasses.replace(draft, downweight=None, logq=unscaled)
    tokens = verify_reference(target, wrong, sampling, keys, rule=rule).tokens
    assert not oracles.follows(*iid_counts(tokens, law, 6))


# -- controls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
def test_extra_under_the_drafts_noise_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One Gumbel vector for drafting and recovery."""
    case = GOLDEN["markov2-V4-K2"]
    model, keys = Model(case), keys_of(DRAWS, seed=1)
    draft = draw_chain(model, 2, keys, Stream.DRAFT)
    shared = types.SimpleNamespace(ACCEPT=Stream.ACCEPT, EXTRA=Stream.DRAFT, COUPLED=Stream.COUPLED)
    monkeypatch.setattr(reference, "Stream", shared)
    verdict = verify_reference(
        target_rows(model, draft.tokens), draft, ones(DRAWS), keys, rule=rule
    )
    assert not oracles.follows(text_counts(model, verdict.tokens, 1), case["target_joint"])


def test_one_hot_drafts_and_accept_if_argmax() -> None:
    """A deterministic draft is kept with probability p(d), not iff it is the argmax."""
    draws, keys = DRAWS, keys_of(DRAWS, seed=8)
    token = torch.full((draws, 2), 3)
    draft = Draft(token, torch.full((draws,), 2, dtype=torch.int32))
    target, law = logs(P_ROW).expand(draws, 3, 6), np.array(P_ROW)
    for rule in ("token", "block"):
        verdict = verify_reference(target, draft, ones(draws), keys, rule=rule)
        assert oracles.follows(*iid_counts(verdict.tokens, law, 8))
        # Of a one-hot draft the first token is kept with probability p(d).
        first = (verdict.tokens[:, 0] == 3).double().mean()
        assert abs(first - 0.25) < 5 * (0.25 * 0.75 / draws) ** 0.5
    refused = torch.full((draws, 2), 1.0)
    never = verify_reference(target, draft, ones(draws), keys, rule="token", uniforms=refused)
    assert not oracles.follows(*iid_counts(never.tokens, law, 8))


def test_uncapped_last_ratio_is_caught() -> None:
    """h_K from the product of all ratios, not capped on the way."""
    steps, draws = 2, DRAWS
    model, keys = two_ids(steps), keys_of(draws, seed=9)
    draft = draw_chain(model, steps, keys)
    target = target_rows(model, draft.tokens)
    picked = target[:, :steps].log_softmax(-1).gather(2, draft.tokens[..., None])[..., 0]
    uniforms = torch.rand((draws, steps), generator=torch.Generator().manual_seed(9))
    uncapped = uniforms[:, -1].log() < (picked - draft.logq).sum(1)
    wrong = uniforms.clone()
    wrong[uncapped, -1] = 0.0
    law = np.array([1 / 3, 2 / 3])
    results = {}
    for name, u in (("capped", uniforms), ("uncapped", wrong)):
        verdict = verify_reference(target, draft, ones(draws), keys, rule="block", uniforms=u)
        results[name] = oracles.follows(*iid_counts(verdict.tokens, law, 9))
        mean = {"capped": 11 / 9, "uncapped": 12 / 9}[name]
        assert abs(verdict.num_accepted.double().mean() - mean) < 0.02
    assert results == {"capped": True, "uncapped": False}


def test_position_keyed_uniforms_are_caught() -> None:
    """With block, u of positions beyond k + 1 has shaped k: it may not be used again next round."""
    control = next(
        c for c in oracles.load_controls() if c["control"] == "accept abs" and c["rule"] == "block"
    )
    model = Model({**control, "kind": "markov2", "start": control["markov2_start"]})
    steps, draws = control["K"], 1 << 15
    first, last = control["slice_first_last_token"]
    length = 2 * (steps + 1)
    generator = torch.Generator().manual_seed(10)
    by_position = torch.rand((draws, length + steps), generator=generator)
    fresh = torch.rand((draws, length, steps), generator=generator)
    results = {}
    for wrong in (False, True):
        text = torch.zeros((draws, 0), dtype=torch.int64)
        filled = torch.full((draws, length), -1)
        done = torch.zeros(draws, dtype=torch.int64)
        for turn in range(2):
            u = by_position.gather(1, done[:, None] + torch.arange(steps))
            u = u if wrong else fresh[:, turn]
            verdict, k = _round(model, filled, done, u, turn)
            position = done[:, None] + torch.arange(steps + 1)
            inside = torch.arange(steps + 1) <= k[:, None]
            rows = torch.arange(draws)[:, None].expand_as(position)
            filled[rows[inside], position[inside]] = verdict[inside]
            done += k + 1
        text = filled[:, :last]
        counts = text_counts(model, text, 10)
        law = _text_law(model, last)
        slices = (model.vocab,) * (first - 1) + (model.vocab ** (last - first + 1),)
        results[wrong] = oracles.follows(
            counts.reshape(slices).reshape(-1, slices[-1]).sum(0),
            law.reshape(slices).reshape(-1, slices[-1]).sum(0),
        )
    assert results == {False: True, True: False}


def _round(
    model: Model, filled: torch.Tensor, done: torch.Tensor, uniforms: torch.Tensor, turn: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block round after each row's own text: (tokens [N, K+1], k [N])."""
    draws, steps = uniforms.shape
    start = torch.tensor(model.start).expand(draws, 2)
    text = torch.cat((start, filled), 1)
    last = text.gather(1, done[:, None] + torch.arange(2))
    keys = keys_of(draws, seed=20 + turn, base=turn)
    generator = torch.Generator().manual_seed(20 + turn)
    tokens, rows, logq, target = last, [], [], []
    for i in range(steps + 1):
        context = tokens[:, -2] * model.vocab + tokens[:, -1]
        target.append(model.p.view(-1, model.vocab)[context])
        if i < steps:
            rows.append(model.q.view(-1, model.vocab)[context])
            token, log_q = draw(rows[-1], generator)
            logq.append(log_q)
            tokens = torch.cat((tokens, token[:, None]), 1)
    draft = Draft(
        tokens[:, 2:],
        torch.full((draws,), steps, dtype=torch.int32),
        torch.stack(rows, 1),
        logq=torch.stack(logq, 1),
        sampling=ones(draws),
    )
    verdict = verify_reference(
        torch.stack(target, 1), draft, ones(draws), keys, rule="block", uniforms=uniforms
    )
    return verdict.tokens, verdict.num_accepted.long()


def _text_law(model: Model, length: int) -> np.ndarray:
    """Law of the first `length` tokens of a two-token Markov target."""
    law = {tuple(model.start): 1.0}
    table = model.p.exp().double().view(-1, model.vocab)
    for _ in range(length):
        law = {
            (*text, x): mass * float(table[text[-2] * model.vocab + text[-1], x])
            for text, mass in law.items()
            for x in range(model.vocab)
        }
    return np.array([law[text] for text in sorted(law)])
