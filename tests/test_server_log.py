"""The log: one line a request, and a prompt's text only where it was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mimo_vk.server.record import Record
from mimo_vk.server.systemone import asked_text
from mimo_vk.systemone_request import parse_request
from tests.live_server import LiveServer, serving

SECRET = "Zanzibar"
PICTURE = "data:image/png;base64," + "A" * 5000
CHAT, COMPLETIONS, SYSTEM_ONE = "/v1/chat/completions", "/v1/completions", "/v1/systemone"
QUESTION = {"type": "noul", "instructions": f"Is it {SECRET}?"}


def ask_everywhere(server: LiveServer) -> None:
    """The secret in every place where a person's text may stand, in sound requests and in faulty ones."""
    message = {"role": "user", "content": SECRET}
    for path, body, status in (
        (CHAT, {"messages": [message], "temperature": 0}, 200),
        (CHAT, {"messages": [message], "stream": True}, 200),
        (CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}, 400),
        (CHAT, {"messages": [message], SECRET: SECRET}, 400),
        (CHAT, {"messages": [message], "model": SECRET}, 404),
        (COMPLETIONS, {"prompt": SECRET, "max_tokens": 2, "echo": True, "logprobs": 1}, 200),
        (COMPLETIONS, {"prompt": [SECRET, ""]}, 400),
        (SYSTEM_ONE, {"state": {SECRET: SECRET}, "prefix": SECRET, "questions": {SECRET: QUESTION}}, 200),
        (SYSTEM_ONE, {"state": SECRET, "questions": {SECRET: {"type": SECRET}}}, 422),
        ("/tokenize", {"prompt": SECRET}, 200),
    ):
        assert server.post(path, **body).status_code == status, body
    assert server.client.post(CHAT, content=f'{{"{SECRET}'.encode()).status_code == 400
    server.wait_metric("requests_total", 4, route=CHAT, outcome="bad_request")  # its line is written behind the answer


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_no_text_of_a_prompt_is_in_the_log(tiny_checkpoint: Path, level: str) -> None:
    with serving(tiny_checkpoint, "--log-level", level, program="tests.echo_model") as server:
        ask_everywhere(server)
        paths = [line["path"] for line in server.request_lines]
    assert (paths.count(CHAT), paths.count(COMPLETIONS), paths.count(SYSTEM_ONE)) == (6, 2, 2)
    assert SECRET not in server.log


def test_the_text_is_in_the_log_where_that_was_asked_for(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "--log-prompts", "--log-level", "error", program="tests.echo_model") as server:
        ask_everywhere(server)
        lines = [(line["path"], line["prompt"]) for line in server.request_lines if "prompt" in line]
    asked = [{"role": "user", "content": SECRET}]
    assert [prompt for path, prompt in lines if path == CHAT] == [asked, asked]
    assert [prompt for path, prompt in lines if path == COMPLETIONS] == [SECRET]
    [decided] = [prompt for path, prompt in lines if path == SYSTEM_ONE]
    assert (decided["state"], decided["prefix"]) == ({SECRET: SECRET}, SECRET)
    assert decided["questions"][SECRET]["instructions"] == QUESTION["instructions"]


def test_the_variable_does_the_same(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, env={"MIMO_LOG_PROMPTS": "1"}, program="tests.echo_model") as server:
        server.chat(SECRET)
        server.wait_metric("requests_total", 1, route=CHAT, outcome="ok")  # its line is written behind the answer
        assert SECRET in server.log


def test_pictures_stay_out_of_the_log() -> None:
    image = {"type": "image", "format": "png", "data_base64": "QUFB" * 100}
    body = {"state": {"seen": "[[cat]]"}, "questions": {"q": QUESTION}, "assets": {"[[cat]]": image}}
    line = json.dumps(asked_text(parse_request(body)))
    assert "[[cat]]" in line and SECRET in line and "QUFB" not in line and "AAA" not in line
    record = Record("POST", CHAT, log_prompt=True)
    record.asked(lambda: [{"content": [{"type": "image_url", "image_url": {"url": PICTURE}}, "data: 1, 2"]}])
    assert record.prompt == [
        {"content": [{"type": "image_url", "image_url": {"url": PICTURE[:40] + "..."}}, "data: 1, 2"]}
    ]
