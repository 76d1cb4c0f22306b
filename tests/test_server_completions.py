"""Completions over HTTP: echo, offsets, and log-probabilities equal to a cold engine's in every bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import open_engine

from mimo_vk.engine import Engine
from mimo_vk.sampling import Sampler, log_softmax
from tests.live_server import LiveServer, events

IDS = [5, 200, 17, 33, 33, 90, 411, 2, 8, 300, 7, 7, 1]
TEXT = "naïve 🙂 <|im_start|>user\nhi 你"


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint, backend="numpy") as engine:
        yield engine


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def choice(server: LiveServer, **body: Any) -> dict[str, Any]:
    return dict(complete(server, **body)["choices"][0])


def test_echo_gives_the_prompt_back_with_offsets(tiny_server: LiveServer) -> None:
    found = choice(tiny_server, prompt=TEXT, max_tokens=3, echo=True, logprobs=2, seed=3)
    scores = found["logprobs"]
    assert found["text"].startswith(TEXT)
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        if token.startswith("bytes:"):
            assert offset >= len(TEXT) or not found["text"][offset].isascii()
        else:
            assert found["text"][offset : offset + len(token)] == token
    assert scores["text_offset"] == sorted(scores["text_offset"])
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert None not in scores["token_logprobs"][1:]


def test_a_prompts_log_probabilities_are_a_cold_engines(tiny_server: LiveServer, engine: Engine) -> None:
    complete(tiny_server, prompt=IDS[:6], max_tokens=2)  # a live state that a read-out must not use
    scores = choice(tiny_server, prompt=IDS, max_tokens=0, echo=True, logprobs=0)["logprobs"]
    rows = log_softmax(engine.session().prompt(IDS, all_logits=True), engine.vocab_limit)
    expected = [float(rows[i, token]) for i, token in enumerate(IDS[1:])]
    assert scores["token_logprobs"] == [None, *expected]
    for token, logprob, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert top == (None if logprob is None else {token: logprob})


def test_an_answers_log_probabilities_are_a_cold_engines(tiny_server: LiveServer, engine: Engine) -> None:
    scores = choice(tiny_server, prompt=IDS, max_tokens=6, temperature=0, logprobs=5)["logprobs"]
    session = engine.session()
    logits = session.prompt(IDS)
    ids = list(session.generate(logits, max_tokens=6, sampler=Sampler()))
    rows = log_softmax(engine.session().prompt(IDS + ids, all_logits=True)[len(IDS) - 1 :], engine.vocab_limit)
    assert scores["token_logprobs"] == [float(rows[i, token]) for i, token in enumerate(ids)]
    for row, top, token in zip(rows, scores["top_logprobs"], scores["tokens"], strict=False):
        assert sorted(top.values(), reverse=True) == sorted(map(float, row), reverse=True)[: len(top)]
        assert len(top) == 5 and token in top  # greedy: the token is the likeliest
    assert np.all(np.diff(scores["text_offset"]) >= 0)


def test_the_tokens_own_entry_is_always_listed(tiny_server: LiveServer) -> None:
    scores = choice(tiny_server, prompt=IDS, max_tokens=0, echo=True, logprobs=1)["logprobs"]
    sizes = [len(top) for top in scores["top_logprobs"][1:]]
    assert set(sizes) <= {1, 2} and 2 in sizes
    for token, logprob, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert top is None or top[token] == logprob


def test_a_list_of_prompts_is_each_prompt_alone(tiny_server: LiveServer) -> None:
    body = {"max_tokens": 5, "seed": 9, "logprobs": 1, "echo": True}
    prompts = [IDS, IDS[:4], [9]]
    together = complete(tiny_server, prompt=prompts, **body)
    alone = [choice(tiny_server, prompt=prompt, **body) for prompt in prompts]
    assert [{**one, "index": i} for i, one in enumerate(alone)] == together["choices"]
    assert together["usage"]["prompt_tokens"] == sum(map(len, prompts))
    texts = complete(tiny_server, prompt=["a", "b c"], max_tokens=1)["choices"]
    assert [one["index"] for one in texts] == [0, 1]


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"stop": ["e", "3"]}])
def test_a_streams_pieces_join_to_the_whole(tiny_server: LiveServer, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {"prompt": [IDS, IDS[:3]], "max_tokens": 9, "seed": 4, "logprobs": 2, **more}
    whole = complete(tiny_server, **body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(tiny_server.post("/v1/completions", **body, **options))
    assert {key: value for key, value in chunks[-1]["usage"].items() if "details" not in key} == {
        key: value for key, value in whole["usage"].items() if "details" not in key
    }
    for expected in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert pieces[-1]["finish_reason"] == expected["finish_reason"]
        for name, values in expected["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values


def test_a_stop_string_ends_the_answer_and_not_the_prompt(echo_server: LiveServer) -> None:
    prompt = "<|im_start|>user\none two three<|im_end|>"
    found = choice(echo_server, prompt=prompt, echo=True, stop="two", temperature=0, logprobs=0, max_tokens=20)
    assert found["text"] == prompt + "one " and found["finish_reason"] == "stop"
    assert found["logprobs"]["text_offset"][-1] < len(found["text"])


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": 3}),
        ("prompt[1]", {"prompt": ["a", ""]}),
        ("prompt[1]", {"prompt": [[1], []]}),
        ("prompt[1]", {"prompt": [[1], [99999]]}),
        ("prompt[0]", {"prompt": [1.5]}),
        ("prompt", {"prompt": [[1]] * 129}),
        ("logprobs", {"prompt": "a", "logprobs": 21}),
        ("logprobs", {"prompt": "a", "logprobs": True}),
        ("max_tokens", {"prompt": "a", "max_tokens": 0}),
        ("best_of", {"prompt": "a", "best_of": 2}),
        ("suffix", {"prompt": "a", "suffix": "b"}),
        ("messages", {"prompt": "a", "messages": []}),
    ],
)
def test_a_bad_field_is_named(tiny_server: LiveServer, param: str, body: dict[str, Any]) -> None:
    response = tiny_server.post("/v1/completions", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert param in response.json()["error"]["message"]


def test_all_prompts_are_checked_before_the_first_runs(tiny_server: LiveServer) -> None:
    before = tiny_server.metric("prefill_tokens_total")
    response = tiny_server.post("/v1/completions", prompt=[IDS, [1] * 510], max_tokens=8)
    assert response.status_code == 400 and "context of 512" in response.json()["error"]["message"]
    complete(tiny_server, prompt=[3, 4, 5], max_tokens=1)
    assert tiny_server.metric("prefill_tokens_total") - before == 3


def test_the_default_takes_sixteen_tokens_or_what_room_there_is(echo_server: LiveServer, engine: Engine) -> None:
    assert engine.tokenizer is not None
    said = engine.tokenizer.encode("<|im_start|>user\n" + "abc " * 50 + "<|im_end|>", special=True)
    assert complete(echo_server, prompt=said, temperature=0)["usage"]["completion_tokens"] == 16
    longer = [1] * (2045 - len(said)) + said
    assert complete(echo_server, prompt=longer, temperature=0)["usage"]["completion_tokens"] == 3
