"""Chat completions over HTTP: fields, tools, stops, log-probabilities, and streams that join to the whole answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mimo_vk.tokenizer import Tokenizer
from tests.live_server import LiveServer, events

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für 东京",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "when": {"type": "array"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = (
    '<tool_call><function=get_weather><parameter=city>a "b" <c> & 🙂\nd</parameter>'
    "<parameter=days>3</parameter></function></tool_call>"
)
ANSWERS = [
    "plain words",
    "<think>a thought 🙂</think>then é the answer 你好",
    "<think>never closed",
    f"<think>hm</think>I'll look.{CALL}<tool_call><function=get_time></function></tool_call>",
    "a < b <thin </thought> <tool_cal x",
    "",
]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's deltas as the message they make, and the rest of what the whole answer has."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "scores": [], "finish": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            out["content"] += delta.get("content") or ""
            out["reasoning"] += delta.get("reasoning_content") or ""
            out["calls"] += [(call["index"], call["function"]) for call in delta.get("tool_calls") or ()]
            out["scores"] += (choice["logprobs"] or {"content": []})["content"]
            out["finish"] = choice["finish_reason"] or out["finish"]
    return out


def whole(body: dict[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [(i, call["function"]) for i, call in enumerate(message.get("tool_calls") or ())],
        "scores": (choice["logprobs"] or {"content": []})["content"],
        "finish": choice["finish_reason"],
    }


def test_the_answer_has_openais_shape(echo_server: LiveServer) -> None:
    body = echo_server.chat("hello there", max_tokens=50)
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "checkpoint"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello there", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("stop", [None, ["answ"], ["x", " b"]])
def test_a_streams_deltas_join_to_the_whole_answer(echo_server: LiveServer, answer: str, stop: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": answer or " "}],
        "tools": [WEATHER, TIME],
        "stop": stop,
        "logprobs": True,
        "temperature": 0,
    }
    for limit in (None, 1, 7, 12):
        plain = echo_server.post("/v1/chat/completions", **body, max_tokens=limit)
        streamed = echo_server.post("/v1/chat/completions", **body, max_tokens=limit, stream=True)
        assert plain.status_code == streamed.status_code == 200
        assert joined(events(streamed)) == whole(plain.json())


def test_reasoning_and_calls_are_separated_and_typed(echo_server: LiveServer) -> None:
    body = echo_server.chat(ANSWERS[3], tools=[WEATHER, TIME], temperature=0)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "I'll look.")
    first, second = message["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"city": 'a "b" <c> & 🙂\nd', "days": 3}
    assert (second["function"]["name"], second["function"]["arguments"]) == ("get_time", "{}")
    assert body["choices"][0]["finish_reason"] == "tool_calls" and first["id"] != second["id"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_one_call_is_enough_without_parallel_calls(echo_server: LiveServer) -> None:
    body = echo_server.chat(ANSWERS[3], tools=[WEATHER, TIME], temperature=0, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in body["choices"][0]["message"]["tool_calls"]] == ["get_weather"]
    assert body["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"tools": [TIME], "tool_choice": "none"}, {"tools": []}])
def test_no_call_where_none_was_allowed(echo_server: LiveServer, more: dict[str, Any]) -> None:
    message = echo_server.chat(CALL, temperature=0, max_tokens=60, **more)["choices"][0]["message"]
    assert "tool_calls" not in message and "<tool_call>" not in message["content"]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_required_call_comes_first(echo_server: LiveServer, thinking: bool) -> None:
    """The model would say something else: the call's opening is forced, behind the reasoning if it thinks."""
    text = "<think>so</think>no call" if thinking else "no call"
    for choice, names in (
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ):
        body = echo_server.chat(
            text, tools=[WEATHER, TIME], tool_choice=choice, enable_thinking=thinking, temperature=0, max_tokens=60
        )
        message = body["choices"][0]["message"]
        raw = message["content"] or ""
        assert message.get("reasoning_content", "") == ("so" if thinking else "")
        called = message["tool_calls"][0]["function"]["name"] if "tool_calls" in message else raw
        assert any(name in called for name in names) and called.count("get_") == 1
        assert body["usage"]["completion_tokens"] > 8  # the forced tokens are counted


def test_the_model_chooses_among_the_names_by_its_own_logits(echo_server: LiveServer) -> None:
    text = "<tool_call><function=get_time></function></tool_call>"
    body = echo_server.chat(
        text, tools=[WEATHER, TIME], tool_choice="required", enable_thinking=False, temperature=0, max_tokens=60
    )
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_time", "arguments": "{}"}


def test_stop_strings_are_cut_and_end_the_answer(echo_server: LiveServer) -> None:
    body = echo_server.chat("one two three", stop=["wo t", "zzz"], temperature=0)
    assert body["choices"][0]["message"]["content"] == "one t" and body["choices"][0]["finish_reason"] == "stop"
    untouched = echo_server.chat("one two three", stop="three!", temperature=0)
    assert untouched["choices"][0]["message"]["content"] == "one two three"


def test_log_probabilities_are_of_the_content(echo_server: LiveServer) -> None:
    text = "é 🙂 fin"
    body = echo_server.chat(text, logprobs=True, top_logprobs=3, temperature=0)
    entries = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] == max(
            top["logprob"] for top in entry["top_logprobs"]
        )
        assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]
        assert -1e-5 < entry["logprob"] < 0  # e^20 to 1 against 551 others
    plain = echo_server.chat(text, logprobs=True, temperature=0)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[]] * len(entries)


def test_the_tokens_of_the_stop_string_have_no_entries(echo_server: LiveServer) -> None:
    body = echo_server.chat("one two three", stop=["two"], logprobs=True, temperature=0)
    choice = body["choices"][0]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens).startswith(choice["message"]["content"]) and "three" not in "".join(tokens)


def test_the_usage_chunk_comes_last_and_alone(echo_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with_usage = events(echo_server.post("/v1/chat/completions", **body, stream_options={"include_usage": True}))
    assert with_usage[-1]["choices"] == [] and with_usage[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in with_usage[:-1])
    without = events(echo_server.post("/v1/chat/completions", **body))
    assert all("usage" not in chunk for chunk in without)
    assert without[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_thinking_is_on_unless_it_is_turned_off(echo_server: LiveServer) -> None:
    def prompt(**more: Any) -> int:
        return int(echo_server.chat("hi", **more)["usage"]["prompt_tokens"])

    on = prompt()
    off = on + 2  # the template writes an empty <think></think>
    assert prompt(enable_thinking=True) == prompt(reasoning_effort="high") == on
    assert prompt(enable_thinking=False) == prompt(reasoning_effort="none") == off
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == off
    assert prompt(enable_thinking=None, reasoning_effort=None, chat_template_kwargs=None) == on


HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
            {"id": "2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "X"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "2", "content": "rain"},
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
    {"role": "user", "content": "thanks"},
]


def test_results_in_any_order_make_the_same_prompt(echo_server: LiveServer) -> None:
    def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        response = echo_server.post("/v1/chat/completions", messages=messages, tools=[TIME, WEATHER])
        assert response.status_code == 200, response.text
        return dict(response.json()["usage"])

    swapped = [*HISTORY[:3], HISTORY[4], HISTORY[3], HISTORY[5]]
    first, second = ask(HISTORY), ask(swapped)
    assert first["prompt_tokens"] == second["prompt_tokens"]


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("temperature", {"temperature": "1"}),
        ("temperature", {"temperature": 2.5}),
        ("top_p", {"top_p": -0.1}),
        ("seed", {"seed": 1.5}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": True}),
        ("n", {"n": 2}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("stop[0]", {"stop": [""]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("response_format.type", {"response_format": {"type": "json_object"}}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("logit_bias", {"logit_bias": {"1": 5}}),
        ("functions", {"functions": []}),
        ("top_k", {"top_k": 5}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [TIME, TIME]}),
        ("tool_choice", {"tool_choice": "required"}),
        (
            "tool_choice.function.name",
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        ),
        ("enable_thinking", {"enable_thinking": True, "reasoning_effort": "none"}),
        ("chat_template_kwargs.colour", {"chat_template_kwargs": {"colour": "red"}}),
        ("messages", {"messages": []}),
        ("messages[0]", {"messages": [{"role": "bot", "content": "x"}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
        ("messages[0].content[0]", {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]}),
        ("messages[0].content[0].image_url", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}),
        (
            "messages[0].tool_calls[0].function.arguments",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1"}}],
                    }
                ]
            },
        ),
    ],
)
def test_a_bad_field_is_named(echo_server: LiveServer, param: str, more: dict[str, Any]) -> None:
    response = echo_server.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "x"}], **more})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"]


def test_what_the_context_cannot_hold_is_refused(echo_server: LiveServer) -> None:
    for more in ({"max_tokens": 2048}, {"messages": [{"role": "user", "content": "word " * 3000}]}):
        response = echo_server.post(
            "/v1/chat/completions", **{"messages": [{"role": "user", "content": "x"}], "stream": True, **more}
        )
        assert response.status_code == 400 and "the context of 2048 tokens" in response.json()["error"]["message"]


def test_another_model_is_404(echo_server: LiveServer) -> None:
    response = echo_server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], model="gpt-4")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    echo_server.chat("x", model="checkpoint", user="me", metadata={"a": "b"}, store=False, n=1, logit_bias={})


def test_a_seed_repeats_and_seeds_differ(tiny_server: LiveServer) -> None:
    texts = [tiny_server.chat("hi", seed=seed, max_tokens=30)["choices"][0]["message"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_next_turn_extends_the_live_state(tiny_server: LiveServer, tiny_checkpoint: Path) -> None:
    """The answer's ids are reused as they were generated: only what the new turn adds is read."""
    for thinking in (True, False):
        turns = [{"role": "user", "content": f"hi {thinking}"}]
        body = {"enable_thinking": thinking, "max_tokens": 12, "seed": 5}
        first = tiny_server.post("/v1/chat/completions", messages=turns, **body).json()
        message = first["choices"][0]["message"]
        follow = [*turns, message, {"role": "user", "content": "go on"}]
        second = tiny_server.post("/v1/chat/completions", messages=follow, **body).json()
        prompt, answer = first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]
        tokenizer = Tokenizer.load(tiny_checkpoint)
        cue = "<|im_end|><|im_start|>user\ngo on<|im_end|><|im_start|>assistant\n" + "<think></think>" * (not thinking)
        added = len(tokenizer.encode(cue, special=True))
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        if thinking:  # the template puts a <think></think> before an answer that has none: another text
            assert cached >= prompt - 3
        else:
            assert second["usage"]["prompt_tokens"] == prompt + answer + added
            assert cached >= prompt + answer - 1  # the last id may not have been fed


def test_the_same_prompt_again_is_not_read_again(tiny_server: LiveServer) -> None:
    first = tiny_server.chat("the very same", max_tokens=9, seed=1)
    again = tiny_server.chat("the very same", max_tokens=9, seed=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"]
    assert again["choices"] == first["choices"]
