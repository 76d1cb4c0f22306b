"""Clients that leave, a queue that is full, a process that dies, and how the server starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live_server import LiveServer, events, serving, worker_pid

CHAT = "/v1/chat/completions"
SLOW = "SLOW " + "words and more words " * 20  # seconds at 0.02 s a token
SLOW_PROMPT = "READ SLOWLY " + "words and more words " * 20


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def raw_request(server: LiveServer, text: str, **more: Any) -> socket.socket:
    """A chat request on a socket of its own, to be closed at will."""
    return raw_post(server, CHAT, body(text, **more))


def raw_post(server: LiveServer, path: str, content: dict[str, Any]) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    request = httpx.Request("POST", server.url + path, json=content)
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in request.headers.items())
    connection.sendall(head.encode() + b"\r\n" + request.read())
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", [SLOW, SLOW_PROMPT])
def test_a_client_that_leaves_stops_its_work(echo_server: LiveServer, text: str, stream: bool) -> None:
    before = echo_server.metric("requests_total", route=CHAT, outcome="cancelled")
    connection = raw_request(echo_server, text, stream=stream)
    echo_server.wait_metric("requests_running", 1)
    time.sleep(0.1)
    connection.close()
    began = time.monotonic()
    echo_server.wait_metric("requests_running", 0, seconds=2)
    assert time.monotonic() - began < 2  # it would have taken longer by itself
    echo_server.wait_metric("requests_total", before + 1, route=CHAT, outcome="cancelled")
    assert echo_server.chat("still here", temperature=0)["choices"][0]["message"]["content"] == "still here"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_disturbs_nobody(echo_server: LiveServer, stream: bool) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(echo_server.chat, SLOW[:100], temperature=0)
        echo_server.wait_metric("requests_running", 1)
        leaving = raw_request(echo_server, "never answered", stream=stream)
        echo_server.wait_metric("requests_queued", 1)
        behind = pool.submit(echo_server.chat, "me next", temperature=0)
        echo_server.wait_metric("requests_queued", 2)
        leaving.close()
        echo_server.wait_metric("requests_queued", 1)
        assert running.result(30)["choices"][0]["message"]["content"] == SLOW[:100]
        assert behind.result(30)["choices"][0]["message"]["content"] == "me next"


def test_a_streams_headers_come_before_its_turn(echo_server: LiveServer) -> None:
    running = raw_request(echo_server, SLOW)
    echo_server.wait_metric("requests_running", 1)
    with echo_server.client.stream("POST", CHAT, json=body("later", stream=True)) as response:
        assert response.status_code == 200 and echo_server.metric("requests_queued") == 1
        running.close()
        response.read()
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(response)) == "later"


def test_more_than_the_queue_holds_is_429(echo_server: LiveServer) -> None:
    connections = [raw_request(echo_server, SLOW, stream=True)]
    echo_server.wait_metric("requests_running", 1)
    connections += [raw_request(echo_server, "waiting") for _ in range(32)]
    echo_server.wait_metric("requests_queued", 32)
    for stream in (True, False):
        response = echo_server.post(CHAT, **body("one too many", stream=stream))
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
    for connection in connections:
        connection.close()
    echo_server.wait_metric("requests_queued", 0)
    echo_server.wait_metric("requests_running", 0)


def test_the_models_death_is_one_requests_503(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, program="tests.echo_model") as server, ThreadPoolExecutor(3) as pool:
        victim = worker_pid(server)
        inflight = pool.submit(server.post, CHAT, **body(SLOW))
        server.wait_metric("requests_running", 1)
        queued = pool.submit(server.chat, "I waited", temperature=0)
        server.wait_metric("requests_queued", 1)
        os.kill(victim, signal.SIGKILL)
        response = inflight.result(30)
        assert response.status_code == 503 and "died" in response.json()["error"]["message"]
        assert queued.result(60)["choices"][0]["message"]["content"] == "I waited"
        assert worker_pid(server) != victim and server.metric("worker_restarts_total") == 1
        stream = pool.submit(server.post, CHAT, **body(SLOW, stream=True))
        server.wait_metric("requests_running", 1)
        os.kill(worker_pid(server), signal.SIGKILL)
        text = stream.result(30).text
        assert '"died' not in text and "died while it worked" in text and "[DONE]" not in text
        assert server.chat("and again", temperature=0)["choices"][0]["finish_reason"] == "stop"
        assert server.client.get("/health").status_code == 200


def test_health_answers_during_a_long_prefill(tiny_server: LiveServer) -> None:
    prompts = [[7 + i] * 500 for i in range(32)]  # seconds of reading
    connection = raw_post(tiny_server, "/v1/completions", {"prompt": prompts, "max_tokens": 1})
    tiny_server.wait_metric("requests_running", 1)
    times: list[float] = []
    while len(times) < 30 and tiny_server.metric("requests_running") == 1:
        began = time.monotonic()
        assert tiny_server.client.get("/health").status_code == 200
        times.append(time.monotonic() - began)
    connection.close()
    tiny_server.wait_metric("requests_running", 0)
    assert len(times) >= 10 and sorted(times)[len(times) // 2] < 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tiny_checkpoint: Path, number: int) -> None:
    server = LiveServer(tiny_checkpoint, program="tests.echo_model")
    child = worker_pid(server)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.post, CHAT, **body(SLOW))
        server.wait_metric("requests_running", 1)
        stream = pool.submit(httpx.post, server.url + CHAT, json=body("x", stream=True), timeout=60)
        server.wait_metric("requests_queued", 1)
        server.process.send_signal(number)
        assert whole.result(20).status_code == 503
        assert "the server is stopping" in stream.result(20).text
    assert server.close(number) == 0
    assert not Path(f"/proc/{child}").exists()
    assert "Traceback" not in server.log


def test_no_process_outlives_a_server_that_was_killed(tiny_checkpoint: Path) -> None:
    for busy in (False, True):
        server = LiveServer(tiny_checkpoint, program="tests.echo_model")
        child = worker_pid(server)
        if busy:
            connection = raw_request(server, SLOW)
            server.wait_metric("requests_running", 1)
        server.process.kill()
        server.process.wait()
        if busy:
            connection.close()
        end = time.monotonic() + 10
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < end, "the model's process is an orphan"
            time.sleep(0.05)


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mimo_vk", "serve", "--cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_what_keeps_it_from_starting_is_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases: list[tuple[Callable[[], subprocess.CompletedProcess[str]], str]] = [
            (
                lambda: serve("--model", str(tiny_checkpoint), "--port", port),
                f"--port: can't listen on 127.0.0.1, port {port}: address already in use; --port 0 takes one that is",
            ),
            (lambda: serve("--model", str(tiny_checkpoint), "--port", "http"), "--port: expected a whole number"),
            (lambda: serve("--model", str(tmp_path)), "config.json"),
        ]
        for run, text in cases:
            done = run()
            assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
            assert done.stdout == ""


def test_a_checkpoint_whose_weights_cannot_be_opened(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Found by the model's process, told by the program."""
    for file in tiny_checkpoint.iterdir():
        if not file.name.endswith("ep1_shard0.safetensors"):
            (tmp_path / file.name).symlink_to(file)
    done = serve("--model", str(tmp_path), "--port", "0")
    assert done.returncode == 2 and "ep1_shard0.safetensors" in done.stderr and "Traceback" not in done.stderr


def test_the_banner_says_where_what_and_how_to_stop(tiny_server: LiveServer) -> None:
    url = tiny_server.url
    assert tiny_server.banner == f"mimo-vk: checkpoint at {url}/v1, its web page at {url}/ - Ctrl-C stops it\n"


def test_the_log_has_one_line_a_request_and_no_text(echo_server: LiveServer) -> None:
    before = len(echo_server.request_lines)
    secret = "xyzzy-secret"
    echo_server.chat(secret, temperature=0)
    echo_server.client.get(f"/nowhere?q={secret}")
    lines = echo_server.request_lines[before:]
    assert [(line["status"], line["outcome"]) for line in lines] == [(200, "ok"), (404, "bad_request")]
    assert lines[0]["generated_tokens"] > 0 and lines[0]["first_token_seconds"] > 0
    assert secret not in echo_server.log
