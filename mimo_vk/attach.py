"""``mimo-vk chat --attach URL``: the same conversation, with a running server instead of an engine of one's own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import re
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from mimo_vk import __version__
from mimo_vk.conversation import Cancel, ContextFull, Progress
from mimo_vk.decide import Decision
from mimo_vk.errors import Cancelled, MimoError, UsageError
from mimo_vk.pictures import data_uri, user_message
from mimo_vk.settings import Settings
from mimo_vk.stats import Stats
from mimo_vk.stream import Content, Event, Reasoning

T = TypeVar("T")
POLL = 0.05  # seconds between two looks at whether Ctrl-C was pressed
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 60.0  # a server's stream says something at least every 10
CONTEXT_FULL = "are more than the context"  # in the server's message
_BLANK = re.compile(r"\s")
_COUNTERS = {  # of /metrics, as Stats has them
    "prefill_tokens_total": "prefill_tokens",
    "prefill_seconds_total": "prefill_seconds",
    "reused_tokens_total": "reused_tokens",
    "pictures_total": "pictures",
    "picture_seconds_total": "picture_seconds",
    "decode_tokens_total": "decode_tokens",
    "decode_seconds_total": "decode_seconds",
    'expert_reads_total{place="ram"}': "expert_hits",
    'expert_reads_total{place="disk"}': "expert_misses",
    'expert_reads_total{place="device"}': "tier_hits",
    "disk_read_bytes_total": "bytes_read",
}


class Client:
    """Requests that a person can stop. UsageError for a bad URL; MimoError for what the server, or the way, refuses."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = root_url(url)
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={b"authorization": f"Bearer {key}".encode()} if key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                trust_env=not _is_loopback(self.url),  # no proxy leads back to this machine
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise UsageError(f"--attach, or its key: {error}") from None
        self._loop = asyncio.new_event_loop()

    def get(self, path: str) -> httpx.Response:
        """A GET's answer."""
        return self._wait(self._call("GET", path), None)

    def post(self, path: str, body: dict[str, Any], cancel: Cancel | None = None) -> Any:
        """A POST's answer. Cancelled if told to stop."""
        response = self._wait(self._call("POST", path, json=body), cancel)
        with understood(self.url):
            return response.json()

    def events(self, path: str, body: dict[str, Any], cancel: Cancel | None = None) -> Iterator[dict[str, Any]]:
        """The objects of a POST's event stream. Leaving early, or being told to, ends the request."""
        response = self._wait(self._call("POST", path, json=body, stream=True), cancel)
        lines = response.aiter_lines()
        try:
            while (line := self._wait(_next(lines), cancel)) is not None:
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    with understood(self.url):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise MimoError(f"{self.url}: {event['error']['message']}")
                    yield event
            raise MimoError(f"{self.url}: the answer broke off")
        finally:
            self._wait(response.aclose(), None)

    async def _call(self, method: str, path: str, *, stream: bool = False, **more: Any) -> httpx.Response:
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS) if stream else httpx.USE_CLIENT_DEFAULT
        request = self._http.build_request(method, path, timeout=timeout, **more)
        response = await self._http.send(request, stream=stream)
        if response.is_error:
            await response.aread()
            await response.aclose()
            raise _refusal(self.url, response)
        return response

    def _wait(self, work: Coroutine[Any, Any, T], cancel: Cancel | None) -> T:
        """Run ``work`` to its end, looking at ``cancel`` now and then."""
        task = self._loop.create_task(work)
        try:
            while not task.done():
                if cancel is not None and cancel():
                    raise Cancelled("stopped by the caller")
                self._loop.run_until_complete(asyncio.wait({task}, timeout=POLL))
            return task.result()
        except httpx.HTTPError as error:
            raise MimoError(f"{self.url}: {_words(error)}") from None
        finally:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait({task}))

    def close(self) -> None:
        """Close the connections."""
        self._wait(self._http.aclose(), None)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Remote:
    """A conversation with a server; see ``mimo_vk.talk.Talk``. The turns are kept here, and sent with each question."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.finish_reason = ""
        self.messages: list[dict[str, Any]] = []
        self._used = 0
        chosen = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": settings.seed}
        self._sampling = {name: value for name, value in chosen.items() if value is not None}
        self._client = Client(url, settings.api_key)
        try:
            self._model = self._client.get("/v1/models").json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            self.close()
            raise MimoError(f"{self._client.url}: this is no server of ours: it lists no models") from None
        except MimoError:
            self.close()
            raise

    @property
    def begun(self) -> bool:
        return bool(self.messages)

    def banner(self) -> str:
        return f"mimo-vk {__version__}: {self._model} at {self._client.url}"

    def ask(
        self,
        text: str,
        *,
        think: bool,
        pictures: Sequence[bytes] = (),
        cancel: Cancel | None = None,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
    ) -> Iterator[Event]:
        """Answer one more user turn. A partial answer is kept; a turn that got none, or failed, is forgotten."""
        turns = [*self.messages, user_message(text, pictures)]
        sent = [_sent(turn) for turn in turns]
        body = {"messages": sent, "stream": True, "stream_options": {"include_usage": True}, "enable_thinking": think}
        answer = {"content": "", "reasoning_content": ""}
        self.finish_reason = ""
        failed = True
        try:
            for event in self._client.events("/v1/chat/completions", {**body, **self._sampling}, cancel):
                with understood(self._client.url):
                    pieces = self._pieces(event, answer)
                yield from pieces
            failed = False
        except Cancelled:
            self.finish_reason = "cancelled"
            failed = False
        except GeneratorExit:
            failed = False
            raise
        finally:
            if not failed and (any(answer.values()) or self.finish_reason == "stop"):
                kept = {key: value for key, value in answer.items() if value or key == "content"}
                self.messages = [*turns, {"role": "assistant", **kept}]

    def _pieces(self, event: dict[str, Any], answer: dict[str, str]) -> list[Event]:
        """What one object of the stream adds to the answer."""
        pieces: list[Event] = []
        if event.get("usage"):
            self._used = event["usage"]["total_tokens"]
        for choice in event["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            for key, kind in (("reasoning_content", Reasoning), ("content", Content)):
                if piece := choice["delta"].get(key):
                    answer[key] += piece
                    pieces.append(kind(piece))
        return pieces

    def decide(
        self,
        text: str,
        options: tuple[str, ...],
        *,
        pictures: Sequence[bytes] = (),
        cancel: Cancel | None = None,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
    ) -> Decision:
        """A closed question. The server reads the conversation as its state: an array of its messages."""
        assets: dict[str, dict[str, str]] = {}
        state = [{"role": turn["role"], "content": _with_assets(turn["content"], assets)} for turn in self.messages]
        asked = _with_assets(user_message(text, pictures)["content"], assets)
        question = {"type": "choice", "instructions": asked, "criteria": dict.fromkeys(options)}
        body: dict[str, Any] = {"state": state or "", "questions": {"q": question}, "pin_state": True}
        if assets:
            body["assets"] = assets
        reply = self._client.post("/v1/systemone", body, cancel)
        with understood(self._client.url):
            found, usage = reply["answers"]["q"]["probabilities"], reply["usage"]
            shares = tuple(float(found[option]) for option in options)
            return Decision(options, shares, usage["input_tokens"], usage["output_tokens"])

    def reset(self) -> None:
        self.messages, self._used = [], 0

    def stats(self) -> list[str]:
        """The server's counters since it started, whoever asked."""
        stats = Stats()
        for line in self._client.get("/metrics").text.splitlines():
            name, _, value = line.removeprefix("mimo_vk_").rpartition(" ")
            if name in _COUNTERS:
                kind = type(getattr(stats, _COUNTERS[name]))
                setattr(stats, _COUNTERS[name], kind(float(value)))
        return [f"context: {self._used} tokens", f"the server at {self._client.url}, for all who ask:", *stats.lines()]

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def understood(url: str) -> Iterator[None]:
    """An answer is read: MimoError where it isn't one of ``mimo-vk serve``."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError):
        raise MimoError(f"{url}: this server's answer can't be read: is it another program's?") from None


def _sent(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn as OpenAI's API has it: pictures as data: URIs."""
    if isinstance(turn["content"], str):
        return turn
    return {**turn, "content": [_sent_part(part) for part in turn["content"]]}


def _sent_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(part["data"])}} if part["type"] == "image" else part


def _with_assets(content: str | list[dict[str, Any]], assets: dict[str, dict[str, str]]) -> str:
    """A turn's text with a placeholder where a picture stood, which ``assets`` then has."""
    if isinstance(content, str):
        return content
    text = ""
    for part in content:
        if part["type"] == "image":
            name = f"picture-{uuid.uuid4()}"  # no one else writes it
            assets[name] = {"type": "image", "format": "png", "data_base64": base64.b64encode(part["data"]).decode()}
            text += name
        else:
            text += part["text"]
    return text


def root_url(text: str) -> str:
    """A server's address, with or without its /v1. UsageError for anything else."""
    try:
        parts = urlsplit(text)
        sound = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not _BLANK.search(text)
        )
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or parts.path.rstrip("/") not in ("", "/v1"):
        raise UsageError(f"--attach: expected an address such as http://127.0.0.1:8000, found {text!r}")
    return f"{parts.scheme}://{parts.netloc}"


def _is_loopback(url: str) -> bool:
    name = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _refusal(url: str, response: httpx.Response) -> MimoError:
    """The server's own words, from its envelope."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return MimoError(f"{url}: {response.status_code} {response.reason_phrase}")
    if CONTEXT_FULL in message:
        return ContextFull(message)
    return (UsageError if response.status_code in (400, 422) else MimoError)(f"{url}: {message}")


def _words(error: httpx.HTTPError) -> str:
    """Why there was no answer."""
    if isinstance(error, httpx.ConnectError):
        return f"no server answers there: {error}"
    if isinstance(error, httpx.TimeoutException):
        return "the server says nothing"
    return f"the connection broke: {error or type(error).__name__}"


async def _next(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)
