"""``POST /v1/systemone`` on a running server: by the unmodified public client, and by hand where it would not go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import typesafe_sdk
from engines import open_engine
from hypothesis import HealthCheck, Phase, given, settings
from typesafe_sdk import Box, Choice, Image, Noul, RetryPolicy, Score, TypeSafeClient

from mimo_vk.engine import Engine
from mimo_vk.server.systemone_body import zstd
from mimo_vk.systemone import answer
from mimo_vk.systemone_request import parse_request
from tests.live_server import LiveServer

NOUL: Any = {"type": "noul", "instructions": "Is it?"}
QUESTIONS: dict[str, Any] = {
    "billing": Noul(instructions="Is this about billing?", criteria={"true": "Money is named"}),
    "tone": Choice(instructions="What is the tone?", criteria={"calm": None, "ärgerlich": {"so": 1}}),
    "urgency": Score(criteria=["can wait", ["this", "week"], "now"]),
    "only": {"type": "choice", "criteria": {"one": None}},
}


@pytest.fixture(scope="module")
def client(tiny_server: LiveServer) -> Iterator[TypeSafeClient]:
    with TypeSafeClient(
        api_key="none", base_url=tiny_server.url, timeout=60, retry=RetryPolicy(max_retries=0)
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint, threads=1) as opened:
        yield opened


def expected(engine: Engine, state: Any, **more: Any) -> dict[str, Any]:
    """The answers of a session that has read nothing before."""
    wire = {name: dumped(question) for name, question in QUESTIONS.items()}
    return answer(engine, engine.session(), parse_request({"state": state, "questions": wire, **more})).answers


def dumped(question: Any) -> dict[str, Any]:
    return dict(question) if isinstance(question, dict) else dict(question.model_dump())


@pytest.mark.parametrize("state", ["I was charged twice." + " " * 900, {"message": "Grüße", "lines": [1, None]}])
def test_the_client_gets_a_cold_engine_s_numbers_in_every_bit(
    client: TypeSafeClient, engine: Engine, state: Any
) -> None:
    wanted = expected(engine, state)
    for _ in range(2):  # the second from snapshots
        result = client.system_one(state=state, questions=QUESTIONS)
        raw = result.raw_http_response.json()
        assert raw["answers"] == wanted  # floats are written with the digits that give them back
        assert list(raw["answers"]) == list(QUESTIONS)
        assert result.nouls["billing"].noul == wanted["billing"]["noul"]
        assert result.choices["tone"].choice in ("calm", "ärgerlich")
        assert result.scores["urgency"].legend == {0: "can wait", 1: ["this", "week"], 2: "now"}
        assert set(result.scores["urgency"].probabilities) == {0, 1, 2}
        assert result.choices["only"].confidence == 1.0
        assert result.request_id == raw["id"] == result.raw_http_response.headers["x-request-id"]
        assert raw["provider"] == "mimo-vk" and raw["usage"]["cost"] == 0
        assert result.usage.output_tokens == raw["usage"]["output_tokens"] > 7
    sent = result.raw_http_response.request.headers
    assert ("content-encoding" in sent) == isinstance(state, str)  # the client compresses from 1 KiB on


def test_the_client_s_extra_fields(client: TypeSafeClient, engine: Engine) -> None:
    more: dict[str, Any] = {"prefix": "Read this ticket.\n", "pin_state": True, "normalize": "mean"}
    result = client.system_one(state="Nothing works.", questions=QUESTIONS, extra_body=more)
    assert result.raw_http_response.json()["answers"] == expected(engine, "Nothing works.", **more)


def test_the_client_lists_the_model(client: TypeSafeClient, tiny_server: LiveServer) -> None:
    (model,) = client.models.list().models
    (other,) = tiny_server.client.get("/v1/models").json()["data"]
    assert model.name == other["id"]
    assert model.description and len(model.release_date) == len("2026-01-31")


def test_the_client_tells_what_is_wrong(client: TypeSafeClient) -> None:
    with pytest.raises(typesafe_sdk.TypeSafeUnprocessableEntityError) as caught:
        client.system_one(state="s", questions={"q": NOUL}, extra_body={"normalize": "max", "seed": 1})
    body = caught.value.body
    assert [fault["loc"] for fault in body["detail"]] == [["body", "normalize"], ["body", "seed"]]
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["param"] == "normalize"
    assert 'normalize: expected "sum" or "mean", found "max"' in str(caught.value)
    assert caught.value.request_id


def test_pictures_and_boxes_are_refused_by_name(client: TypeSafeClient) -> None:
    picture = Image(b"\x89PNG\r\n\x1a\nnot really a picture")
    with pytest.raises(typesafe_sdk.TypeSafeUnprocessableEntityError, match="assets") as caught:
        client.system_one(state=picture, questions={"q": NOUL})
    assert caught.value.body["detail"][0]["loc"] == ["body", "assets", str(picture)]
    with pytest.raises(typesafe_sdk.TypeSafeUnprocessableEntityError, match=r"dog\.type: box"):
        client.system_one(state="s", questions={"dog": Box(instructions="The dog")})


def test_a_prompt_over_the_context_is_named(client: TypeSafeClient) -> None:
    with pytest.raises(typesafe_sdk.TypeSafeUnprocessableEntityError, match=r"state: .*context of 512"):
        client.system_one(state="word " * 600, questions={"q": NOUL})


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"no json", {}, 422),
        (zstd.compress(b"{}"), {"content-encoding": "zstd"}, 422),
        (b"\x1f\x8b", {"content-encoding": "gzip"}, 415),
        (zstd.compress(bytes(33 * 2**20)), {"content-encoding": "zstd"}, 413),
        (bytes(33 * 2**20), {}, 413),
    ],
)
def test_bad_bodies(tiny_server: LiveServer, content: bytes, headers: dict[str, str], status: int) -> None:
    response = tiny_server.client.post("/v1/systemone", content=content, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert ("detail" in response.json()) == (status == 422)
    assert response.headers["x-typesafe-request-id"]


def test_a_surrogate_in_the_request_comes_back_as_a_fault(tiny_server: LiveServer) -> None:
    body = b'{"state": "s", "questions": {"\\ud800": {"type": "\\ud801"}}}'
    response = tiny_server.client.post("/v1/systemone", content=body)
    assert response.status_code == 422
    assert {fault["type"] for fault in response.json()["detail"]} == {"string_unicode", "union_tag_invalid"}


def operation(server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(server.url + "/openapi.json")["/v1/systemone"]["POST"]


FUZZ = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


def test_what_the_description_allows_is_answered(tiny_server: LiveServer) -> None:
    seen = set()

    @FUZZ
    @given(case=operation(tiny_server).as_strategy())
    def run(case: Any) -> None:
        response = case.call(timeout=60)
        seen.add(response.status_code)
        if response.status_code == 422:  # what the description can't tell: the context, and what is a picture
            rest = [fault for fault in response.json()["detail"] if fault["loc"][1] != "assets"]
            assert {fault["type"] for fault in rest} <= {"context_length_exceeded"}
            assert rest or case.body["assets"]
        else:
            case.validate_response(response)
            assert set(response.json()["answers"]) == set(case.body["questions"])

    run()
    assert 200 in seen


def test_what_the_description_forbids_is_refused(tiny_server: LiveServer) -> None:
    @FUZZ
    @given(case=operation(tiny_server).as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def run(case: Any) -> None:
        response = case.call(timeout=60)
        assert response.status_code == 422, response.text
        assert response.json()["detail"] and response.json()["error"]["message"]

    run()


def test_counted_and_given_up_when_the_client_leaves(tiny_server: LiveServer) -> None:
    before = tiny_server.metric("requests_total", route="/v1/systemone", outcome="cancelled")
    questions = {f"{i}": {**NOUL, "instructions": f"Is it the number {i}? " * 12} for i in range(64)}
    with pytest.raises(httpx.ReadTimeout):
        tiny_server.client.post("/v1/systemone", json={"state": "s " * 100, "questions": questions}, timeout=0.5)
    tiny_server.wait_metric("requests_total", before + 1, route="/v1/systemone", outcome="cancelled")
    tiny_server.wait_metric("requests_running", 0)


def test_tokens_are_counted_and_reused_ones_told(tiny_server: LiveServer) -> None:
    body = {"state": "A state that comes again and again.", "questions": {"a": NOUL, "b": NOUL}}
    names = ("prompt_tokens_total", "reused_tokens_total")
    first = [tiny_server.metric(name) for name in names]
    usage = [tiny_server.post("/v1/systemone", **body).json()["usage"] for _ in range(2)]
    assert usage[0] == usage[1]
    read, reused = (tiny_server.metric(name) - before for name, before in zip(names, first, strict=True))
    assert read == 2 * usage[0]["input_tokens"]
    assert 0 < reused < read / 2
