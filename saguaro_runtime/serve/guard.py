"""What stands before the server's routes: limits, the key, and clients that go away."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ..config import check_number
from .answer import error

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass
class Limits:
    """What one server takes on: requests at once, bytes of a body, and who may ask."""

    max_requests: int = 256
    max_body_bytes: int = 4 << 20
    api_key: str | None = None
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("requests", "refused", "cancelled", "failed"), 0)
    )

    def __post_init__(self) -> None:
        check_number("max_requests", self.max_requests, 1, 1 << 30, whole=True)


class Guard:
    """Refuses bodies that are too long and callers without the key, before anything is parsed."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        key, most = self.limits.api_key, self.limits.max_body_bytes
        if key is not None and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, key.encode()):
                refusal = error("the API key is missing or wrong", 401, "authentication_error")
                await JSONResponse(refusal, 401)(scope, receive, send)
                return
        pieces, length, more = [], 0, scope["method"] == "POST"
        # Of a body that is too long so much is read and dropped that its sender, who may not listen
        # before it is sent, hears the answer.
        while more and length <= 16 * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more, piece = message.get("more_body", False), message.get("body", b"")
            length += len(piece)
            if length <= most:
                pieces.append(piece)
        too_long = length > most
        if too_long:
            refusal = error(f"the body is longer than {most} bytes", 413)
            await JSONResponse(refusal, 413)(scope, receive, send)
            return
        given_back = [{"type": "http.request", "body": b"".join(pieces), "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            return given_back.pop() if given_back else await receive()

        await self.app(scope, replay if scope["method"] == "POST" else receive, send)


async def unless_gone(request: Request, work: Any) -> Response:
    """The work's response; if the client goes away first, the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await tasks[0] if tasks[0].done() else Response(status_code=499)
    finally:
        for task in tasks:
            task.cancel()
