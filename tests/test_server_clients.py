"""OpenAI's Python package, unmodified, against our server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.live_server import LiveServer, serving
from tests.test_server_chat import ANSWERS, TIME, WEATHER

MODEL = "checkpoint"
TOOLS: Any = [WEATHER, TIME]
T = TypeVar("T")


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


# AsyncOpenAI


def asynchronous(server: LiveServer, work: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    """What ``work`` returns, given a client."""

    async def main() -> T:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
            return await work(client)

    return asyncio.run(main())


async def streamed(client: openai.AsyncOpenAI, text: str) -> str:
    """A streamed answer's text."""
    stream = await client.chat.completions.create(model=MODEL, messages=ask(text), temperature=0, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_an_asynchronous_stream(echo_server: LiveServer) -> None:
    assert asynchronous(echo_server, lambda client: streamed(client, "Grüße, 世界 🙂")) == "Grüße, 世界 🙂"


def test_an_asynchronous_stream_that_is_closed_stops_its_work(echo_server: LiveServer) -> None:
    before = echo_server.metric("requests_total", route="/v1/chat/completions", outcome="cancelled")

    async def leave(client: openai.AsyncOpenAI) -> int:
        text, got = "SLOW " + "word " * 300, 0
        stream = await client.chat.completions.create(model=MODEL, messages=ask(text), temperature=0, stream=True)
        async for chunk in stream:
            got += bool(chunk.choices[0].delta.content)
            if got == 3:
                break
        await stream.close()
        return got

    assert asynchronous(echo_server, leave) == 3
    echo_server.wait_metric("requests_total", before + 1, route="/v1/chat/completions", outcome="cancelled")
    echo_server.wait_metric("requests_running", 0)
    last = [line for line in echo_server.request_lines if line["path"] == "/v1/chat/completions"][-1]
    assert 3 <= last["generated_tokens"] < 300


def test_two_asynchronous_answers_at_once(echo_server: LiveServer) -> None:
    """Each gets its own text, the one that waits too; one of them may be cancelled without the other."""
    long, short = "SLOW " + "one " * 20, "two 🙂"

    async def both(client: openai.AsyncOpenAI) -> tuple[str, str]:
        first, second = await asyncio.gather(streamed(client, long), streamed(client, short))
        return first, second

    assert asynchronous(echo_server, both) == (long, short)

    async def one_left(client: openai.AsyncOpenAI) -> str:
        first = asyncio.create_task(streamed(client, "SLOW " + "one " * 300))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(streamed(client, short))
        await asyncio.sleep(0.1)
        first.cancel()
        return await second

    assert asynchronous(echo_server, one_left) == short
