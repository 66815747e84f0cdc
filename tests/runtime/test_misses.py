"""What a row does after an outcome nobody predicted: its law, its neighbours, its keys."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import scripts
import torch

import oracles
from saguaro_kernels.verification import Verdict
from saguaro_runtime import SamplingParams
from saguaro_runtime.branches import Branches
from saguaro_runtime.drafting import Drafter
from saguaro_runtime.expectations import Predictor
from saguaro_runtime.policy import Policy, decide
from saguaro_runtime.round import Turn

ROWS = 256
P = scripts.random_law(4, seed=1)
Q = scripts.random_law(4, seed=2, near=P)
FALLBACKS = [
    ("batched_retry", "none"),
    ("immediate_retry", "none"),
    ("partial_accept", "none"),
    ("partial_accept", "ngram"),
    ("partial_accept", "replay"),
    ("independent", "none"),
]


def _engine(p: torch.Tensor, q: torch.Tensor, **options: object):
    defaults = {"max_batch": ROWS, "max_tokens": ROWS * 128, "reproducible": False}
    return scripts.engine(scripts.model(p, ROWS), scripts.model(q, ROWS), **(defaults | options))


def _next_round_p_value(p: torch.Tensor, outputs: list, start: list[int]) -> tuple[float, Counter]:
    """The least p-value of the tokens that begin a round, given the two before and hit or miss."""
    vocab = p.shape[1]
    tokens: dict[tuple[int, int, str], Counter[int]] = defaultdict(Counter)
    rounds: Counter[str] = Counter()
    for output in outputs:
        text = [*start, *output.token_ids]
        for its in output.rounds[1:]:
            asked = "hit" if its.source == "hit" else "miss"
            rounds[asked] += 1
            rounds[asked, its.drafted > 0] += 1
            a, b, following = text[its.base - 2 : its.base + 1]
            tokens[a, b, asked][following] += 1
    values = [
        oracles.chi_square_p(
            np.array([found[token] for token in range(vocab)]), p[a * vocab + b].numpy()
        )
        for (a, b, _), found in tokens.items()
    ]
    return min(values), rounds


@pytest.mark.parametrize(
    ("rule", "fallback", "proposal"),
    [
        ("block", "partial_accept", "none"),
        ("block", "partial_accept", "ngram"),
        ("block", "partial_accept", "replay"),
        ("block", "independent", "none"),
        ("token", "immediate_retry", "none"),
        ("token", "partial_accept", "ngram"),
    ],
)
def test_next_round_has_the_law_given_hit_and_given_miss(
    rule: str, fallback: str, proposal: str
) -> None:
    """Whether a round hit depends on its own tokens, never on the next round's."""
    options = {"rule": rule, "fallback": fallback, "proposal": proposal, "ranking": "noise"}
    with _engine(P, Q, k=3, branches=4, allocation="uniform", **options) as engine:
        params = [scripts.sampled(seed, 40) for seed in range(96)]
        outputs = engine.generate([[0, 1]] * len(params), params)
    value, rounds = _next_round_p_value(P, outputs, [0, 1])
    assert value > oracles.ALPHA
    assert min(rounds["hit"], rounds["miss"]) > 120
    drafts = fallback != "partial_accept" or proposal != "none"
    assert (rounds["miss", True] > 50) == drafts


@pytest.mark.parametrize(("fallback", "proposal"), FALLBACKS[3:])
def test_first_tokens_follow_the_golden_law(fallback: str, proposal: str) -> None:
    case = oracles.load_golden()["markov2-V4-K2"]
    p, q = (scripts.law_of_two(case[law], case["V"]) for law in "pq")
    options = {"fallback": fallback, "proposal": proposal, "ranking": "probability"}
    with _engine(p, q, k=case["K"], branches=1, allocation="histogram", **options) as engine:
        tokens = scripts.texts(engine, case["start"], 768, case["L"])
        assert engine.stats()["misses"] > 80
    counts = scripts.joint(tokens, case["V"])
    assert oracles.follows(counts, np.array(case["target_joint"]))


def test_downweighted_drafts_keep_the_law() -> None:
    case = oracles.load_golden()["markov2-V4-K2"]
    p, q = (scripts.law_of_two(case[law], case["V"]) for law in "pq")
    options = {"downweight": 0.3, "ranking": "probability", "rule": "block"}
    with _engine(p, q, k=case["K"], branches=3, **options) as engine:
        tokens = scripts.texts(engine, case["start"], 768, case["L"])
        assert engine.stats()["hits"] > 80
    counts = scripts.joint(tokens, case["V"])
    assert oracles.follows(counts, np.array(case["target_joint"]))


def test_accepting_a_proposal_if_it_is_the_argmax_is_caught() -> None:
    """Wrong: a proposal nobody drew is kept where it is the target's likeliest token."""
    with _engine(P, Q, k=3, branches=2, fallback="partial_accept", proposal="ngram") as engine:
        verify = engine.verifier.verify

        def by_argmax(turn, draft, sampling, keys, *rest):
            judged = verify(turn, draft, sampling, keys, *rest)
            if not draft.tokens.shape[1]:
                return judged
            own = engine.lane.chain.one_hot[turn.rows] & (draft.num_draft > 0)
            first = torch.stack([turn.last, draft.tokens[:, 0].clamp(min=0)], 1)
            last_two = engine.model.tokens[turn.rows, turn.base - 2] * 4 + first[:, 0]
            kept = own & (P[last_two].argmax(-1) == first[:, 1])
            tokens = judged.verdict.tokens.masked_fill(own[:, None], -1)
            accepted = torch.where(own, kept.int(), judged.verdict.num_accepted)
            noise = torch.rand(len(own), 4, generator=generator)
            here = torch.where(kept, first[:, 0] * 4 + first[:, 1], last_two)
            extra = (P[here].log() - (-noise.log()).log()).argmax(-1)
            tokens = torch.where(own[:, None], tokens, judged.verdict.tokens)
            tokens[kept, 0] = first[kept, 1]
            tokens[own, accepted[own].long()] = extra[own]
            verdict = Verdict(accepted, tokens, judged.verdict.status)
            return judged._replace(verdict=verdict)

        generator = torch.Generator().manual_seed(0)
        engine.verifier.verify = by_argmax
        params = [scripts.sampled(seed, 40) for seed in range(128)]
        outputs = engine.generate([[0, 1]] * len(params), params)
    assert _next_round_p_value(P, outputs, [0, 1])[0] < oracles.ALPHA


def _replay_of_another_length(self: Branches, turn: Turn) -> torch.Tensor:
    """Wrong: a branch that was drawn for a later base."""
    rows = turn.rows
    other = self.predictor.depth[rows] == turn.accepted[:, None] + 1
    other &= (self._base[rows] == turn.base - turn.accepted - 1)[:, None]
    first = torch.where(other, torch.arange(self.count), self.count).amin(1)
    chain = self.drafter.chain
    chain.take(rows, self.store, (rows, first.clamp(max=self.count - 1)))
    return torch.where(first < self.count, chain.num_draft[rows], 0)


@pytest.mark.parametrize("wrong", [True, False], ids=["another length", "same length"])
def test_replaying_another_length_is_caught(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused proposal drawn for the next base tells what will be drafted there: not the token
    before. Every other round redrafts its misses, under the noise that was used up."""
    if wrong:
        monkeypatch.setattr(Branches, "replay", _replay_of_another_length)
    rounds = iter(range(10**6))

    def alternate(self: Policy, batch: int, temperatures: Sequence[float] = ()):
        decision = decide(self.config, batch)
        return decision._replace(retry=0 if next(rounds) % 2 else self.config.k)

    monkeypatch.setattr(Policy, "decide", alternate)
    p = scripts.law_of_two([[1 / 6] * 6], 6)
    q = scripts.law_of_two([[0.3, 0.3, 0.3, 0.04, 0.03, 0.03]], 6)
    options = {"fallback": "partial_accept", "proposal": "replay", "ranking": "probability"}
    with _engine(p, q, k=3, branches=3, allocation="uniform", **options) as engine:
        params = [scripts.sampled(seed, 24) for seed in range(200)]
        outputs = engine.generate([[0, 0]] * len(params), params)
    same = total = 0
    for output in outputs:
        text = [0, 0, *output.token_ids]
        for its, following in zip(output.rounds, output.rounds[1:], strict=False):
            if its.source == "miss" and its.drafted and its.committed == 1:
                total += 1
                same += text[following.base] == text[following.base - 1]
    z = (same - total / 6) / np.sqrt(total * 5 / 36)
    assert total > 500
    assert (z < -4.5) if wrong else (abs(z) < 3.5)


def _predict_wrongly_at_times(self: Predictor, turn: Turn, drafter: Drafter):
    """A scripted ranking: in some rounds the one outcome prepared is not the likeliest."""
    depth, extra = predict(self, turn, drafter)
    wrong = (turn.base * 7 + turn.rows * 3) % 5 < 2
    return depth, torch.where(wrong[:, None], (extra + 1) % drafter.vocab_size, extra)


predict = Predictor.predict


@pytest.mark.parametrize(("fallback", "proposal"), FALLBACKS[:1] + FALLBACKS[2:4] + FALLBACKS[5:])
def test_keys_never_drift(fallback: str, proposal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft = target: after any mixture of hits and misses its chains are accepted in full."""
    monkeypatch.setattr(Predictor, "predict", _predict_wrongly_at_times)
    law = scripts.random_law(5, seed=3)
    greedy = SamplingParams(max_new_tokens=420, temperature=0.0)
    options = {"fallback": fallback, "proposal": proposal, "branches": 1, "max_batch": 4}
    with _engine(law, law, k=3, **options) as engine:
        outputs = engine.generate([[1, 2], [0, 3, 4], [2, 2]], greedy)
        stats = engine.stats()
    assert stats["rounds"] > 300 and min(stats["hits"], stats["misses"]) > 80
    for output in outputs:
        for its in output.rounds[1:-1]:
            if its.source == "hit" or proposal == "none":
                assert its.committed == its.drafted + 1


def test_rows_sit_out_while_the_others_go_on() -> None:
    options = {"fallback": "independent", "ranking": "probability", "max_batch": 8}
    with _engine(P, Q, k=3, branches=2, **options) as engine:
        requests = [engine.add([1, 2], scripts.sampled(seed, 60)) for seed in range(8)]
        waited = 0
        engine.step()
        for _ in range(12):
            before = [len(request.rounds) for request in requests]
            engine.step()
            went = [len(r.rounds) - b for r, b in zip(requests, before, strict=True)]
            assert 1 <= sum(went) <= 8
            waited += 8 - sum(went)
        rounds = [round for request in requests for round in request.rounds[1:]]
    misses = [round for round in rounds if round.source == "miss"]
    assert waited >= len(misses) > 10
    assert all(round.drafted == 3 for round in rounds)


def test_every_fallback_gives_the_same_greedy_text() -> None:
    greedy = SamplingParams(max_new_tokens=40, temperature=0.0)
    prompts = [[1, 2], [3, 0, 1], [2]]
    with _engine(P, Q, method="ar", max_batch=4) as engine:
        wanted = [output.token_ids for output in engine.generate(prompts, greedy)]
    for fallback, proposal in FALLBACKS:
        options = {"fallback": fallback, "proposal": proposal, "branches": 2, "max_batch": 4}
        with _engine(P, Q, **options) as engine:
            assert [o.token_ids for o in engine.generate(prompts, greedy)] == wanted


def test_sitting_out_across_processes(no_leaks: None) -> None:
    """The row that sits out is redrafted in shared memory while the others are being read."""
    texts = {}
    for lane in ("inline", "process"):
        options = {"lane": lane, "fallback": "independent", "k": 3, "branches": 3, "max_batch": 4}
        with _engine(P, Q, **options) as engine:
            params = [scripts.sampled(seed, 60) for seed in range(4)]
            outputs = engine.generate([[1, 2]] * 4, params)
            texts[lane] = [output.token_ids for output in outputs]
            assert engine.stats()["misses"] > 5
    assert texts["inline"] == texts["process"]
