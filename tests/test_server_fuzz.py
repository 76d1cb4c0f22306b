"""Bodies nobody would send: from the API's own description, and mutations of good ones. Never a 500, never a crash."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from tests.live_server import LiveServer
from tests.test_server_chat import HISTORY, TIME, WEATHER

CHAT: dict[str, Any] = {
    "messages": HISTORY,
    "model": "checkpoint",
    "tools": [WEATHER, TIME],
    "tool_choice": "auto",
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["x", "yy"],
    "max_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"enable_thinking": False},
}
COMPLETION: dict[str, Any] = {
    "prompt": ["a", "b"],
    "max_tokens": 2,
    "echo": True,
    "logprobs": 1,
    "stop": "q",
    "temperature": 0,
    "stream": False,
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        ["user", "tool", "text", "function", "image_url", "none", "<|im_end|>", "\ud800", "{}", 2**70, -1, 1e308, ""]
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path]
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(item, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value in one place."""
    if not path:
        return new
    out = copy.deepcopy(value)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return out


@st.composite
def mutated(draw: Any, good: dict[str, Any]) -> dict[str, Any]:
    body: Any = good
    for _ in range(draw(st.integers(1, 3))):
        body = put(body, draw(st.sampled_from(places(body))), draw(JSON))
    return dict(body) if isinstance(body, dict) else {"body": body}


def send(server: LiveServer, path: str, body: Any) -> None:
    response = server.client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 404, 422), (response.status_code, response.text, body)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@FUZZ
@given(body=mutated(CHAT))
def test_chat_requests_with_something_wrong(echo_server: LiveServer, body: dict[str, Any]) -> None:
    send(echo_server, "/v1/chat/completions", body)


@FUZZ
@given(body=mutated(COMPLETION))
def test_completions_with_something_wrong(echo_server: LiveServer, body: dict[str, Any]) -> None:
    send(echo_server, "/v1/completions", body)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/systemone"]),
    body=st.binary(max_size=60),
)
def test_bytes(echo_server: LiveServer, path: str, body: bytes) -> None:
    assert echo_server.client.post(path, content=body).status_code in (400, 422)


def test_the_description_itself(echo_server: LiveServer) -> None:
    """schemathesis draws requests from it; whatever it draws, the server answers as described."""
    document = echo_server.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=echo_server.url)
    operations = [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)]
    assert len(operations) >= 9
    for operation in operations:

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            response = case.call()
            case.validate_response(response, checks=[not_a_server_error])
            described = document["paths"][case.operation.path][case.method.lower()]["responses"]
            assert str(response.status_code) in described, (case.operation.path, response.status_code, response.text)

        ask()


def test_the_server_is_well_afterwards(echo_server: LiveServer) -> None:
    assert echo_server.metric("worker_restarts_total") == 0
    assert "Traceback" not in echo_server.log
    assert echo_server.chat("fine", temperature=0)["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize(
    "text", ["<think>" * 40, "<tool_call>" * 30, "</think></tool_call>" * 9, "<tool_call><function=" + "a" * 300]
)
def test_answers_nobody_would_give(echo_server: LiveServer, text: str) -> None:
    echo_server.chat(text, tools=[TIME], temperature=0, logprobs=True)
