"""What stands before the server's routes: limits, the key, and clients that go away."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

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


class Guard:
    """Refuses bodies that are too long and callers without the key, before anything is parsed."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        key, most = self.limits.api_key, self.limits.max_body_bytes
        if key is not None and scope["path"] != "/health":
            given = headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                refusal = error("the API key is missing or wrong", 401, "authentication_error")
                await JSONResponse(refusal, 401)(scope, receive, send)
                return
        body, length = b"", headers.get(b"content-length", b"0")
        too_long = length.isdigit() and int(length) > most
        more = scope["method"] == "POST"
        while more and not too_long:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more, too_long = message.get("more_body", False), len(body) > most
        if too_long:
            refusal = error(f"the body is longer than {most} bytes", 413)
            await JSONResponse(refusal, 413)(scope, receive, send)
            return
        given_back = [{"type": "http.request", "body": body, "more_body": False}]

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
