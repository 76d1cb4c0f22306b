"""Answers that wait for the model: JSON or an event stream, given up when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mimo_vk.server.errors import ApiError, as_api_error, envelope
from mimo_vk.server.record import Record
from mimo_vk.server.worker import Task

KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
T = TypeVar("T")


class Json(Response):
    """A JSON body, not-ASCII as it is."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def refusal(error: ApiError) -> Response:
    """An error's envelope. ASCII: its message may quote text that no UTF-8 exists for."""
    body = json.dumps(envelope(error)).encode()
    return Response(body, error.status, error.headers, media_type="application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. If the client leaves first, the work is cancelled and ClientDisconnect raised."""
    step = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({step, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            raise ClientDisconnect
        return step.result()
    finally:
        await _drop(step)
        await _drop(gone)


async def disconnected(receive: Receive) -> None:
    """Return once the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(future: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has tidied up."""
    if not future.done():
        future.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await future


class EventStream(Response):
    """Server-sent events: headers at once, comments while there is nothing to say, an error as an event of its own.

    task: cancelled when the stream ends, however it does. events: called once, gives the objects to send.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        task: Task,
        events: Callable[[], AsyncIterator[dict[str, Any]]],
        record: Record,
        *,
        keep_alive: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._task, self._events, self._record = task, events, record
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._task:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            gone = asyncio.ensure_future(disconnected(receive))
            try:
                await self._send_all(send, gone)
            finally:
                await _drop(gone)

    async def _send_all(self, send: Send, gone: asyncio.Future[None]) -> None:
        events = self._events()
        try:
            while (event := await self._next(events, send, gone)) is not None:
                await _chunk(send, _data(event))
            await _chunk(send, b"data: [DONE]\n\n")
        except ClientDisconnect:
            self._record.outcome = "cancelled"
            return
        except Exception as error:
            refused = as_api_error(error)
            self._record.outcome = "unavailable" if refused.status == 503 else "error"
            await _chunk(send, _data(envelope(refused)))
        await send({"type": "http.response.body", "body": b""})

    async def _next(
        self, events: AsyncIterator[dict[str, Any]], send: Send, gone: asyncio.Future[None]
    ) -> dict[str, Any] | None:
        step: asyncio.Future[dict[str, Any] | None] = asyncio.ensure_future(anext(events, None))
        try:
            while not step.done():
                waiting: set[asyncio.Future[Any]] = {step, gone}
                await asyncio.wait(waiting, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ClientDisconnect
                if not step.done():
                    await _chunk(send, KEEP_ALIVE)
            return step.result()
        finally:
            await _drop(step)


async def _chunk(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _data(event: dict[str, Any]) -> bytes:
    # ASCII: some clients take U+2028 and its like, which JSON leaves as they are, for the end of a line.
    return b"data: " + json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
