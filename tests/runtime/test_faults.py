"""A drafter that is slow, dead or wrong costs speed, never tokens; nothing is left behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import faulty
import numpy as np
import pytest
import scripts
import tiny_models
import torch

from saguaro_runtime import (
    ConfigError,
    Engine,
    EngineConfig,
    SaguaroError,
    SamplingParams,
)
from saguaro_runtime.lanes import InlineLane, process
from saguaro_runtime.lanes.child import Child, Lost
from saguaro_runtime.lanes.worker import showing_life
from saguaro_runtime.models.attention import paged_attention
from saguaro_runtime.models.scripted import ScriptedModel
from saguaro_runtime.policy import Policy
from saguaro_runtime.round import RowTable
from saguaro_runtime.scheduler import Scheduler
from saguaro_runtime.speculator import Speculator
from saguaro_runtime.verifier import Verifier

P = scripts.random_law(5, seed=1)
Q = scripts.random_law(5, seed=2, near=P)
GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0)


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    with scripts.engine(scripts.model(P), None, method="ar") as engine:
        return engine.generate([1, 2], GREEDY)[0].token_ids


def _steps(engine: Engine, count: int):
    request = engine.add([1, 2], GREEDY)
    for _ in range(count):
        engine.step()
    return request


def _finish(engine: Engine, request) -> list[int]:
    while request.finish_reason is None:
        engine.step()
    return request.token_ids


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_failed_draft_process_is_started_again(
    wanted: list[int], fault: signal.Signals, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go on undrafted meanwhile; then it knows their texts, and outcomes hit again."""
    monkeypatch.setattr(process, "_STILL_S", 0.5)
    monkeypatch.setattr(process, "_DEAD_S", 1.0)
    target, draft = scripts.model(P, slots=30100, extend_s=0.01), scripts.model(Q, slots=30500)
    with scripts.engine(
        target, draft, lane="process", branches=4, max_tokens=30100, draft_timeout_s=0.2
    ) as engine:
        request, first = engine.add([1, 2], SamplingParams(max_new_tokens=30000)), engine.lane.pid
        for _ in range(4):
            engine.step()
        os.kill(first, fault)
        while engine.lane.pid == first or request.rounds[-1].source != "hit":
            engine.step()
            assert request.finish_reason is None, engine.stats()["speculation"]
            if engine.lane.pid != first and engine.lane.status != "on":
                assert engine.lane.status.startswith("starting again: the draft process")
        engine.cancel(request)
        stats = engine.stats()
    assert request.token_ids[: len(wanted)] == wanted
    assert stats["speculation"] == "on" and len(stats["draft_faults"]) == 1
    reason = "exit code -9" if fault is signal.SIGKILL else "no sign of life"
    assert reason in stats["draft_faults"][0]


def test_a_process_that_stops_amid_a_message_or_sends_garbage_is_lost() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
    child = Child.__new__(Child)
    child._listen(Connection(ours.detach()))
    child._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        sender = Connection(theirs.detach())
        assert child.receive(0.01) is None
        sender.send_bytes(b"\x80no message")
        with pytest.raises(Lost, match="garbage"):
            child.receive(1.0)
        os.write(sender.fileno(), (100).to_bytes(4, "big") + b"half")
        with pytest.raises(Lost, match="does not listen"):
            child.receive(1.0)
        with pytest.raises(Lost, match="does not listen"):
            child.send(bytes(10**7))
    finally:
        child._process.communicate()


def test_a_draft_process_that_keeps_dying_is_given_up(
    wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(message: Any, answer: Any) -> Any:
        raise Lost("the draft process ended (exit code -9)")

    started = faulty.local_children(monkeypatch, dies)
    with scripts.engine(scripts.model(P), scripts.model(Q), lane="process") as engine:
        assert engine.generate([1, 2], GREEDY)[0].token_ids == wanted
        stats = engine.stats()
    assert stats["speculation"] == "the draft process ended (exit code -9)"
    assert len(started) == len(stats["draft_faults"]) == 6  # the first and five more


def _raise(error: Exception) -> Any:
    raise error


TROUBLE = {
    "nothing": lambda message, answer: None,
    "an old answer": lambda message, answer: ("chain", message[1] - 1, *answer[2:]),
    "wrong shape": lambda message, answer: (*answer[:2], np.zeros(7, bool), answer[3]),
    "wrong type": lambda message, answer: (*answer[:2], answer[2].astype(int), answer[3]),
    "no tuple": lambda message, answer: 3,
    "half": lambda message, answer: answer[:2],
    "wrong spans": lambda message, answer: (*answer[:3], [1]),
    "unknown": lambda message, answer: ("shrug", answer[3]),
    "out of memory": lambda message, answer: _raise(MemoryError("no 3 GiB")),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_wrong_answers_leave_the_text(
    wanted: list[int], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then an answer that cannot be: its round goes undrafted, and drafting goes on."""

    def sometimes(message: Any, answer: Any) -> Any:
        its_turn = message[0] == "turn" and message[1] % 9 == 8
        return TROUBLE[trouble](message, answer) if its_turn else answer

    faulty.local_children(monkeypatch, sometimes)
    with scripts.engine(
        scripts.model(P), scripts.model(Q), lane="process", draft_timeout_s=0.01
    ) as engine:
        request = engine.add([1, 2], GREEDY)
        assert _finish(engine, request) == wanted
        stats = engine.stats()
    assert stats["speculation"] == "on"
    late = trouble in ("nothing", "an old answer")
    assert bool(stats["draft_faults"]) != late
    assert any(its.source == "hit" for its in request.rounds[9:])


PLAIN = [SamplingParams(30 + 4 * its, temperature=its % 2, seed=its) for its in range(5)]
"""Five requests for three rows: some join and leave whatever else happens."""


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with scripts.engine(scripts.model(P), None, method="ar", rule="coupled") as engine:
        return [its.token_ids for its in engine.generate([[1, 2]] * len(PLAIN), PLAIN)]


ANSWERED = ("ready", "turn", "spans")
HANDOFFS = [
    (handoff, fault)
    for handoff in ("ready", "admit", "turn", "look ahead", "release", "spans")
    for fault in ("killed", "out of memory", "stalled", "garbage", "wrong shape")
    if handoff in ANSWERED or fault in ("killed", "out of memory", "stalled")
]
REASONS = {
    "killed": "exit code -9", "out of memory": "no 3 GiB",
    "garbage": "invalid", "wrong shape": "invalid",
}  # fmt: skip


@pytest.mark.parametrize(("handoff", "fault"), HANDOFFS)
def test_a_fault_at_any_hand_off_leaves_the_texts(
    plain: list[list[int]], handoff: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its second time: texts are those of plain decoding, the reason is told, hits go on."""
    monkeypatch.setattr(process, "_STILL_S", 0.02)
    passed, stalled_at = 0, 0

    def strikes(at: str) -> bool:
        nonlocal passed
        passed += at == handoff
        return at == handoff and passed == 2

    def fail(message: Any, answer: Any) -> Any:
        if fault == "killed":
            raise Lost("the draft process ended (exit code -9)")
        if fault == "out of memory":
            raise MemoryError("no 3 GiB")
        if fault == "stalled":
            started[-1].stalled = True
            return answer
        if fault == "garbage":
            return b"\x00"
        wrong = {"turn": np.zeros((3, 7), bool), "spans": [("draft", "verify", 0.0)]}
        return (*answer[:-1], wrong["spans"]) if handoff == "spans" else (
            *answer[:2], wrong["turn"], answer[3]
        )  # fmt: skip

    def trouble(message: Any, answer: Any) -> Any:
        return fail(message, answer) if strikes(message[0]) else answer

    def look_ahead(speculator: Speculator, *, late: bool = False) -> None:
        if strikes("look ahead"):
            fail(None, None)
        ahead(speculator, late=late)

    ahead = Speculator.look_ahead
    monkeypatch.setattr(Speculator, "look_ahead", look_ahead)
    started = faulty.local_children(monkeypatch, trouble)
    start = process.Child

    def second_fails(setup: Any, **options: Any) -> Any:
        child = start(setup, **options)
        if handoff == "ready" and len(started) == 2:
            said = {"killed": Lost(REASONS["killed"]), "out of memory": Lost("no 3 GiB"),
                    "garbage": b"\x00", "wrong shape": ("ready", 3)}  # fmt: skip
            child._answers = [said.get(fault, ("ready",))]
            child.stalled = fault == "stalled"
        return child

    monkeypatch.setattr(process, "Child", second_fails)
    with scripts.engine(
        scripts.model(P), scripts.model(Q), lane="process", rule="coupled", max_batch=3,
        draft_timeout_s=0.01,
    ) as engine:  # fmt: skip
        requests = [engine.add([1, 2], params) for params in PLAIN]
        steps = 0
        while any(its.finish_reason is None for its in requests):
            engine.step()
            steps += 1
            if steps == 4 and handoff == "ready":
                engine.lane._lose(Lost("killed"))
            if steps % 3 == 0:
                engine.stats()
            stalled_at = stalled_at or (steps if started[-1].stalled else 0)
            if stalled_at and steps == stalled_at + 8:
                started[-1].stalled = False
        stats, held = engine.stats(), started[-1]._speculator.model.held
    assert [its.token_ids for its in requests] == plain
    assert passed >= 2 or len(started) >= 2
    if fault == "stalled":
        assert stalled_at and stats["rounds_by_source"]["late"] > 0
    else:
        assert any(REASONS[fault] in its for its in stats["draft_faults"]), stats["draft_faults"]
    assert stats["speculation"].startswith(("on", "starting again")) and stats["hits"] > 0
    assert held == set()


def test_a_soak_with_random_deaths_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests join and leave all the time; the draft dies at any message."""
    dice = random.Random(1)

    def dies(message: Any, answer: Any) -> Any:
        if dice.random() < 0.05:
            raise Lost("killed")
        return answer

    started = faulty.local_children(monkeypatch, dies)
    prompts = [[dice.randrange(5) for _ in range(1 + index % 4)] for index in range(20)]
    params = [
        SamplingParams(dice.randrange(70), temperature=index % 2, seed=index) for index in range(20)
    ]
    texts = []
    for method in ("ar", "ssd"):
        with scripts.engine(
            scripts.model(P), scripts.model(Q), lane="process", method=method, rule="coupled",
            max_batch=4, branches=4, draft_restarts=1000,
        ) as engine:  # fmt: skip
            texts.append([its.token_ids for its in engine.generate(prompts, params)])
            stats = engine.stats()
    assert texts[0] == texts[1]
    assert stats["speculation"] == "on" and stats["hits"] > 50
    assert len(stats["draft_faults"]) == len(started) - 1 > 5


def test_a_draft_that_was_far_behind_is_told_the_texts_in_one_piece(
    wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing for 20 turns and then all at once; rows join and leave meanwhile."""
    held: list[Any] = []

    def waits(message: Any, answer: Any) -> Any:
        if message[0] == "turn" and 5 <= message[1] < 25:
            held.append(answer)
            return None
        return answer

    started = faulty.local_children(monkeypatch, waits)
    with scripts.engine(
        scripts.model(P), scripts.model(Q), lane="process", draft_timeout_s=0.01, max_batch=2
    ) as engine:
        short = [engine.add([1, 2], SamplingParams(count)) for count in (12, 7)]
        request = engine.add([1, 2], GREEDY)
        steps = 0
        while request.finish_reason is None:
            engine.step()
            steps += 1
            if steps == 40:
                started[0]._answers += held
        assert request.token_ids == wanted
        assert [its.token_ids for its in short] == [wanted[:12], wanted[:7]]
        stats, held_rows = engine.stats(), started[0]._speculator.model.held
    assert len(started) == 1 and not stats["draft_faults"]
    assert not any(its.source == "hit" for its in request.rounds[:20])
    assert [its.source for its in request.rounds[-8:]].count("hit") > 3
    assert held_rows == set()


INTERRUPTED = [
    (RowTable, "set"),
    (RowTable, "clear"),
    (SamplingParams, "without_functions"),
    (Speculator, "next_chain"),
    (Verifier, "verify"),
    (Scheduler, "commit"),
    (Policy, "observe"),
    (InlineLane, "release"),
]


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize(("owner", "method"), INTERRUPTED)
def test_ctrl_c_in_a_round_leaves_texts_and_rows(
    owner: Any, method: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever steps again gets the same texts. Only a request that is being prefilled may end, and
    says so."""
    prompts, params = [[1, 2, 3, 4, 0], [2], [0, 1]], [scripts.sampled(n, 12) for n in range(3)]
    options = {"rule": "coupled", "branches": 4, "max_batch": 2, "prefill_chunk": 3}
    with scripts.engine(scripts.model(P), None, method="ar", rule="coupled") as engine:
        texts = [output.token_ids for output in engine.generate(prompts, params)]
    calls, original = itertools.count(1), getattr(owner, method)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) in (first, first + 3):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, interrupted)
    interrupts = 0
    with scripts.engine(scripts.model(P), scripts.model(Q), **options) as engine:
        requests = [engine.add(*asked) for asked in zip(prompts, params, strict=True)]
        while any(request.finish_reason is None for request in requests):
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        engine.step()
        load = engine.scheduler.load()
        assert engine.model.held == engine.lane.speculator.model.held == set()
        assert engine.lane.off is None
    assert interrupts and not any(load[name] for name in ("running", "waiting", "slots_used"))
    for request, text in zip(requests, texts, strict=True):
        if request.finish_reason == "error":
            assert request.error.startswith("KeyboardInterrupt")
            assert request.token_ids == []
        else:
            assert request.token_ids == text


def test_rows_are_released_when_a_round_raises_after_their_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("observe failed")

    monkeypatch.setattr(Policy, "observe", fails)
    with scripts.engine(scripts.model(P), scripts.model(Q)) as engine:
        request = engine.add([1, 2], SamplingParams(1))
        with pytest.raises(RuntimeError, match="observe failed"):
            engine.step()
        assert request.finish_reason == "length"
        assert engine.model.held == engine.lane.speculator.model.held == set()


@pytest.mark.parametrize("at", ["send", "receive"])
def test_after_ctrl_c_answers_and_turns_are_matched_again(
    wanted: list[int], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a turn has been sent or an answer come: the draft process knows nothing of it."""
    faulty.local_children(monkeypatch)
    with scripts.engine(scripts.model(P), scripts.model(Q), lane="process") as engine:
        request = _steps(engine, 4)
        original = getattr(engine.lane._child, at)

        def interrupted(*arguments: Any) -> None:
            original(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(engine.lane._child, at, interrupted)
            engine.step()
        assert _finish(engine, request) == wanted
    assert [its.source for its in request.rounds[-8:]].count("hit") > 3


def test_a_fork_leaves_the_draft_process_alone(wanted: list[int], no_leaks: None) -> None:
    """What the fork drops of the engine, or ends with, is still its parent's."""
    with scripts.engine(scripts.model(P), scripts.model(Q), lane="process") as engine:
        request, pid = _steps(engine, 4), engine.lane.pid
        if not (fork := os.fork()):
            engine.lane._child._end()
            os._exit(0)
        os.waitpid(fork, 0)
        assert _finish(engine, request) == wanted
        assert engine.lane.pid == pid and not engine.lane.faults


def test_forwards_of_one_model_in_two_threads_end_in_any_order() -> None:
    """It is ours while one runs, and its owner's afterwards."""
    model = tiny_models.llama()
    config, before = model.config, model.config._attn_implementation
    first, second = paged_attention(model), paged_attention(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config._attn_implementation == "saguaro" != before
    second.__exit__(None, None, None)
    assert config._attn_implementation == before


def test_engines_closed_in_any_order_restore_the_threads() -> None:
    before = torch.get_num_threads()
    engines = [
        scripts.engine(scripts.model(P), scripts.model(Q), threads=before + count)
        for count in (3, 2, 1)
    ]
    for index, threads in ((1, before + 1), (0, before + 1), (2, before)):
        engines[index].close()
        assert torch.get_num_threads() == threads


def test_a_slow_draft_process_is_not_waited_for_round_after_round(
    wanted: list[int], no_leaks: None
) -> None:
    """Nor by those who ask for numbers meanwhile; what it answers late is not taken for new."""
    target, slow = scripts.model(P, extend_s=0.02), ScriptedModel(Q, extend_s=0.15)
    with scripts.engine(target, slow, lane="process", draft_timeout_s=0.1, branches=2) as engine:
        answer, waits = engine.lane._answer, []
        engine.lane._answer = lambda timeout_s: (waits.append(timeout_s), answer(timeout_s))[1]
        request = engine.add([1, 2], GREEDY)
        while request.finish_reason is None:
            engine.step()
            stats = engine.stats()
    assert request.token_ids == wanted
    assert 2 <= waits.count(0.1) <= 8 and len(request.rounds) > 30
    assert stats["speculation"] == "on" and not stats["draft_faults"]


@pytest.mark.parametrize("stall_s", [0.0, 5.0])
def test_a_draft_that_was_late_catches_up(stall_s: float, no_leaks: None) -> None:
    """A process that stood still for three rounds, and for five seconds of them."""
    params = SamplingParams(max_new_tokens=320)
    with scripts.engine(scripts.model(P), None, method="ar") as engine:
        wanted = engine.generate([1, 2], params)[0].token_ids
    with scripts.engine(
        scripts.model(P, extend_s=0.04 if stall_s else 0.02), scripts.model(Q), lane="process",
        draft_timeout_s=0.2,
    ) as engine:  # fmt: skip
        request, pid = engine.add([1, 2], params), engine.lane.pid
        for _ in range(3):
            engine.step()
        os.kill(pid, signal.SIGSTOP)
        until, rounds = time.monotonic() + stall_s, 0
        while rounds < 3 or time.monotonic() < until:
            engine.step()
            rounds += 1
        os.kill(pid, signal.SIGCONT)
        assert _finish(engine, request) == wanted
        assert engine.lane.pid == pid and not engine.lane.faults
        assert engine.stats()["rounds_by_source"]["late"] >= rounds - 1
        assert any(its.source == "hit" for its in request.rounds[rounds + 3 :])


class NaNs(ScriptedModel):
    """All its logits are NaN: those of single tokens, or of trees."""

    def __init__(self, law: torch.Tensor, method: str) -> None:
        super().__init__(law)
        self.method = method

    def extend(self, *args):
        return self._spoilt("extend", super().extend(*args))

    def decode_tree(self, *args):
        return self._spoilt("decode_tree", super().decode_tree(*args))

    def _spoilt(self, method: str, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, torch.nan) if method == self.method else logits


@pytest.mark.parametrize("lane", ["inline", "process"])
@pytest.mark.parametrize("method", ["extend", "decode_tree"])
def test_nan_logits_of_the_draft_leave_the_texts(
    plain: list[list[int]], method: str, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.local_children(monkeypatch)
    with scripts.engine(scripts.model(P), NaNs(Q, method), lane=lane, rule="coupled") as engine:
        outputs = engine.generate([[1, 2]] * len(PLAIN), PLAIN)
        stats = engine.stats()
    assert [its.token_ids for its in outputs] == plain
    assert stats["speculation"] == "on"
    assert stats["draft_faults"] == ["the draft's logits are NaN or all -inf at times"]


def test_nan_logits_of_the_target_end_the_request() -> None:
    target = scripts.model(P)
    with scripts.engine(target, scripts.model(Q)) as engine:
        request, other = engine.add([1, 2], GREEDY), engine.add([3, 4], GREEDY)
        engine.step()
        target.logits[request.last] = float("nan")
        target.logits[:] = float("nan")
        while other.finish_reason is None:
            engine.step()
        assert request.finish_reason == other.finish_reason == "error"
        assert len(request.token_ids) == 1


def test_wrong_chains_in_shared_memory_turn_speculation_off(
    wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupts(message: Any, answer: Any) -> Any:
        if message[0] == "turn" and message[1] > 5:
            engine.lane.chain.tokens.fill_(10**9)
        return answer

    faulty.local_children(monkeypatch, corrupts)
    with scripts.engine(scripts.model(P), scripts.model(Q), lane="process") as engine:
        assert engine.generate([1, 2], GREEDY)[0].token_ids == wanted
        stats = engine.stats()
    assert "invalid chain" in stats["speculation"] and len(stats["draft_faults"]) == 6


def test_a_draft_that_cannot_start_says_why(no_leaks: None) -> None:
    class Local(ScriptedModel):
        pass

    with pytest.raises(ConfigError, match="another process"):
        scripts.engine(scripts.model(P), Local(Q), lane="process")
    broken = scripts.model(Q)
    broken.logits = "not a tensor"
    engine = scripts.engine(scripts.model(P), broken, lane="process")
    with engine:
        assert len(engine.generate([1, 2], GREEDY)[0].token_ids) == 60
        assert "draft process failed" in engine.stats()["speculation"]


def test_missing_models_are_named() -> None:
    with pytest.raises(ConfigError, match="draft: got None"):
        Engine(scripts.model(P), None, EngineConfig(impl="reference"))
    with pytest.raises(SaguaroError, match="no/such/folder"):
        Engine("no/such/folder", None, EngineConfig(method="ar"))


_SCRIPT = """
    import torch
    from saguaro_runtime import Engine, EngineConfig, SamplingParams
    from saguaro_runtime.models.scripted import ScriptedModel
    law = torch.softmax(torch.randn(25, 5), -1)
    target = ScriptedModel(law, extend_s=0.05)
    engine = Engine(target, ScriptedModel(law), EngineConfig(lane="process", impl="reference"))
    print(engine.lane.pid, flush=True)
    with engine:
        engine.generate([1, 2], SamplingParams(max_new_tokens=400))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_orphans_when_the_engine_is_stopped(how: signal.Signals) -> None:
    """A script without `if __name__ == "__main__"`, stopped from outside while it decodes."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    drafter = int(process.stdout.readline())
    time.sleep(0.3)
    os.killpg(process.pid, how) if how is signal.SIGINT else process.send_signal(how)
    process.communicate(timeout=20)
    assert process.returncode != 0
    deadline = time.monotonic() + 5
    while _alive(drafter):
        assert time.monotonic() < deadline, "the draft process outlived the engine"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_close_twice_and_use_after(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty.local_children(monkeypatch)
    threads = torch.get_num_threads()
    engine = scripts.engine(scripts.model(P), scripts.model(Q), lane="process")
    engine.close()
    engine.close()
    assert torch.get_num_threads() == threads
    assert len(engine.generate([1, 2], GREEDY)[0].token_ids) == 60


class _Fails(ScriptedModel):
    """Raises at the n-th call of one of its methods."""

    def __init__(self, law: torch.Tensor, method: str, at: int) -> None:
        super().__init__(law)
        self.method, self.left = method, at

    def _count(self, method: str) -> None:
        self.left -= method == self.method
        if self.left == 0 and method == self.method:
            raise RuntimeError(f"{method} failed")

    def allocate(self, *args):
        self._count("allocate")
        super().allocate(*args)

    def prefill(self, *args):
        self._count("prefill")
        super().prefill(*args)

    def extend(self, *args):
        self._count("extend")
        return super().extend(*args)

    def decode_tree(self, *args):
        self._count("decode_tree")
        return super().decode_tree(*args)


CALLS = [("allocate", 1), ("allocate", 2), ("prefill", 2), ("extend", 1), ("extend", 3)]


@pytest.mark.parametrize(("method", "at"), [*CALLS[:-1], ("decode_tree", 2)])
def test_a_draft_that_raises_leaves_the_text(wanted: list[int], method: str, at: int) -> None:
    with scripts.engine(scripts.model(P), _Fails(Q, method, at), max_batch=2) as engine:
        outputs = engine.generate([[1, 2]] * 3, GREEDY)
        assert [output.token_ids for output in outputs] == [wanted] * 3
        assert f"{method} failed" in engine.stats()["speculation"]


@pytest.mark.parametrize(("method", "at"), CALLS)
def test_a_target_that_raises_leaves_a_usable_engine(
    wanted: list[int], method: str, at: int
) -> None:
    target = _Fails(P, method, at)
    with scripts.engine(target, scripts.model(Q), max_batch=2) as engine:
        with pytest.raises(RuntimeError, match=f"{method} failed"):
            engine.generate([[1, 2]] * 3, GREEDY)
        assert target.held == set()
        assert engine.generate([1, 2], GREEDY)[0].token_ids == wanted


@pytest.mark.parametrize("method", ["allocate", "prefill"])
def test_a_request_that_could_not_be_taken_in_is_not_decoded(method: str) -> None:
    target = _Fails(P, method, 1)
    with scripts.engine(target, scripts.model(Q)) as engine:
        request = engine.add([1, 2], GREEDY)
        with pytest.raises(RuntimeError, match=f"{method} failed"):
            engine.step()
        assert engine.step() == []
        assert request.finish_reason == "error" and request.token_ids == []
        assert target.held == engine.lane.speculator.model.held == set()


@pytest.mark.parametrize("at", ["first", "later", "end"])
def test_a_tokenizer_that_raises_ends_its_own_request(wanted: list[int], at: str) -> None:
    class Broken:
        eos_token_id = None

        def decode(self, ids, skip_special_tokens=False) -> str:
            if broken and len(ids) >= {"first": 1, "later": 2, "end": 1}[at]:
                raise ValueError("cannot decode")
            return "\ufffd" if at == "end" else "x" * len(ids)

    target = scripts.model(P)
    with scripts.engine(target, scripts.model(Q), tokenizer=Broken()) as engine:
        broken = False
        requests = [engine.add([1, 2], GREEDY) for _ in range(3)]
        engine.step()
        broken = True
        for request in requests[1:]:
            request.stream._tokenizer = type("Good", (), {"decode": lambda *_, **__: ""})()
        if at == "end":
            broken = False
            engine.step()
            broken = True
            engine.cancel(requests[0])
        while any(request.finish_reason is None for request in requests):
            engine.step()
        assert requests[0].finish_reason == "error"
        assert requests[0].output().error == "ValueError: cannot decode"
        assert [request.token_ids for request in requests[1:]] == [wanted] * 2
        assert requests[0].token_ids == wanted[: len(requests[0].token_ids)]
        assert target.held == set()


@pytest.mark.parametrize("method", ["ar", "sd", "ssd"])
def test_broken_rows_end_the_text_where_they_stand_and_no_sooner(method: str) -> None:
    """The target is broken after 3, 5, which the draft proposes and the target never says."""
    law = torch.full((36, 6), 1e-9)
    for last in range(6):
        law[last::6, (last + 1) % 6] = 1.0  # counts upwards ..
    draft = law.clone()
    draft[3::6] = 1e-9
    draft[3::6, 5] = 1.0  # .. but the draft goes from 3 to 5
    target = scripts.model(law)
    target.logits[3 * 6 + 5] = float("nan")
    with scripts.engine(target, scripts.model(draft), method=method) as engine:
        output = engine.generate([0, 1], SamplingParams(max_new_tokens=12))[0]
        assert output.token_ids == [(2 + i) % 6 for i in range(12)]
        target.logits[4 * 6 + 5] = float("nan")
        output = engine.generate([0, 1], SamplingParams(max_new_tokens=12))[0]
        assert output.token_ids == [2, 3, 4, 5] and output.finish_reason == "error"


def test_the_sign_of_life_ends_before_its_process_does() -> None:
    """A thread inside torch at the interpreter's end aborts the process."""
    before, beat = set(threading.enumerate()), torch.zeros(1, dtype=torch.float64)
    with showing_life(beat):
        (thread,) = set(threading.enumerate()) - before
        for _ in range(2):
            last = beat.item()
            while beat.item() == last:
                time.sleep(0.01)
    assert not thread.is_alive()
