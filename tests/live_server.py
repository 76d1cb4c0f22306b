"""A real server for tests: ``mimo-vk serve`` as a program of its own, on a port that is free."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 120
STOP_SECONDS = 30


class LiveServer:
    """The running program. url: without the /v1. log: what it wrote to standard error so far."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        program: str = "mimo_vk",
        command: str = "serve",
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by close()
        start = [sys.executable, "-m", program, command, "--model", str(model), "--cpu", "--port", "0"]
        self.process = subprocess.Popen(
            [*start, "--threads", "1", *flags],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            text=True,
        )
        assert self.process.stdout is not None
        self.banner = self.process.stdout.readline()  # pytest's own time limit is the caller's
        found = re.search(r"http://[^/]+", self.banner)
        assert found, f"no address: {self.banner!r}\n{self.log}"
        self.url = found[0]
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def log(self) -> str:
        position = self._errors.tell()
        self._errors.seek(0)
        text = self._errors.read().decode()
        self._errors.seek(position)
        return text

    @property
    def request_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        """A one-turn chat's answer; the request must succeed."""
        response = self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **more)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value; 0 before it is first counted."""
        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"mimo_vk_{name}" + (f"{{{shown}}}" if labels else "") + " "
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(wanted):
                return float(line.removeprefix(wanted))
        return 0.0

    def wait_metric(self, name: str, value: float, seconds: float = 20, **labels: str) -> None:
        """Wait until a metric has a value."""
        end = time.monotonic() + seconds
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < end, f"{name}{labels}: {found}, expected {value}\n{self.log[-2000:]}"
            time.sleep(0.02)

    def close(self, number: int = signal.SIGTERM) -> int:
        """Stop it; its exit status."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextmanager
def serving(
    model: Path, *flags: str, env: dict[str, str] | None = None, program: str = "mimo_vk", command: str = "serve"
) -> Iterator[LiveServer]:
    """A server for as long as the block runs."""
    server = LiveServer(model, *flags, env=env, program=program, command=command)
    try:
        yield server
    finally:
        server.close()


def worker_pid(server: LiveServer) -> int:
    """The model's process: the server's child that isn't Python's resource tracker."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    for pid in children:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if "spawn_main" in command:
            return int(pid)
    raise AssertionError(f"no worker among {children}")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of an event stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", response.text[-500:]
    return [json.loads(line) for line in lines[:-1]]
