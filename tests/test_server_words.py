"""What a refused body is told: the field, what was expected, what was found, in words that no library made."""

from __future__ import annotations

from typing import Any

import pytest

from mimo_vk.server.body import parse_json
from mimo_vk.server.errors import ApiError
from mimo_vk.server.schemas import ChatRequest, CompletionRequest, parse
from mimo_vk.server.systemone_body import parse_json as parse_systemone
from mimo_vk.systemone_request import InvalidRequest

TOOL = {"type": "function", "function": {"name": "f"}}


def refused(model: Any, body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        parse(model, body)
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": 3}, "temperature: expected a number of at most 2, found 3"),
        ({"temperature": "hot"}, "temperature: expected a number, found 'hot'"),
        ({"temperature": 1e999}, "temperature: expected a finite number, found inf"),
        ({"top_p": -0.5}, "top_p: expected a number of at least 0, found -0.5"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number, found 1.5"),
        ({"seed": 2**64}, "seed: expected a number below 18446744073709551616, found 18446744073709551616"),
        ({"n": 2}, "n: only 1 is supported, found 2"),
        ({"stop": ""}, "stop: expected at least 1 character, found none"),
        ({"stop": ["a"] * 5}, "stop: expected at most 4 items, found 5"),
        ({"stop": "x" * 1025}, "stop: expected at most 1024 characters, found 1025"),
        ({"stop": 5}, "stop: expected a string or a list of up to four, found 5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: only 0 is supported, found 0.5"),
        ({"logit_bias": {"5": 1}}, "logit_bias: only an empty object is supported"),
        ({"stream": "yes"}, "stream: expected true or false, found 'yes'"),
        ({"tools": {}}, "tools: expected a list, found an object"),
        ({"tools": ["x"]}, "tools[0]: expected an object, found 'x'"),
        ({"tools": [{**TOOL, "type": "fn"}]}, "tools[0].type: only 'function' is supported, found 'fn'"),
        (
            {"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict: only false is supported, found true",
        ),
        (
            {"tools": [{**TOOL, "function": {"name": "a b"}}]},
            "tools[0].function.name: expected 1 to 64 printable ASCII characters but space, < and >, found 'a b'",
        ),
        ({"tool_choice": "maybe"}, "tool_choice: expected 'auto', 'none' or 'required', found 'maybe'"),
        ({"modalities": ["text"] * 2}, "modalities: expected at most 1 item, found 2"),
        ({"user": "u" * 50, "store": 1}, "store: expected true or false, found 1"),
        ({"model": ["x"]}, "model: expected a string, found a list"),
        ({"metadata": "x" * 50}, f"metadata: expected an object, found '{'x' * 40}...'"),
        ({"messages": []}, "messages: expected at least 1 item, found none"),
        (
            {"messages": [{"role": "bot"}]},
            "messages[0]: expected the role system, developer, user, assistant or tool, found 'bot'",
        ),
        (
            {"messages": [{"content": "x"}]},
            "messages[0]: expected the role system, developer, user, assistant or tool, it is missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].image_url: expected an object, found 'x'",
        ),
        (
            {"messages": [{"role": "assistant", "annotations": [1]}]},
            "messages[0].annotations: only an empty list is supported",
        ),
    ],
)
def test_a_chat_s_faults(fields: dict[str, Any], said: str) -> None:
    assert refused(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields}) == said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": [[]]}, "prompt[0]: expected at least 1 item, found none"),
        ({"prompt": [1, "a"]}, "prompt[1]: expected a whole number, found 'a'"),
        ({"prompt": [-1]}, "prompt[0]: expected a number of at least 0, found -1"),
        ({"prompt": "a", "suffix": "b"}, "suffix: only '' is supported, found 'b'"),
        ({}, "prompt: missing"),
        ("prompt", "the body: expected a JSON object, found 'prompt'"),
    ],
)
def test_a_completion_s_faults(body: Any, said: str) -> None:
    assert refused(CompletionRequest, body) == said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b" \n", "the body is empty: expected JSON"),
        (b'{"a":\n [1,}', "the body is not valid JSON: expecting value at line 2, column 5"),
        (b'{"a": NaN}', "the body is not valid JSON: NaN is not a JSON number"),
        (b"9" * 5000, "the body is not valid JSON: a number has too many digits"),
        (b'"\xff"', "the body is not UTF-8: byte 1 is wrong"),
    ],
)
def test_a_body_that_is_no_json(body: bytes, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert str(caught.value) == said
    with pytest.raises(InvalidRequest) as as_question:
        parse_systemone(body)
    assert str(as_question.value) == said
