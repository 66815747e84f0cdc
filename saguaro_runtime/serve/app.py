"""The HTTP server's routes: OpenAI-compatible completions over one engine, batched continuously.

Every answer is a request of the engine; all of them share its rounds. A client that goes away
cancels its requests, between two rounds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from saguaro_kernels.errors import ConfigError, SaguaroError, UnsupportedError

from .. import requests as engine_requests
from ..engine import Engine
from ..intake import chat_ids, prompt_ids
from ..metrics.prometheus import CONTENT_TYPE
from .answer import Answer, error, event
from .guard import Guard, Limits, unless_gone
from .protocol import Body, ChatBody, CompletionBody


class TooBusy(SaguaroError):
    """More requests than the server holds."""


def create_app(engine: Engine, model: str, limits: Limits | None = None) -> FastAPI:
    """The application over `engine`, which stays the caller's to close."""
    server = _Server(engine, model, limits or Limits())
    app = FastAPI(title="saguaro", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, limits=server.limits)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return JSONResponse(error(f"{where}: {first['msg']}", 400), 400)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, problem: HTTPException) -> Response:
        status = problem.status_code  # no such route or method, a body that is no JSON
        return JSONResponse(error(str(problem.detail), status), status, problem.headers)

    @app.exception_handler(SaguaroError)
    async def refused(request: Request, problem: SaguaroError) -> Response:
        server.limits.counts["refused"] += 1
        status = 429 if isinstance(problem, TooBusy) else 400
        status = status if isinstance(problem, TooBusy | ConfigError | UnsupportedError) else 500
        kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
        return JSONResponse(error(str(problem), status, kind), status)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await server.respond("completion", body, list(body.prompts()), request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await server.respond("chat", body, [server.encode(body.conversation())], request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.card()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        known = name == model
        missing = error(f"model {name!r} is not served here", 404, "not_found_error")
        return JSONResponse(server.card() if known else missing, 200 if known else 404)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        lane = engine.lane
        return {"status": "ok", "speculation": "off" if lane is None else lane.status}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(engine.prometheus)
        return PlainTextResponse(text + server.metrics(), media_type=CONTENT_TYPE)

    app.state.server = server
    return app


class _Server:
    def __init__(self, engine: Engine, model: str, limits: Limits) -> None:
        self.engine, self.model, self.limits = engine, model, limits
        self.active = 0

    def card(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "saguaro"}

    def metrics(self) -> str:
        """The server's own counts, behind the engine's."""
        lines = []
        for name, count in self.limits.counts.items():
            lines += [f"# TYPE saguaro_http_{name}_total counter",
                      f"saguaro_http_{name}_total {count}"]  # fmt: skip
        lines += ["# TYPE saguaro_http_active gauge", f"saguaro_http_active {self.active}"]
        return "\n".join(lines) + "\n"

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        if not getattr(self.engine.tokenizer, "chat_template", None):
            raise ConfigError("messages: the model has no chat template; ask /v1/completions")
        return chat_ids(messages, self.engine.tokenizer)

    async def respond(
        self, kind: Any, body: Body, prompts: list[Any], request: Request
    ) -> Response:
        if body.model not in (None, self.model):
            missing = error(f"model {body.model!r} is not served here", 404, "not_found_error")
            return JSONResponse(missing, 404)
        asked = self._admit(body, prompts)
        answer = Answer(kind, self.model, self.engine.tokenizer)
        if body.stream:
            return _Stream(self._events(answer, asked, body), lambda: self._leave(asked))
        try:
            return await unless_gone(request, self._whole(answer, asked, body.count()))
        except SaguaroError:
            raise
        except Exception as problem:  # a round of the engine failed; others may go on
            raise SaguaroError(f"{type(problem).__name__}: {problem}") from problem
        finally:
            self._leave(asked)

    def _admit(self, body: Body, prompts: list[Any]) -> list[engine_requests.Request]:
        """All of a call's requests, or none."""
        count, engine, most = body.count(), self.engine, self.limits.max_requests
        if count * len(prompts) > most:
            raise ConfigError(f"prompt, n: got {count * len(prompts)} answers to give, the most "
                              f"at once is {most}")  # fmt: skip
        if self.active + count * len(prompts) > most:
            raise TooBusy(f"{self.active} requests are being served, the most is "
                          f"{most}; try again later")  # fmt: skip
        asked: list[engine_requests.Request] = []
        seed = secrets.randbits(62)
        try:
            for prompt in prompts:
                ids = prompt_ids(prompt, engine.tokenizer)
                # The last slots are for drafts; see EngineConfig.max_tokens.
                room = min(engine.model.max_length, engine.config.max_tokens) - len(ids)
                room -= engine.config.draft_len + 1
                for index in range(count):
                    at = len(asked) if body.seed is None else index
                    params = body.params(room, at, seed, engine.model.vocab_size)
                    asked.append(engine.add(ids, params))
        except BaseException:
            for request in asked:
                engine.cancel(request)
            raise
        self.active += len(asked)
        self.limits.counts["requests"] += len(asked)
        return asked

    def _leave(self, asked: list[engine_requests.Request]) -> None:
        for request in asked:
            if request.finish_reason in (None, "cancelled"):
                self.limits.counts["cancelled"] += 1
            self.limits.counts["failed"] += request.finish_reason == "error"
            self.engine.cancel(request)
        self.active -= len(asked)

    async def _whole(
        self, answer: Answer, asked: list[engine_requests.Request], count: int
    ) -> Response:
        async def finish(request: engine_requests.Request) -> dict[str, Any]:
            async for _ in self.engine.astream(request):
                pass
            _raise_if_failed(request)
            output = request.output()
            logprobs = None
            if output.logprobs is not None:
                logprobs = answer.logprobs(output.token_ids, output.logprobs)
            return answer.choice(asked.index(request), output.text, output.finish_reason, logprobs)

        choices = await asyncio.gather(*(finish(request) for request in asked))
        return JSONResponse(answer.whole(list(choices), _usage(asked, count)))

    async def _events(
        self, answer: Answer, asked: list[engine_requests.Request], body: Body
    ) -> AsyncIterator[str]:
        """Server-sent events of all answers as they come."""
        queue: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()

        async def follow(index: int, request: engine_requests.Request) -> None:
            sent, offset, first = 0, 0, True

            def piece(text: str, reason: str | None) -> dict[str, Any]:
                nonlocal sent, offset, first
                logprobs = None
                if request.params.logprobs is not None:
                    # A round may be adding to both: the log-probabilities come second.
                    end = len(request.logprobs)
                    tokens, values = request.token_ids[sent:end], request.logprobs[sent:end]
                    logprobs = answer.logprobs(tokens, values, offset)
                    sent, offset = end, offset + len(text)
                choice = answer.choice(index, text, reason, logprobs, delta=True, first=first)
                first = False
                return answer.chunk([choice])

            try:
                async for text in self.engine.astream(request):
                    queue.put_nowait(piece(text, None))
                _raise_if_failed(request)
                queue.put_nowait(piece("", request.finish_reason))
            except Exception as problem:
                queue.put_nowait(problem)
            queue.put_nowait(None)

        tasks = [asyncio.create_task(follow(*numbered)) for numbered in enumerate(asked)]
        try:
            running = len(tasks)
            while running:
                piece = await queue.get()
                if piece is None:
                    running -= 1
                elif isinstance(piece, BaseException):
                    yield event(error(str(piece), 500, "server_error"))
                else:
                    yield event(piece)
            if body.usage_wanted():
                yield event(answer.chunk([], _usage(asked, body.count())))
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()


class _Stream(StreamingResponse):
    """Server-sent events; `leave` is called at the end, also if the client was gone before the
    first of them: then they are never begun."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


def _raise_if_failed(request: engine_requests.Request) -> None:
    if request.finish_reason == "error":
        raise SaguaroError(request.error or "the request failed")


def _usage(asked: list[engine_requests.Request], count: int) -> dict[str, int]:
    """Of all answers; a prompt counts once, whatever its `count` of answers."""
    prompt = sum(len(request.prompt) for request in asked[::count])
    new = sum(len(request.token_ids) for request in asked)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
