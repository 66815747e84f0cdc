"""The engine: requests join, decode in rounds, and leave.

A round, see `Engine._round`: the drafter answers the last outcome with the next chain of each row
and goes on to draft ahead; meanwhile the target verifies the chains. The accepted drafts and one
extra token are committed. `method` decides only what the drafter does: nothing ("ar"), chains
("sd"), or chains and branches for the outcomes to come ("ssd").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from saguaro_kernels.errors import ConfigError

from .background import Background
from .build import build_lane, build_target, fit_memory, settle_method, share_cores
from .chains import ChainStore, allocate_on
from .config import EngineConfig
from .intake import several
from .metrics import Span
from .params import SamplingParams
from .requests import Output, Prompt, Request
from .scheduler import Scheduler
from .stats import Stats
from .transfer import send
from .verifier import Verifier

_GREEDY = SamplingParams()
_DEFAULT = EngineConfig()


class Engine:
    """Decodes requests with a target and a draft. Use it as a context manager, or call close().

    All methods may be called from any thread. Rounds run one at a time, and each serves all
    requests, whichever thread called `step`. `add` and `cancel` do not wait for a round. All other
    methods wait for the one in progress, so a logits processor or a tokenizer must not call them.

    Args:
        target, draft: a loaded transformers model, a folder or hub name, or a `Model`. draft may be
            None with method="ar", and "ngram" needs no model: it proposes what followed the last
            tokens earlier in the text, and "ssd" is then "sd".
        config: see EngineConfig.
        tokenizer: a transformers tokenizer; needed for string prompts, text and stop strings.
            Default: that of `target` where it is a path.

    Raises:
        ConfigError, UnsupportedError: models that do not fit each other or cannot be run, before
            any work.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        config: EngineConfig = _DEFAULT,
        tokenizer: Any = None,
    ) -> None:
        built = build_target(target, config, tokenizer)
        config = settle_method(draft, config)
        config, memory = fit_memory(draft, built, config)
        self.config = config
        self.model, self.tokenizer = built.model, built.tokenizer
        self.lane = build_lane(draft, built, config)
        self._restore_threads = share_cores(config, self.lane)
        self.timeline = built.timeline
        self._seat = built.seat
        on_device = allocate_on(self.model.device)
        with self._seat.working():
            self.verifier = Verifier(
                self.model, rule=config.rule, impl=config.impl, timeline=self.timeline
            )
            self.scheduler = Scheduler(config, built)
            self._undrafted = ChainStore((config.max_batch,), 0, 1, torch.float32, on_device)
            self.verifier.warm_up(self.lane.chain if self.lane else self._undrafted)
        self._stats = Stats(self.scheduler, self.lane, self.timeline)
        self._stats.memory = memory
        self._held: set[int] = set()
        self._cancelled: deque[Request] = deque()
        self._lock = threading.Lock()
        self._background = Background()

    def add(self, prompt: Prompt, params: SamplingParams = _GREEDY) -> Request:
        """Queue a request; it joins when a row and its key-value slots are free.

        Raises:
            ConfigError: an empty prompt, ids outside the vocabulary, text without a tokenizer, or a
                request that cannot fit the model or `max_tokens`; nothing is queued then.
        """
        return self.scheduler.add(prompt, params)

    def step(self) -> list[Request]:
        """One round of all running requests; returns those it finished."""
        try:
            with self._lock, torch.no_grad(), self._seat.working():
                start = time.monotonic()
                try:
                    finished = self._round()
                finally:
                    self._release()
                self._stats.busy_s += time.monotonic() - start
                return finished
        finally:
            self._settle()

    def _round(self) -> list[Request]:
        """One round: admit, take the next chains, verify them, commit; requests that finished."""
        self._admit()
        turn = self.scheduler.turn()
        if turn is None:
            return []
        reply = self.lane.next_chain(turn) if self.lane else None
        hit = reply.hit if reply else None
        if reply and not bool(reply.ready.all()):
            turn, hit = turn.select(reply.ready), reply.hit[reply.ready]
        store = self.lane.chain if self.lane and reply else self._undrafted
        on_target = turn.on(self.model.device)
        sampling, keys = self.scheduler.sampling(on_target), self.scheduler.keys(on_target)
        draft = store.draft(on_target.rows, sampling, turn.decision.draft_len)
        start, requests = time.monotonic(), self.scheduler.requests(turn)
        meanwhile = self.lane.meanwhile if self.lane else lambda: None
        judgement = self.verifier.verify(on_target, draft, sampling, keys, requests, meanwhile)
        finished = self.scheduler.commit(turn, judgement, hit)
        self.timeline.rounds(
            ((request.row, request.rounds[-1].source) for request in requests), start
        )
        self.scheduler.policy.observe(self._stats.collect(wait=False))
        return finished

    def cancel(self, request: Request) -> None:
        """End a request, now or after the round in progress; it keeps the tokens it has."""
        self._cancelled.append(request)
        self._settle()

    def _settle(self) -> None:
        """End cancelled requests; if a round is in progress, its thread does so at its end."""
        while self._cancelled and self._lock.acquire(blocking=False):
            try:
                with self._seat.working():
                    while self._cancelled:
                        self.scheduler.cancel(self._cancelled.popleft())
                    self._release()
            finally:
                self._lock.release()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = _GREEDY,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Decode prompts to completion; outputs in their order, one prompt gives a list of one.

        progress: show a progress bar of tokens on stderr, if that is a terminal.
        """
        asked = several(prompts)
        each = list(params) if isinstance(params, Iterable) else [params] * len(asked)
        if len(each) != len(asked):
            raise ConfigError(f"params: got {len(each)} for {len(asked)} prompts, want one each")
        requests = self.scheduler.add_all(list(zip(asked, each, strict=True)))
        most = sum(request.limit for request in requests)
        bar = tqdm(total=most, unit="token", disable=None if progress else True)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
                bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        finally:
            bar.close()
            for request in requests:
                self.cancel(request)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt | Request, params: SamplingParams = _GREEDY) -> Iterator[str]:
        """Yield the text of one request as it is generated; leaving early cancels it.

        `prompt` may also be a request that `add` returned: its counts and log-probabilities can
        then be read along with the text, and its output() at the end.
        """
        request = self._followed(prompt, params)
        try:
            while request.finish_reason is None:
                self.step()
                if piece := request.take_text():
                    yield piece
            if piece := request.take_text():
                yield piece
        finally:
            self.cancel(request)

    async def astream(
        self, prompt: Prompt | Request, params: SamplingParams = _GREEDY
    ) -> AsyncIterator[str]:
        """`stream` for asyncio: rounds run in a background thread and serve all streams."""
        request = self._followed(prompt, params)
        try:
            while request.finish_reason is None:
                await self._background.round(self.step)
                if piece := request.take_text():
                    yield piece
            if piece := request.take_text():
                yield piece
        finally:
            self.cancel(request)

    def _followed(self, prompt: Prompt | Request, params: SamplingParams) -> Request:
        if self.tokenizer is None:
            raise ConfigError("stream: got no tokenizer, want Engine(..., tokenizer=...)")
        return prompt if isinstance(prompt, Request) else self.add(prompt, params)

    @property
    def spans(self) -> deque[Span]:
        """The most recent spans of work of all lanes, up to the last call of stats()."""
        return self._stats.log.spans

    def stats(self) -> dict[str, Any]:
        """Counts and times since the engine began, see docs/operations.md."""
        with self._lock:
            return self._stats.summary()

    def prometheus(self) -> str:
        """The numbers of stats() and more in Prometheus' text format."""
        with self._lock:
            return self._stats.prometheus()

    def reset_stats(self) -> None:
        """Forget counts and times so far, after a warm-up say; running requests keep theirs."""
        with self._lock:
            self._stats.reset()

    def close(self) -> None:
        """End the drafter and restore the number of CPU threads. Safe to call twice."""
        self._background.close()
        with self._lock:
            if self.lane is not None:
                self.lane.close()
            self._restore_threads()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _admit(self) -> None:
        """Give rows to waiting requests and prefill the next chunks of their prompts, on the draft
        at the same time as on the target."""
        self._release()  # again, where Ctrl-C came in between
        self.scheduler.admit()
        if self.lane and self.lane.empty:
            self.lane.admit(self.scheduler.rows())
        for new, start in self.scheduler.chunks():
            try:
                if new.row not in self._held:
                    self.model.allocate(new.row, new.slots)
                    self._held.add(new.row)
                if self.lane:
                    self.lane.admit([new])
                if len(new.prompt) - 1 > start:
                    with self.timeline.span("prefill"):
                        piece = send(self.model.device, torch.tensor(new.prompt[start:-1]))[0]
                        self.model.prefill(new.row, piece, start)
            except BaseException as error:
                # Its keys are incomplete, so nothing can be decoded after them.
                self.scheduler.fail([new.row], f"{type(error).__name__}: {error}")
                raise

    def _release(self) -> None:
        """Release the rows of requests that have ended."""
        rows = self.scheduler.left
        for row in self._held.intersection(rows):
            try:
                self.model.release(row)
            finally:
                self._held.remove(row)
        if rows and self.lane:
            self.lane.release(rows.copy())
        rows.clear()


def generate(
    target: Any,
    draft: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    tokenizer: Any = None,
    params: SamplingParams | Sequence[SamplingParams] = _GREEDY,
    config: EngineConfig = _DEFAULT,
) -> list[Output]:
    """Decode prompts with an engine made for this call; see Engine."""
    with Engine(target, draft, config, tokenizer) as engine:
        return engine.generate(prompts, params)
