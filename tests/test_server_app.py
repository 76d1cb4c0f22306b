"""The edge: who is let in, what is too large, which routes there are, streams kept alive, the metrics' text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from mimo_vk.server.app import Context, make_app
from mimo_vk.server.body import parse_json
from mimo_vk.server.errors import ApiError, Unavailable
from mimo_vk.server.front import Front
from mimo_vk.server.metrics import Histogram
from mimo_vk.server.record import Record
from mimo_vk.server.responses import EventStream
from mimo_vk.server.security import Gate, host_name, is_loopback
from mimo_vk.server.worker import Task, Worker
from mimo_vk.settings import Settings
from tests.live_server import LiveServer, serving

CHAT = "/v1/chat/completions"


def refused(gate: Gate, **headers: str) -> ApiError | None:
    try:
        gate.check("/v1/models", Headers({key.replace("_", "-"): value for key, value in headers.items()}))
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:8000", "192.168.1.5", "a.localhost", ""]
)
def test_addresses_and_localhost_are_let_in(host: str) -> None:
    assert refused(Gate(), host=host) is None


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000"])
def test_a_foreign_name_is_told_which_option_allows_it(host: str) -> None:
    error = refused(Gate(), host=host)
    assert error is not None and error.status == 403
    assert f"--allow-host {host_name(host)}" in error.message
    assert refused(Gate(hosts=[host_name(host).upper()]), host=host) is None
    assert refused(Gate(hosts=["*"]), host=host) is None


def test_a_page_may_ask_from_this_server_or_an_allowed_origin() -> None:
    assert refused(Gate(), host="localhost:8000", origin="http://localhost:8000") is None
    for origin in ("http://evil.example", "http://localhost:3000", "null", "file://", "http://["):
        error = refused(Gate(), host="localhost:8000", origin=origin)
        assert error is not None and error.status == 403 and f"--allow-origin {origin}" in error.message
    assert refused(Gate(origins=["http://localhost:3000/"]), host="localhost", origin="http://localhost:3000") is None
    assert refused(Gate(origins=["*"]), host="localhost", origin="null") is None


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Basic key", "key", "Bearer ключ".encode().decode("latin-1")]
)
def test_without_the_key_nothing_but_health_and_metrics(given: str | None) -> None:
    gate = Gate(key="key")
    headers = {} if given is None else {"authorization": given}
    error = refused(gate, **headers)
    assert error is not None and error.status == 401 and error.headers == {"WWW-Authenticate": "Bearer"}
    for path in ("/health", "/metrics"):
        gate.check(path, Headers(headers))
    assert refused(gate, authorization="Bearer key") is None and refused(gate, authorization="bearer  key ") is None


def test_a_key_may_be_any_text() -> None:
    assert refused(Gate(key="ключ"), authorization="Bearer " + "ключ".encode().decode("latin-1")) is None


def test_only_loopback_is_loopback() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org")))


def test_foreign_pages_over_http(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "--allow-origin", "http://page.example", program="tests.echo_model") as server:
        client = server.client
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert client.post(CHAT, headers={"origin": "http://evil.example"}, json={}).status_code == 403
        origin = {"origin": "http://page.example"}
        asked = client.options(CHAT, headers={**origin, "access-control-request-headers": "authorization"})
        assert asked.status_code == 204 and asked.headers["access-control-allow-origin"] == "http://page.example"
        assert asked.headers["access-control-allow-headers"] == "authorization"
        answered = client.get("/v1/models", headers=origin)
        assert answered.status_code == 200 and answered.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in client.get("/v1/models").headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/checkpoint", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/checkpoint", 200),
        ("HEAD", "/health", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/tokenizer_info", 200),
        ("GET", "/%2e%2e/etc/passwd", 404),
    ],
)
def test_routes(echo_server: LiveServer, method: str, path: str, status: int) -> None:
    response = echo_server.client.request(method, path)
    assert response.status_code == status and len(response.headers["x-request-id"]) == 32
    if status >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b'"x"', b"\xff", b'{"messages": NaN}', b"[" * 100000, b'{"a": 1' + b"0" * 5000 + b"}"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object(echo_server: LiveServer, path: str, content: bytes) -> None:
    response = echo_server.client.post(path, content=content)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_lone_surrogates_are_refused_not_failed_on(echo_server: LiveServer) -> None:
    for content in (
        rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
        rb'{"messages": [{"role": "\udfff", "content": "x"}]}',
        rb'{"messages": [{"role": "user", "content": "x"}], "\ud800": 1}',
        rb'{"messages": [{"role": "user", "content": "x"}], "model": "\ud800"}',
    ):
        assert echo_server.client.post(CHAT, content=content).status_code in (400, 404)
    assert echo_server.client.post("/v1/completions", content=rb'{"prompt": "\ud800"}').status_code == 400


def test_a_body_over_the_limit_is_413(echo_server: LiveServer) -> None:
    text = "x" * (32 * 2**20)
    response = echo_server.post("/v1/completions", prompt=text)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"

    def parts() -> Any:  # chunked: no length is declared
        yield b'{"prompt": "'
        for _ in range(33):
            yield b"x" * 2**20

    assert echo_server.client.post("/v1/completions", content=parts()).status_code == 413
    assert echo_server.client.get("/health").status_code == 200


def test_tokenize_and_back(echo_server: LiveServer) -> None:
    text = "é🙂 <|im_start|> fin"
    found = echo_server.post("/tokenize", prompt=text, add_special_tokens=False).json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 2048
    assert echo_server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    response = echo_server.post("/detokenize", tokens=[1, 99999])
    assert response.status_code == 400 and response.json()["error"]["param"] == "tokens[1]"


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks(name: str) -> None:
    with pytest.raises(ApiError, match=f"{name} is not a JSON number"):
        parse_json(f'{{"a": {name}}}'.encode())


def test_everything_waits_for_the_model(tiny_checkpoint: Path) -> None:
    settings = Settings(model=tiny_checkpoint, cpu=True)
    context = Context(Front(settings, "named"), Worker(settings))

    async def run() -> None:
        transport = httpx.ASGITransport(app=make_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/health")).json() == {"status": "loading", "model": "named"}
            assert (await client.get("/health")).status_code == 503
            response = await client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
            assert response.status_code == 503 and "being loaded" in response.json()["error"]["message"]
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "named"
            assert "mimo_vk_ready 0" in (await client.get("/metrics")).text

    asyncio.run(run())


def test_half_a_request_is_answered_when_the_server_stops(tiny_checkpoint: Path) -> None:
    """The server then cancels what it still waits for; the client is told why, and the log has no traceback."""
    settings = Settings(model=tiny_checkpoint, cpu=True)
    context = Context(Front(settings), Worker(settings))
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append(None)
            return {"type": "http.request", "body": b'{"messages": [', "more_body": True}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        task = asyncio.create_task(make_app(context)(scope, receive, send))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    asyncio.run(run())
    _, start, body = sent
    assert start["status"] == 503 and json.loads(body["body"])["error"]["message"] == "the server is stopping"
    assert context.metrics.requests == {(CHAT, "unavailable"): 1}


class Silent:
    """A task whose events are given by the test."""

    cancelled = False

    async def __aenter__(self) -> Silent:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancelled = True


def streamed(
    events: Any, *, keep_alive: float = 0.01, leave_after: float | None = None
) -> tuple[Silent, Record, list[bytes]]:
    """What a stream sends of these events, to a client that leaves after a while or stays."""
    task, record, sent = Silent(), Record("POST", CHAT), []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(leave_after if leave_after is not None else 3600)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"<start>"))

    async def run() -> None:
        stream = EventStream(task, events, record, keep_alive=keep_alive)  # type: ignore[arg-type]
        await stream({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 10))
    return task, record, sent


def test_a_silent_stream_is_kept_alive() -> None:
    async def events() -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(0.08)
        yield {"text": "late\u2028"}
        yield {"text": "at once"}

    task, record, sent = streamed(events)
    assert sent[0] == b"<start>" and 2 <= sent.count(b": keep-alive\n\n") <= 9
    data = [json.loads(part[6:]) for part in sent if part.startswith(b"data: {")]
    assert data == [{"text": "late\u2028"}, {"text": "at once"}] and all(part.isascii() for part in sent)
    assert sent[-2:] == [b"data: [DONE]\n\n", b""] and task.cancelled and record.outcome == ""


def test_a_stream_that_fails_says_so_and_is_not_done() -> None:
    async def events() -> AsyncIterator[dict[str, Any]]:
        yield {"text": "begun"}
        raise Unavailable("gone")

    task, record, sent = streamed(events)
    assert json.loads(sent[2][6:])["error"]["message"] == "gone" and sent[-1] == b""
    assert b"data: [DONE]\n\n" not in sent and record.outcome == "unavailable" and task.cancelled


def test_a_client_that_leaves_a_stream_ends_its_task() -> None:
    ended = []

    async def events() -> AsyncIterator[dict[str, Any]]:
        try:
            await asyncio.sleep(3600)
            yield {}
        finally:
            ended.append(True)

    task, record, sent = streamed(events, leave_after=0.05)
    assert task.cancelled and ended == [True] and record.outcome == "cancelled" and b"" not in sent


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 1.5, 99):
        histogram.add(value)
    assert list(histogram.lines("x")) == [
        'mimo_vk_x_bucket{le="1"} 2',
        'mimo_vk_x_bucket{le="10"} 3',
        'mimo_vk_x_bucket{le="+Inf"} 4',
        "mimo_vk_x_sum 102.000000",
        "mimo_vk_x_count 4",
    ]


def test_the_metrics_add_up(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, program="tests.echo_model") as server:
        first = server.chat("one two", temperature=0)["usage"]
        second = server.chat("one two", temperature=0)["usage"]
        server.post(CHAT, messages=[])
        assert server.metric("requests_total", route=CHAT, outcome="ok") == 2
        assert server.metric("requests_total", route=CHAT, outcome="bad_request") == 1
        assert server.metric("prompt_tokens_total") == first["prompt_tokens"] + second["prompt_tokens"]
        assert server.metric("generated_tokens_total") == first["completion_tokens"] + second["completion_tokens"]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second))
        assert server.metric("reused_tokens_total") == cached
        assert server.metric("time_to_first_token_seconds_count") == 2
        text = server.client.get("/metrics").text
        for line in text.splitlines():
            assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))


def test_a_task_can_be_cancelled_more_than_once(tiny_checkpoint: Path) -> None:
    worker = Worker(Settings(model=tiny_checkpoint))
    task = Task(worker, 1, None)  # type: ignore[arg-type]
    task.cancel()
    task.cancel()
