"""Does anything get lost when the draft process dies again and again? `python -m bench.soak`

Requests join and leave while a thread kills the draft process at random moments. Every text must be
that of plain decoding with its seed (the coupled rule: whatever was drafted), drafting must go on
between deaths, and no process, file or memory may be left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from saguaro_runtime import Engine, EngineConfig, SamplingParams
from saguaro_runtime.lanes.process import ProcessLane
from saguaro_runtime.models.scripted import ScriptedModel

VOCAB, ROWS = 8, 4


def run(rounds: int, kills: int, seed: int = 0, verify_s: float = 0.1) -> dict[str, Any]:
    """Decode for `rounds` rounds of `verify_s`, killing the draft process `kills` times."""
    files = len(os.listdir("/proc/self/fd"))
    result = _soak(rounds, kills, seed, verify_s)
    gc.collect()
    return result | {"files_left": len(os.listdir("/proc/self/fd")) - files}


def _soak(rounds: int, kills: int, seed: int, verify_s: float) -> dict[str, Any]:
    dice = random.Random(seed)
    config = EngineConfig(
        rule="coupled", lane="process", k=3, branches=8, max_batch=ROWS, draft_timeout_s=1.0,
        draft_restarts=kills, impl="reference",
    )  # fmt: skip
    target_law, draft_law = _laws()
    wanted = _Wanted(target_law)
    lost, checked, pids = 0, 0, set()
    with Engine(
        ScriptedModel(target_law, rows=ROWS, slots=512, extend_s=verify_s),
        ScriptedModel(draft_law, rows=ROWS, slots=1024),
        config,
    ) as engine:
        killer = _Killer(engine, dice, rounds, kills, verify_s)
        hits, asked, memory = 0, 0, []
        running: list[Any] = []
        for step in range(rounds):
            while len(running) < ROWS + 1:
                prompt = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 5))]
                params = SamplingParams(dice.randrange(120), step % 2, seed=dice.randrange(9))
                running.append(engine.add(prompt, params))
            if step % 97 == 50:
                engine.cancel(running[-1])
            engine.step()
            killer.may_kill(step)
            pids.add(_pid(engine))
            for request in [its for its in running if its.finish_reason is not None]:
                running.remove(request)
                text = wanted.text(tuple(request.prompt), request.params)
                whole = request.finish_reason == "cancelled" or len(request.token_ids) == len(text)
                lost += not whole or request.token_ids != text[: len(request.token_ids)]
                checked += 1
            if (step + 1) % -(-rounds // 8) == 0 or step + 1 == rounds:
                stats = engine.stats()
                hits, asked = hits + stats["hits"], asked + stats["hits"] + stats["misses"]
                engine.reset_stats()  # the timeline is kept on purpose, up to its own bound
                gc.collect()
                memory.append(_resident_kib())
        status = engine.stats()["speculation"]
    left = [pid for pid in pids if _is_running(pid)]
    return {
        "rounds": rounds,
        "kills": killer.count,
        "restarts": len(pids) - 1,
        "texts_checked": checked,
        "texts_lost": lost,
        "hit_rate": hits / max(asked, 1),
        "hits": hits,
        "speculation": status,
        "processes_left": len(left),
        "memory_kib": memory,
        "memory_grown_kib": memory[-1] - memory[0],
    }


def _pid(engine: Engine) -> int:
    """Of its draft process."""
    assert isinstance(engine.lane, ProcessLane)
    return engine.lane.pid


class _Wanted:
    """The texts of plain decoding, each decoded once."""

    def __init__(self, law: torch.Tensor) -> None:
        config = EngineConfig(method="ar", rule="coupled", impl="reference")
        self._engine = Engine(ScriptedModel(law), None, config)
        self._texts: dict[Any, list[int]] = {}

    def text(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        if (prompt, params) not in self._texts:
            output = self._engine.generate(list(prompt), params)[0]
            self._texts[prompt, params] = output.token_ids
            self._engine.reset_stats()  # its timeline is no part of what is measured
        return self._texts[prompt, params]


class _Killer:
    """Kills the draft process at random times, from a thread: in the middle of anything.

    Deaths are planned for random rounds. One that comes while the process is still starting after
    the last waits until it is at work, but not beyond the next: then it dies as it starts.
    """

    def __init__(
        self, engine: Engine, dice: random.Random, rounds: int, kills: int, round_s: float
    ) -> None:
        self.count, self._engine, self._dice, self._round_s = 0, engine, dice, round_s
        self._due = sorted(dice.sample(range(max(rounds * 9 // 10, kills)), kills))
        self._killed: set[int] = set()

    def may_kill(self, step: int) -> None:
        """Plan a death within a round from now, if one is due."""
        due, pid = sum(its <= step for its in self._due), _pid(self._engine)
        lane = self._engine.lane
        working = lane is not None and lane.status == "on"
        if pid not in self._killed and due > (0 if working else 1):
            self._killed.add(pid)
            self._due.pop(0)
            timer = threading.Timer(self._dice.uniform(0, self._round_s), self._kill, [pid])
            timer.daemon = True
            timer.start()

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)
                self.count += 1


def _laws() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, VOCAB * VOCAB, VOCAB, generator=generator)
    return torch.softmax(2 * noise[0], -1), torch.softmax(2 * noise[0] + 0.5 * noise[1], -1)


def _resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def _is_running(pid: int) -> bool:
    """Whether it is a draft process still: a busy machine soon gives its number to another."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"saguaro_runtime.lanes.worker" in file.read()
    except OSError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    start = time.monotonic()
    result = run(args.rounds, args.kills, args.seed)
    print(json.dumps(result | {"seconds": round(time.monotonic() - start, 1)}, indent=1))
    return int(bool(result["texts_lost"] or result["processes_left"] or result["files_left"]))


if __name__ == "__main__":
    raise SystemExit(main())
