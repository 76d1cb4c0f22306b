"""``chat --attach``: a chat over HTTP that feels like one in this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from engines import open_engine

from mimo_vk.attach import Remote, root_url
from mimo_vk.conversation import ContextFull
from mimo_vk.errors import MimoError, UsageError
from mimo_vk.pictures import user_message
from mimo_vk.settings import Settings
from mimo_vk.stream import Content, Event, Reasoning
from mimo_vk.systemone import answer
from mimo_vk.systemone_request import parse_request
from tests.live_server import LiveServer, serving
from tests.picture_files import png
from tests.terminal import CTRL_C, CTRL_D, Terminal

ROOT = Path(__file__).resolve().parent.parent
CHAT = [sys.executable, "-m", "mimo_vk", "chat"]


@pytest.fixture
def remote(echo_server: LiveServer) -> Iterator[Remote]:
    with Remote(echo_server.url, Settings(temperature=0.0)) as opened:
        yield opened


def joined(events: Iterator[Event], kind: type[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def test_turns_are_kept_and_sent(remote: Remote) -> None:
    assert joined(remote.ask("Grüße 🙂", think=False), Content) == "Grüße 🙂"
    assert remote.finish_reason == "stop"
    assert joined(remote.ask("<think>hm</think>Ho", think=True), Reasoning) == "hm"
    assert remote.messages == [
        {"role": "user", "content": "Grüße 🙂"},
        {"role": "assistant", "content": "Grüße 🙂"},
        {"role": "user", "content": "<think>hm</think>Ho"},
        {"role": "assistant", "content": "Ho", "reasoning_content": "hm"},
    ]
    used = remote.stats()[0]
    assert used.startswith("context: ") and used != "context: 0 tokens"
    remote.reset()
    assert remote.messages == [] and remote.stats()[0] == "context: 0 tokens"


def test_pictures_are_sent_along(remote: Remote, echo_server: LiveServer) -> None:
    red, blue = png("red"), png("blue", 96, 64)
    assert joined(remote.ask("Red?", think=False, pictures=[red]), Content).endswith("Red?")
    alone = int(remote.stats()[0].split()[1])
    assert joined(remote.ask("And?", think=False, pictures=[red, blue]), Content).endswith("And?")
    assert int(remote.stats()[0].split()[1]) > alone + 10  # tokens of the pictures, the first one's again
    assert remote.messages[0] == user_message("Red?", [red])
    decision = remote.decide("Is it red?", ("yes", "no"), pictures=[blue])
    assert decision.probabilities == (0.5, 0.5)
    with pytest.raises(UsageError, match=r"messages\[4\]\.content\[0\]\.image_url\.url: expected a picture"):
        joined(remote.ask("?", think=False, pictures=[b"hello"]), Content)
    assert len(remote.messages) == 4


def test_a_stopped_answer_is_kept_as_far_as_it_came(echo_server: LiveServer, remote: Remote) -> None:
    seen: list[Event] = []
    for event in remote.ask("SLOW " + "word " * 200, think=False, cancel=lambda: len(seen) > 3):
        seen.append(event)
    assert remote.finish_reason == "cancelled"
    assert remote.messages[1] == {"role": "assistant", "content": joined(iter(seen), Content)}
    echo_server.wait_metric("requests_running", 0)  # the server has stopped too


def test_a_prompt_can_be_stopped_while_it_is_read(echo_server: LiveServer, remote: Remote) -> None:
    assert list(remote.ask("READ SLOWLY " + "word " * 300, think=False, cancel=lambda: True)) == []
    assert (remote.finish_reason, remote.messages) == ("cancelled", [])
    echo_server.wait_metric("requests_running", 0)


def test_a_full_context_is_said_so(remote: Remote) -> None:
    with pytest.raises(ContextFull, match="more than the context"):
        list(remote.ask("word " * 3000, think=False))
    assert remote.messages == []


def test_a_decision_has_the_api_s_numbers(tiny_server: LiveServer, tiny_checkpoint: Path) -> None:
    with Remote(tiny_server.url, Settings()) as remote:
        remote.messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        decision = remote.decide("Which?", ("a", "the b"))
    question = {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "the b": None}}
    request = parse_request({"state": remote.messages, "questions": {"q": question}})
    with open_engine(tiny_checkpoint) as engine:
        found = answer(engine, engine.session(), request)
    assert list(decision.probabilities) == list(found.answers["q"]["probabilities"].values())
    assert (decision.prompt_tokens, decision.option_tokens) == (found.input_tokens, found.output_tokens)
    assert len(remote.messages) == 2


def test_the_key_is_sent(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "--api-key", "schlüssel", program="tests.echo_model") as server:
        with pytest.raises(MimoError, match="no key was given"):
            Remote(server.url, Settings())
        with Remote(server.url, Settings(api_key="schlüssel")) as remote:
            assert joined(remote.ask("Hi", think=False), Content) == "Hi"


class Foreign(BaseHTTPRequestHandler):
    """Another program's server, which lists a model as well."""

    said = ""

    def do_GET(self) -> None:
        self._send('{"data": [{"id": "other"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._send(self.said)

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_another_programs_answers_are_one_line_each() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Remote(f"http://127.0.0.1:{server.server_port}", Settings()) as remote:
            for said in ("data: {broken\n\n", "data: []\n\n", 'data: {"choices": 5}\n\n', 'data: {"error": "no"}\n\n'):
                Foreign.said = said
                with pytest.raises(MimoError, match="this server's answer can't be read"):
                    list(remote.ask("Hi", think=False))
            for said in ("<html>", "[]", '{"answers": {"q": null}, "usage": {}}'):
                Foreign.said = said
                with pytest.raises(MimoError, match="this server's answer can't be read"):
                    remote.decide("Is it?", ("yes", "no"))
            assert remote.messages == []
        server.shutdown()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a/v2", "http://a?b", "http://a:99999", "http://[", "x"]
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(UsageError, match="--attach"):
        root_url(url)


def test_an_address_with_and_without_v1() -> None:
    assert {root_url(f"http://host:80{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://host:80"}


def test_nobody_there_and_a_model_too_are_one_line_each() -> None:
    for flags, status, words in (
        (["--attach", "http://127.0.0.1:9"], 1, "no server answers there"),
        (["--attach", "http://127.0.0.1:9", "--model", "x"], 2, "--attach and --model"),
        (["--attach", "http://a b"], 2, "--attach"),
        (["--api-key", "secret"], 2, "only of use with --attach"),
    ):
        done = subprocess.run([*CHAT, *flags], input="Hi\n", capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1)
        assert words in done.stderr


def test_piped(echo_server: LiveServer) -> None:
    command = [*CHAT, "--attach", echo_server.url + "/v1"]
    text = "Hi\n/stats\n" + "word " * 3000 + "\nStill there?\n/quit\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, timeout=60)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("Hi", "Still there?")
    assert any(line.startswith("prompt: ") for line in lines)
    assert done.stderr.count("\n") == 1 and "/reset starts afresh" in done.stderr
    assert done.returncode == 2


def test_ctrl_c_on_a_terminal(echo_server: LiveServer) -> None:
    with Terminal([*CHAT, "--attach", echo_server.url], ROOT) as terminal:
        terminal.wait_for("checkpoint at http://")
        terminal.wait_for("> ")
        terminal.type("SLOW " + "long " * 300 + "\r")
        terminal.wait_for("SLOW")
        terminal.wait_for("\nSLOW long long")  # the answer, not the line that was typed
        terminal.type(CTRL_C)
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("And?\r")
        terminal.wait_for("\nAnd?")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0
        assert "Traceback" not in terminal.seen


def test_ctrl_c_ends_a_decision_or_a_prompt_s_reading_and_no_more(echo_server: LiveServer) -> None:
    """The server stops working on it too, and answers what comes next."""
    with Terminal([*CHAT, "--attach", echo_server.url], ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.type("/decide yes | no\r")
        terminal.wait_for("decide> ")
        stopped: Any = {"route": "/v1/systemone", "outcome": "cancelled"}
        before = echo_server.metric("requests_total", **stopped)
        for count in (1, 2):
            terminal.type("READ SLOWLY " + "word " * 300 + "\r")
            echo_server.wait_metric("requests_running", 1)
            terminal.type(CTRL_C)
            terminal.wait_for("stopped")
            terminal.wait_for("decide> ")
            echo_server.wait_metric("requests_total", before + count, **stopped)
        terminal.type("Is it?\r")
        assert "50.0%" in terminal.wait_for("entropy 1.00 of 1.00 bits")
        terminal.type("/decide\r")
        terminal.wait_for("turns again")
        terminal.type("READ SLOWLY " + "word " * 300 + "\r")
        echo_server.wait_metric("requests_running", 1)
        terminal.type(CTRL_C)
        terminal.wait_for("stopped")
        terminal.wait_for("> ")  # typed before it, the line would be seen twice
        terminal.type("Hello?\r")
        terminal.wait_for("\nHello?")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0
        assert "Traceback" not in terminal.seen
