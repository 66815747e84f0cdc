"""Streams for threads and for asyncio: the same text, whoever steps, and whoever leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
import scripts

from saguaro_runtime import ConfigError, Engine, Request, SamplingParams

P = scripts.random_law(5, seed=1)
Q = scripts.random_law(5, seed=2, near=P)


class Letters:
    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("abcde"[id] for id in ids)


def _engine(extend_s: float = 0.0, **options: Any) -> Engine:
    target = scripts.model(P, extend_s=extend_s)
    return scripts.engine(target, scripts.model(Q), tokenizer=Letters(), **options)


def _wanted(count: int) -> str:
    with _engine(method="ar") as engine:
        return engine.generate([1, 2], SamplingParams(count))[0].text


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def _text(engine: Engine, params: SamplingParams) -> str:
    return "".join([piece async for piece in engine.astream([1, 2], params)])


def test_streams_of_one_loop_share_their_rounds() -> None:
    params = [SamplingParams(20 + 10 * index) for index in range(5)]

    async def main(engine: Engine) -> list[str]:
        return await asyncio.gather(*(_text(engine, param) for param in params))

    with _engine() as engine:
        texts = _run(main(engine))
        spans = [span for span in engine.timeline.spans if span.name == "verify"]
    wanted = _wanted(60)
    assert texts == [wanted[: param.max_new_tokens] for param in params]
    assert len(spans) < 60  # the longest alone takes about 20


def test_a_loop_is_not_held_up_and_a_stream_can_be_left() -> None:
    """One task is cancelled amid a round, one leaves, one stays; others of the loop go on."""

    async def main(engine: Engine) -> tuple[str, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.005)

        async def leave() -> None:
            async for _ in engine.astream([1, 2], SamplingParams(300)):
                return

        ticking = asyncio.create_task(tick())
        stays = asyncio.create_task(_text(engine, SamplingParams(30)))
        left = asyncio.create_task(leave())
        gone = asyncio.create_task(_text(engine, SamplingParams(300)))
        await asyncio.sleep(0.08)
        gone.cancel()
        text = await stays
        await left
        with pytest.raises(asyncio.CancelledError):
            await gone
        ticking.cancel()
        return text, ticks

    with _engine(extend_s=0.04) as engine:
        text, ticks = _run(main(engine))
        assert engine.stats()["rounds"] < 60  # of 3 requests; 600 tokens were asked for
        assert engine.step() == [] and engine.model.held == set()
    assert text == _wanted(30) and ticks > 20


def test_an_error_of_a_round_reaches_every_stream() -> None:
    async def main(engine: Engine) -> list[Any]:
        streams = (_text(engine, SamplingParams(20)) for _ in range(3))
        return await asyncio.gather(*streams, return_exceptions=True)

    with _engine() as engine:
        extend = engine.model.extend
        engine.model.extend = lambda *_: 1 / 0
        assert [type(its) for its in _run(main(engine))] == [ZeroDivisionError] * 3
        engine.model.extend = extend
        assert _run(_text(engine, SamplingParams(20))) == _wanted(20)


def test_a_request_can_be_followed() -> None:
    wanted = _wanted(30)

    async def main(engine: Engine, request: Request) -> str:
        return "".join([piece async for piece in engine.astream(request)])

    with _engine() as engine:
        one, two = (engine.add([1, 2], SamplingParams(30, logprobs=0)) for _ in range(2))
        assert "".join(engine.stream(one)) == _run(main(engine, two)) == wanted
        usage = {"prompt_tokens": 2, "completion_tokens": 30, "total_tokens": 32}
        for request in (one, two):
            assert request.output().usage == usage and len(request.output().logprobs) == 30
    with scripts.engine(scripts.model(P), scripts.model(Q)) as engine:
        for call in (
            lambda: next(engine.stream([1])),
            lambda: _run(engine.astream([1]).asend(None)),
        ):
            with pytest.raises(ConfigError, match="tokenizer"):
                call()


def test_threads_share_an_engine() -> None:
    """Six threads generate, stream and cancel; each gets its text, and no row or slot is lost."""
    wanted, failed = _wanted(60), []

    def work(engine: Engine, number: int) -> None:
        try:
            for turn in range(6):
                count = 5 + (7 * turn + 11 * number) % 50
                params = SamplingParams(count)
                if number % 3 == 0:
                    assert engine.generate([1, 2], params)[0].text == wanted[:count]
                elif number % 3 == 1:
                    assert "".join(engine.stream([1, 2], params)) == wanted[:count]
                else:
                    request = engine.add([1, 2], params)
                    time.sleep(0.002 * turn)
                    engine.cancel(request)
                    engine.stats()
                    while request.finish_reason is None:
                        time.sleep(0.001)
                    text = request.output().text
                    assert text == wanted[: len(text)]
        except BaseException as error:
            failed.append(error)

    with _engine(max_batch=3) as engine:
        threads = [threading.Thread(target=work, args=(engine, number)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed and not any(thread.is_alive() for thread in threads)
        assert engine.step() == [] and engine.model.held == set()
        assert engine.scheduler._free_slots == engine.config.max_tokens


def test_cancelled_amid_a_round_ends_after_it() -> None:
    def cancels(prompt: Any, new: Any, logits: Any) -> Any:
        if len(new) == 10:
            engine.cancel(requests[0])
            engine.cancel(requests[1])
        return logits

    with _engine() as engine:
        requests = [engine.add([1, 2], SamplingParams(50)) for _ in range(2)]
        requests[0] = engine.add([1, 2], SamplingParams(50, logits_processor=cancels))
        for _ in range(12):
            engine.step()
        assert [request.finish_reason for request in requests] == ["cancelled"] * 2
        assert all(9 <= len(request.token_ids) < 20 for request in requests)


def test_an_engine_that_was_forgotten_is_freed_without_a_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        engine = _engine()
        _run(_text(engine, SamplingParams(5)))
        gone = weakref.ref(engine)
        del engine
        deadline = time.monotonic() + 10  # its thread lets go of the round a moment later
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()
