"""The ASGI application: routes, the gate before them, and the edge where exceptions become refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mimo_vk.errors import MimoError
from mimo_vk.server import models, openai_chat, openai_completions, openapi, pages, systemone, tokenizing
from mimo_vk.server.errors import ApiError, Unavailable, as_api_error
from mimo_vk.server.front import Front
from mimo_vk.server.metrics import Metrics
from mimo_vk.server.record import Record
from mimo_vk.server.responses import KEEP_ALIVE_SECONDS, Json, refusal
from mimo_vk.server.security import Gate
from mimo_vk.server.worker import STOPPING, Worker

log = logging.getLogger("mimo_vk")


@dataclass
class Context:
    """What a route works with. front: names, limits, text to ids. keep_alive: seconds between a stream's comments.

    log_prompts: whether the log holds the text of what is asked.
    """

    front: Front
    worker: Worker
    gate: Gate = field(default_factory=Gate)
    metrics: Metrics = field(default_factory=Metrics)
    keep_alive: float = KEEP_ALIVE_SECONDS
    log_prompts: bool = False


Endpoint = Callable[[Context, Request, Record], Awaitable[Response]]


async def health(context: Context, request: Request, record: Record) -> Response:
    """200 when requests can be answered."""
    state = context.worker.state
    body = {"status": "ok" if state == "ready" else state, "model": context.front.model_id}
    return Json(body, 200 if state == "ready" else 503)


async def metrics(context: Context, request: Request, record: Record) -> Response:
    """Prometheus' text format."""
    return PlainTextResponse(
        context.metrics.text(context.worker), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
    )


async def description(context: Context, request: Request, record: Record) -> Response:
    """The API's own description."""
    return Json(openapi.document(context.gate.key is not None))


ROUTES: dict[str, dict[str, Endpoint]] = {
    "/health": {"GET": health},
    "/metrics": {"GET": metrics},
    "/openapi.json": {"GET": description},
    "/v1/models": {"GET": models.listing},
    "/v1/chat/completions": {"POST": openai_chat.endpoint},
    "/v1/completions": {"POST": openai_completions.endpoint},
    "/v1/systemone": {"POST": systemone.endpoint},
    "/tokenize": {"POST": tokenizing.tokenize},
    "/detokenize": {"POST": tokenizing.detokenize},
    "/tokenizer_info": {"GET": tokenizing.info},
    **{path: {"GET": pages.page} for path in pages.files()},
}
MODEL_PATH = "/v1/models/"


class App:
    """The application. Every request ends in one response and one log line."""

    def __init__(self, context: Context) -> None:
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        record = Record(scope["method"], scope["path"], log_prompt=self.context.log_prompts)
        sender = _Sender(send, record, self._allowed_origin(scope))
        try:
            await self._answer(Request(scope, receive), record, sender, receive)
        except ClientDisconnect:
            record.outcome = "cancelled"
        except asyncio.CancelledError:  # the server stops, and this client has sent half a request or reads no answer
            record.outcome = "unavailable"
            if not record.status:
                await refusal(as_api_error(Unavailable(STOPPING)))(scope, receive, sender)
        except Exception as error:
            _note(error)
            if record.status:  # the answer has begun: all that is left is to break it off
                record.outcome = "error"
                raise
            await refusal(as_api_error(error))(scope, receive, sender)
        finally:
            record.close(self.context.metrics)

    async def _answer(self, request: Request, record: Record, send: Send, receive: Receive) -> None:
        path = request.url.path
        endpoint, record.route = _route(path, request.method)
        self.context.gate.check(path, request.headers)
        if request.method == "OPTIONS" and request.headers.get("origin"):
            response = _preflight(request)
        elif endpoint is None:
            raise _no_route(path, request.method)
        else:
            response = await endpoint(self.context, request, record)
        await response(request.scope, receive, send)

    def _allowed_origin(self, scope: Scope) -> str | None:
        origin = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"origin"), None)
        return origin if origin and self.context.gate.allows_origin(origin) else None


class _Sender:
    """Sends, noting the status, with the headers that every response has."""

    def __init__(self, send: Send, record: Record, origin: str | None) -> None:
        self._send, self._record, self._origin = send, record, origin

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name in ("x-request-id", "x-typesafe-request-id"):  # OpenAI's clients read one, typesafe-sdk the other
                headers.setdefault(name, self._record.id)
            headers["x-content-type-options"] = "nosniff"
            if self._origin:
                headers["access-control-allow-origin"] = self._origin
                headers["vary"] = "Origin"
        await self._send(message)


def _route(path: str, method: str) -> tuple[Endpoint | None, str]:
    """The endpoint, and the route's name for the metrics."""
    methods = ROUTES.get(path)
    if methods is None and path.startswith(MODEL_PATH) and len(path) > len(MODEL_PATH):
        methods, path = {"GET": models.one}, MODEL_PATH + "{id}"
    if methods is None:
        return None, "other"
    return methods.get("GET" if method == "HEAD" else method), path


def _no_route(path: str, method: str) -> ApiError:
    shown = "".join(char if char.isprintable() else "?" for char in path[:200])
    methods = list(ROUTES.get(path, ())) or (["GET"] if path.startswith(MODEL_PATH) and path != MODEL_PATH else [])
    if methods:
        allow = ", ".join(methods)
        return ApiError(405, f"{method} is not possible on {shown}: {allow} is", headers={"Allow": allow})
    return ApiError(404, f"there is no {shown} here", code="not_found")


def _preflight(request: Request) -> Response:
    """A browser asks before it sends: the origin was checked, the rest is free."""
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": request.headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    return Response(status_code=204, headers=headers)


def _note(error: Exception) -> None:
    """What the client isn't told goes to the log."""
    if as_api_error(error).status != 500:
        return
    known = isinstance(error, MimoError)
    log.error("%s", error, exc_info=None if known else error)


def make_app(context: Context) -> Any:
    """The application for a server."""
    return App(context)
