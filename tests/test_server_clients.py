"""The unmodified clients: OpenAI's Python package, and lm-eval's ``local-completions``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import open_engine
from openai.types.chat import ChatCompletionChunk

from mimo_vk.sampling import log_softmax
from tests.live_server import LiveServer, serving
from tests.test_server_chat import ANSWERS, TIME, WEATHER

MODEL = "checkpoint"
TOOLS: Any = [WEATHER, TIME]
TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
QUESTIONS: list[dict[str, Any]] = [
    {"question": "What is 2 + 2?", "choices": ["3", "4", "twenty-two"], "answer": 1},
    {"question": "The sky is", "choices": ["blue", "made of 🧀"], "answer": 0},
    {"question": "Ein Tag hat", "choices": ["24 Stunden", "drei Füße", "Öl", "é"], "answer": 0},
]


@pytest.fixture(scope="module")
def client(echo_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=echo_server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mimo-vk"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_and_a_second_turn(client: openai.OpenAI) -> None:
    messages = ask("<think>well</think>hello 🙂")
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, user="me")
    answer = first.choices[0].message
    assert (answer.content, answer.model_extra) == ("hello 🙂", {"reasoning_content": "well"})
    again = [*messages, answer.model_dump(), {"role": "user", "content": "bye"}]  # null fields and all
    second = client.chat.completions.create(model=MODEL, messages=again, temperature=0)
    assert second.choices[0].message.content == "bye" and second.usage is not None
    assert second.usage.prompt_tokens_details is not None and first.usage is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens


def test_a_streams_chunks_are_what_the_package_declares(client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=MODEL,
        messages=ask(ANSWERS[3]),
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        temperature=0,
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines]
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("tool_calls") == 1


def test_tool_calls_in_a_loop(client: openai.OpenAI) -> None:
    messages = ask(ANSWERS[3])
    first = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        tools=TOOLS,
    )
    message = first.choices[0].message
    assert message.tool_calls is not None and first.choices[0].finish_reason == "tool_calls"
    messages.append(message)
    for call in reversed(message.tool_calls):
        assert call.type == "function" and isinstance(json.loads(call.function.arguments), dict)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "fine"})
    messages.append({"role": "user", "content": "so?"})
    last = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        tools=TOOLS,
    )
    assert last.choices[0].message.content == "so?"
    assert last.usage is not None and last.usage.prompt_tokens_details is not None and first.usage is not None
    assert last.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens  # calls and reasoning too


def test_the_streaming_helper_collects_the_same(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ask("a b c"), temperature=0, logprobs=True) as stream:
        done = stream.get_final_completion()
    assert done.choices[0].message.content == "a b c"
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "a b c"


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL,
        prompt=[[9, 9], [5, 6]],
        max_tokens=4,
        temperature=0,
        logprobs=2,
        echo=True,
    )
    assert [choice.index for choice in done.choices] == [0, 1]
    pieces = list(client.completions.create(model=MODEL, prompt="a", max_tokens=2, stream=True))
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"response_format": {"type": "json_object"}}),
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.BadRequestError, {"extra_body": {"top_k": 3}}),
    ],
)
def test_errors_are_the_packages_own(client: openai.OpenAI, kind: type[openai.APIStatusError], more: Any) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": ask("x"), **more})
    assert isinstance(caught.value.body, dict) and caught.value.body["message"]


def test_the_key(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "--api-key", "right", program="tests.echo_model") as server:
        base = server.url + "/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=base, api_key="wrong").models.list()
        assert len(openai.OpenAI(base_url=base, api_key="right").models.list().data) == 1
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        assert "right" not in server.log


def test_lm_eval_runs_a_multiple_choice_task(tiny_server: LiveServer, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Its log-likelihoods are those of an engine of our own, read cold, and its accuracy follows from them."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    (tmp_path / "local_choice.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    arguments = f"model={MODEL},base_url={tiny_server.url}/v1/completions,num_concurrent=2,max_length=512"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "local_choice", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [*command, "--log_samples"], env={**os.environ, **offline}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    samples = [json.loads(line) for file in (tmp_path / "out").rglob("samples*.jsonl") for line in file.open()]
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())
    right = 0
    with open_engine(tiny_checkpoint, backend="numpy") as engine:
        for sample in samples:
            question = QUESTIONS[sample["doc_id"]]
            expected = [log_likelihood(engine, question["question"] + " Answer:", c) for c in question["choices"]]
            found = [float(answer[0][0]) for answer in sample["resps"]]
            assert found == expected
            right += expected.index(max(expected)) == question["answer"]
    assert len(samples) == len(QUESTIONS)
    assert results["results"]["local_choice"]["acc,none"] == right / len(QUESTIONS)


def log_likelihood(engine: Any, context: str, choice: str) -> float:
    """The sum of the log-probabilities of a choice's tokens behind its context, as lm-eval cuts them."""
    before = engine.tokenizer.encode(context)
    ids = engine.tokenizer.encode(f"{context} {choice}")
    rows = log_softmax(engine.session().prompt(ids, all_logits=True), engine.vocab_limit)
    return float(sum(float(rows[at - 1, ids[at]]) for at in range(len(before), len(ids))))
