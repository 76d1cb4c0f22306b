"""One request's figures: what its log line and the metrics say of it. The text of a prompt is kept only where the
server was told to log it, that of an answer never."""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mimo_vk.server.metrics import Metrics

log = logging.getLogger("mimo_vk.requests")
PICTURE = "data:"  # how a picture's text begins; the log holds none


@dataclass
class Record:
    """Filled in while a request is served. outcome: "" for what its status says, or cancelled or error."""

    method: str
    path: str
    route: str = "other"  # one of a few names, unlike the path
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    outcome: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    started: float | None = None  # when the model began to answer: the prompt was read
    first_token: float | None = None
    ended: float = 0.0
    log_prompt: bool = False
    prompt: Any = None

    def asked(self, prompt: Callable[[], Any]) -> None:
        """What the model is asked, for the log, if that is wanted there."""
        if self.log_prompt:
            self.prompt = _without_pictures(prompt())

    def token(self) -> None:
        """A token was generated."""
        self.generated_tokens += 1
        if self.first_token is None:
            self.first_token = time.monotonic()

    def result(self) -> str:
        """The outcome, in one word."""
        if self.outcome:
            return self.outcome
        if self.status < 400:
            return "ok"
        return {429: "rejected", 503: "unavailable"}.get(self.status, "error" if self.status >= 500 else "bad_request")

    def close(self, metrics: Metrics) -> None:
        """The end: count it and log it."""
        self.ended = time.monotonic()
        metrics.requests[self.route, self.result()] += 1
        metrics.prompt_tokens += self.prompt_tokens
        metrics.cached_tokens += self.cached_tokens
        metrics.generated_tokens += self.generated_tokens
        metrics.duration.add(self.ended - self.began)
        if self.first_token is not None:
            metrics.first_token.add(self.first_token - self.began)
            if self.generated_tokens > 1 and self.ended > self.first_token:
                metrics.rate.add((self.generated_tokens - 1) / (self.ended - self.first_token))
        log.info("%s", json.dumps(self._line()))

    def _line(self) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.id,
            "method": self.method,
            "path": self.path[:200],
            "status": self.status,
            "outcome": self.result(),
            "seconds": round(self.ended - self.began, 4),
        }
        if self.prompt_tokens:
            line |= {
                "stream": self.stream,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "generated_tokens": self.generated_tokens,
            }
        if self.first_token is not None:
            line["first_token_seconds"] = round(self.first_token - self.began, 4)
        return line if self.prompt is None else line | {"prompt": self.prompt}


def _without_pictures(value: Any) -> Any:
    """A JSON value, of each picture in it only how its text begins."""
    if isinstance(value, str):
        return value[:40] + "..." if value.startswith(PICTURE) and len(value) > 40 else value
    if isinstance(value, Mapping):
        return {key: _without_pictures(item) for key, item in value.items()}
    return [_without_pictures(item) for item in value] if isinstance(value, list | tuple) else value


def start_request_log() -> None:
    """Request lines as they are, one JSON object each, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)
