"""Random schedules: requests join, stop, leave and are cancelled between rounds, in any order.

`python tests/runtime/test_schedules.py 2000` (from the root, tests on PYTHONPATH) runs as many.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import faulty
import scripts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from saguaro_runtime import Engine, Request, SamplingParams
from saguaro_runtime.lanes import process
from saguaro_runtime.lanes.child import Lost

V, MOST = 5, 26
P = scripts.random_law(V, seed=1)
Q = scripts.random_law(V, seed=2, near=P)
PROMPTS = ((1,), (1, 2), (0, 3, 4, 4, 1, 2, 0))

Asked = tuple[tuple[int, ...], SamplingParams]


@functools.cache
def _wanted(prompt: tuple[int, ...], temperature: float, seed: int, rule: str, k: int) -> list[int]:
    """The request's text alone: by plain decoding, or by SD where the rule depends on drafts."""
    method = "ar" if rule == "coupled" else "sd"
    params = SamplingParams(MOST, temperature, seed=seed)
    options = {"method": method, "rule": rule, "k": k}
    with scripts.engine(scripts.model(P), scripts.model(Q), **options) as engine:
        return engine.generate(list(prompt), params)[0].token_ids


def _expected(prompt: tuple[int, ...], params: SamplingParams, rule: str, k: int) -> list[int]:
    text = _wanted(prompt, params.temperature, params.seed, rule, k)[: params.max_new_tokens]
    stops = [at for at, token in enumerate(text) if token in params.stop_token_ids]
    return text[: stops[0] + 1] if stops else text


ASKED = st.tuples(
    st.sampled_from(PROMPTS),
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(0, MOST),
        temperature=st.sampled_from((0.0, 1.0)),
        seed=st.integers(0, 3),
        stop_token_ids=st.sampled_from(((), (3,))),
    ),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ASKED),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=14,
)
ENGINES = st.one_of(
    st.fixed_dictionaries({
        "rule": st.sampled_from(("token", "block")), "reproducible": st.just(True),
        "method": st.sampled_from(("sd", "ssd")),
    }),
    st.fixed_dictionaries({
        "rule": st.just("coupled"), "reproducible": st.just(False),
        "fallback": st.sampled_from(
            ("auto", "immediate_retry", "batched_retry", "partial_accept", "independent")
        ),
        "proposal": st.sampled_from(("ngram", "replay", "none")),
        "lane": st.sampled_from(("inline", "process")),
    }),
)  # fmt: skip
SIZES = st.fixed_dictionaries({
    "max_batch": st.integers(1, 3), "max_tokens": st.sampled_from((40, 90)),
    "k": st.integers(1, 4), "branches": st.integers(1, 5), "prefill_chunk": st.integers(1, 8),
})  # fmt: skip


@contextlib.contextmanager
def _engine(options: dict[str, Any], seed: int) -> Iterator[Engine]:
    """Behind a process lane the draft dies now and then."""
    dice = random.Random(seed)

    def dies(message: Any, answer: Any) -> Any:
        if dice.random() < 0.05:
            raise Lost("killed")
        return answer

    patience = iter([0])  # the engine waits for the first start alone

    def start(setup: Any, **_: Any) -> faulty.LocalChild:
        return faulty.LocalChild(setup, dies, next(patience, dice.randrange(3)))

    options = {"draft_restarts": 1000} | options
    with (
        mock.patch.object(process, "Child", start),
        scripts.engine(scripts.model(P), scripts.model(Q), **options) as engine,
    ):
        yield engine


def check(events: list[Any], options: dict[str, Any], sizes: dict[str, int], seed: int) -> None:
    """Run a schedule to its end and compare everything."""
    requests: list[tuple[Asked, Request]] = []
    cancelled: set[int] = set()
    with _engine(options | sizes, seed) as engine:
        for kind, value in events:
            if kind == "add":
                requests.append((value, engine.add(list(value[0]), value[1])))
            elif kind == "step":
                for _ in range(value):
                    engine.step()
            elif value < len(requests):
                request = requests[value][1]
                if request.finish_reason is None:
                    cancelled.add(request.uid)
                engine.cancel(request)
                engine.cancel(request)
            load = engine.scheduler.load()
            rows = load["running"] + load["prefilling"]
            assert load["slots_used"] <= sizes["max_tokens"] and rows <= sizes["max_batch"]
            assert len(engine.model.held) <= rows
        for _ in range(20 * MOST):
            if not any(request.finish_reason is None for _, request in requests):
                break
            engine.step()
        stats, load = engine.stats(), engine.scheduler.load()
        assert load["running"] == load["waiting"] == load["slots_used"] == 0
        assert engine.model.held == set()
        if options.get("lane") != "process":
            assert engine.lane.speculator.model.held == set()
    for (prompt, params), request in requests:
        text = _expected(prompt, params, options["rule"], sizes["k"])
        if request.uid in cancelled:
            assert request.finish_reason == "cancelled"
            assert request.token_ids == text[: len(request.token_ids)] != text
        else:
            assert request.token_ids == text
            stopped = bool(text) and text[-1] in params.stop_token_ids
            assert request.finish_reason == ("stop" if stopped else "length")
        assert sum(round.committed for round in request.rounds) == len(request.token_ids)
        counts = request.counts
        assert counts.accepted <= counts.drafted and counts.rounds == len(request.rounds)
        assert counts.hits + counts.misses == sum(
            round.source in ("hit", "miss") for round in request.rounds
        )
    for name in ("tokens", "rounds", "drafted", "accepted", "hits", "misses"):
        assert stats[name] == sum(getattr(its.counts, name) for _, its in requests)
    assert sum(stats["ended"].values()) == len(requests)


QUICK = settings(
    max_examples=20, deadline=None, derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure takes minutes: ask for it
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
test_any_schedule_gives_every_request_its_text = QUICK(
    given(events=EVENTS, options=ENGINES, sizes=SIZES, seed=st.integers(0, 99))(check)
)


if __name__ == "__main__":
    thorough = settings(QUICK, max_examples=int(sys.argv[1]), derandomize=False, phases=list(Phase))
    thorough(given(events=EVENTS, options=ENGINES, sizes=SIZES, seed=st.integers(0, 99))(check))()
    print(f"{sys.argv[1]} schedules: every text right, nothing left")
