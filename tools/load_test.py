"""Many clients at once against a server on this machine, a third of them leaving early, for a bounded time.

    python -m tools.load_test [--seconds 120] [--clients 16] [--model DIR] [--threads N]

It starts ``mimo-vk serve`` on a free port of the loopback address and holds it to this: every request ends in an answer
or in an error that says why; the same question with the same seed has the same answer whoever else is asking, and an
echoed prompt is one's own; the server's counters are the clients' own; its memory stays flat; no process dies.
The status is 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTIONS = 40
LEAVING = 1 / 3
MEMORY_GROWTH = 0.10  # of the resident memory at the end of the first third
MEMORY_FLOOR = 24 * 2**20  # bytes that allocators may keep on top
REQUEST_SECONDS = 120.0


@dataclass
class Tally:
    """What the clients saw."""

    sent: int = 0
    left: int = 0
    finished: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    first_byte: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)
    memory: list[tuple[float, int]] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ask:
    """One request. question: its number, which decides prompt, seed and length."""

    question: int
    stream: bool
    echo: bool

    @property
    def prompt(self) -> str:
        words = " ".join(f"w{(self.question * 7 + i * 3) % 50}" for i in range(4 + 20 * (self.question % 3)))
        return f"Question {self.question}: {words}?"

    @property
    def path(self) -> str:
        return COMPLETIONS if self.echo else CHAT

    def body(self) -> dict[str, Any]:
        common: dict[str, Any] = {"seed": self.question, "temperature": 1.0, "stream": self.stream}
        common["max_tokens"] = 4 if self.question % 2 else 40
        if self.stream:
            common["stream_options"] = {"include_usage": True}
        if self.echo:
            return {**common, "prompt": self.prompt, "echo": True}
        return {**common, "messages": [{"role": "user", "content": self.prompt}]}


def main() -> int:
    """Run it; 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", help="a checkpoint (the small model that ships with the project)")
    parser.add_argument("--threads", help="of the server; 1 on a machine that is busy with other work")
    args = parser.parse_args()
    if args.seconds < 1 or args.clients < 1:
        parser.error("--seconds and --clients: expected 1 or more")
    command = [
        sys.executable,
        "-m",
        "mimo_vk",
        "serve",
        "--cpu",
        "--port",
        "0",
        "--ctx",
        "1024",
        "--log-level",
        "error",
    ]
    command += [
        part for name in ("model", "threads") if (value := getattr(args, name)) for part in (f"--{name}", value)
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://[^/]+", server.stdout.readline())
        if found is None:
            print("the server did not start", file=sys.stderr)
            return 1
        tally = asyncio.run(load(found[0], server.pid, args.clients, args.seconds))
        return report(tally, args)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


async def load(url: str, pid: int, clients: int, seconds: float) -> Tally:
    """All clients for that long; then what the server says of itself is held against what they saw."""
    tally, end = Tally(), time.monotonic() + seconds
    watcher = asyncio.create_task(watch(url, pid, tally, end))
    await asyncio.gather(*(client(url, i, tally, end) for i in range(clients)))
    await watcher
    async with connect(url) as asking:
        for _ in range(100):  # the last of those that left may still be noticed
            metrics = read_metrics((await asking.get("/metrics")).text)
            if metrics["requests_running"] == metrics["requests_queued"] == 0:
                break
            await asyncio.sleep(0.1)
        check_counters(tally, metrics)
        if (await asking.get("/health")).status_code != 200:
            tally.faults.append("/health is not ok at the end")
    check_memory(tally)
    return tally


async def client(url: str, number: int, tally: Tally, end: float) -> None:
    """One client: a request, an answer or an early leave, a pause; a third of its requests are left."""
    chance = random.Random(number)
    async with connect(url) as asking:
        while time.monotonic() < end:
            ask = Ask(chance.randrange(QUESTIONS), chance.random() < 0.5, chance.random() < 0.3)
            leaves = chance.random() < LEAVING
            tally.sent += 1
            try:
                await asyncio.wait_for(one(asking, ask, tally), chance.uniform(0.02, 0.6) if leaves else None)
            except TimeoutError:  # the request is cancelled, and its connection closed
                tally.left += 1
            except httpx.HTTPError as error:
                tally.faults.append(f"{ask}: {type(error).__name__}: {error}")
            await asyncio.sleep(chance.uniform(0, 0.05))


def connect(url: str) -> httpx.AsyncClient:
    """A client without TLS, whose certificates take longer to load than an answer takes."""
    return httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, verify=False)


async def one(asking: httpx.AsyncClient, ask: Ask, tally: Tally) -> None:
    """One request to its end."""
    began = time.monotonic()
    async with asking.stream("POST", ask.path, json=ask.body()) as response:
        tally.first_byte.append(time.monotonic() - began)
        text = (await response.aread()).decode()
    tally.statuses[response.status_code] += 1
    if response.status_code != 200:
        if "error" not in text:
            tally.faults.append(f"{ask}: status {response.status_code} without an error: {text[:200]}")
        return
    answer, tokens = streamed(text) if ask.stream else whole(json.loads(text))
    tally.finished += 1
    tally.tokens += tokens
    if ask.echo:
        if not answer.startswith(ask.prompt):
            tally.faults.append(f"{ask}: the echo begins {answer[:60]!r}")
        return
    before = tally.answers.setdefault(ask.question, answer)
    if before != answer:
        tally.faults.append(f"{ask}: answered {answer!r}, and {before!r} before")


def whole(body: dict[str, Any]) -> tuple[str, int]:
    """An answer's text and tokens."""
    [choice] = body["choices"]
    message = choice.get("message") or {"content": choice.get("text")}
    text = (
        (message.get("reasoning_content") or "") + "|" + message["content"] if "role" in message else message["content"]
    )
    return text, body["usage"]["completion_tokens"]


def streamed(text: str) -> tuple[str, int]:
    """The same of an event stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise httpx.StreamError(f"a stream ended with {text[-200:]!r}")
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if chunks[0]["object"] == "text_completion":
        return "".join(choice["text"] for choice in choices), chunks[-1]["usage"]["completion_tokens"]
    deltas = [choice["delta"] for choice in choices]
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    return f"{reasoning}|{content}", chunks[-1]["usage"]["completion_tokens"]


async def watch(url: str, pid: int, tally: Tally, end: float) -> None:
    """Twice a second: memory of the server and its children, and how long /health takes."""
    async with connect(url) as asking:
        while time.monotonic() < end:
            began = time.monotonic()
            await asking.get("/health")
            tally.health.append(time.monotonic() - began)
            tally.memory.append((began, resident(pid)))
            await asyncio.sleep(0.5)


def resident(pid: int) -> int:
    """Bytes that a process and its children hold in memory."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for one_pid in (str(pid), *children):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{one_pid}/status").read_text())
        total += int(found[1]) * 1024 if found else 0
    return total


def read_metrics(text: str) -> dict[str, float]:
    """Values by name with labels, less the prefix."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("mimo_vk_"): float(value) for name, value in lines}


def check_counters(tally: Tally, metrics: dict[str, float]) -> None:
    """Requests by outcome, and tokens."""
    outcomes: Counter[str] = Counter()
    for name, value in metrics.items():
        found = re.fullmatch(r'requests_total\{route="(/v1/[^"]*)",outcome="(\w+)"\}', name)
        if found:
            outcomes[found[2]] += int(value)
    seen = f"{dict(outcomes)}, and the clients sent {tally.sent}, got {dict(tally.statuses)} and left {tally.left}"
    # A client that left may have done so before its request was whole, or after its answer was.
    if not tally.sent - tally.left <= sum(outcomes.values()) <= tally.sent:
        tally.faults.append(f"requests counted: {seen}")
    if not tally.finished <= outcomes["ok"] <= tally.finished + tally.left or outcomes["cancelled"] > tally.left:
        tally.faults.append(f"outcomes counted: {seen}")
    if outcomes["rejected"] != tally.statuses[429] or outcomes["error"] or outcomes["unavailable"]:
        tally.faults.append(f"errors counted: {seen}")
    if metrics["generated_tokens_total"] < tally.tokens:
        tally.faults.append(f"{metrics['generated_tokens_total']:.0f} tokens counted, the clients got {tally.tokens}")
    if metrics["worker_restarts_total"]:
        tally.faults.append("the model's process was started again")


def check_memory(tally: Tally) -> None:
    """The last third against the end of the first."""
    if len(tally.memory) < 12:
        return
    third = len(tally.memory) // 3
    early, late = max(m for _, m in tally.memory[:third]), max(m for _, m in tally.memory[-third:])
    if late > early * (1 + MEMORY_GROWTH) + MEMORY_FLOOR:
        tally.faults.append(f"memory grew from {early / 1e6:.0f} MB to {late / 1e6:.0f} MB")


def report(tally: Tally, args: argparse.Namespace) -> int:
    """The figures, then the faults."""
    first, health = sorted(tally.first_byte), sorted(tally.health)
    print(
        f"{args.clients} clients for {args.seconds:.0f} s: {tally.sent} requests, {tally.finished} answered, "
        f"{tally.left} left early, other statuses {dict(tally.statuses - Counter({200: tally.statuses[200]}))}\n"
        f"{tally.tokens} tokens ({tally.tokens / args.seconds:.0f}/s); first byte: median {middle(first):.3f} s, "
        f"worst {first[-1] if first else 0:.3f} s; /health: median {middle(health) * 1000:.1f} ms, "
        f"worst {health[-1] * 1000:.1f} ms\n"
        f"memory {tally.memory[0][1] / 1e6:.0f} MB at first, {tally.memory[-1][1] / 1e6:.0f} MB at the end"
    )
    for fault in tally.faults[:20]:
        print(f"fault: {fault}")
    print(f"{len(tally.faults)} faults")
    return 1 if tally.faults else 0


def middle(values: list[float]) -> float:
    """The median of sorted values."""
    return values[len(values) // 2] if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
