"""Every fault that a System One request can have, with its place; and what a sound one becomes."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_vk.systemone_request import Fault, InvalidRequest, Option, Question, parse_request

NOUL = {"type": "noul", "instructions": "Is it?"}


def faults(body: Any) -> list[Fault]:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(body)
    return caught.value.faults


def body(question: Any = NOUL, **more: Any) -> dict[str, Any]:
    return {"state": "s", "questions": {"q": question}, **more}


def test_a_sound_request() -> None:
    parsed = parse_request(
        {
            "state": [1, {"a": None}],
            "questions": {
                "n": {"type": "noul", "criteria": {"true": "it is", "false": None}},
                "c": {"type": "choice", "instructions": {"ask": 1}, "criteria": {"a": None, "b": ["x"]}},
                "s": {"type": "score", "instructions": None, "criteria": ["low", "high"]},
            },
            "model": "any name",
            "prefix": "p",
            "pin_state": False,
            "normalize": "mean",
        }
    )
    assert (parsed.state, parsed.prefix, parsed.model) == ([1, {"a": None}], "p", "any name")
    assert (parsed.pin_state, parsed.normalize) == (False, "mean")
    assert parsed.questions == {
        "n": Question("noul", None, (Option("true", "yes", "it is"), Option("false", "no"))),
        "c": Question("choice", {"ask": 1}, (Option("a", "a"), Option("b", "b", ["x"]))),
        "s": Question("score", None, (Option("0", "1", "low"), Option("1", "2", "high"))),
    }
    assert list(parsed.questions) == ["n", "c", "s"]


def test_null_equals_absent_and_harmless_fields_are_taken() -> None:
    optional = dict.fromkeys(("model", "prefix", "pin_state", "normalize", "assets"))
    harmless = {"user": "u", "metadata": {"a": 1}, "store": True}
    assert parse_request(body(**optional, **harmless)) == parse_request(body())


@pytest.mark.parametrize(
    ("changed", "loc", "kind", "words"),
    [
        ({"state": 7}, ("state",), "content_type", "found a number"),
        ({"state": None}, ("state",), "content_type", "found null"),
        ({"state": True}, ("state",), "content_type", "found a boolean"),
        ({"questions": {}}, ("questions",), "too_short", "at least 1"),
        (
            {"questions": {f"{i}": NOUL for i in range(65)}},
            ("questions",),
            "too_long",
            "at most 64 questions, found 65",
        ),
        ({"questions": [NOUL]}, ("questions",), "dict_type", "found an array"),
        ({"questions": None}, ("questions",), "dict_type", "found null"),
        ({"model": 3}, ("model",), "str_type", "a string"),
        ({"prefix": ["p"]}, ("prefix",), "str_type", "found an array"),
        ({"pin_state": 1}, ("pin_state",), "bool_type", "true or false"),
        ({"normalize": "max"}, ("normalize",), "literal_error", 'found "max"'),
        ({"normalize": ["sum"]}, ("normalize",), "literal_error", "found an array"),
        ({"assets": []}, ("assets",), "dict_type", "expected an object of pictures by placeholder, found an array"),
        ({"assets": {f"{i}": {} for i in range(1001)}}, ("assets",), "too_long", "at most 1000 pictures, found 1001"),
        ({"assets": {"x": 1}}, ("assets", "x"), "model_attributes_type", "expected an object, found a number"),
        ({"assets": {"x": {"type": "image"}}}, ("assets", "x"), "missing", "data_base64 or part"),
        ({"assets": {"": {"part": "a"}}}, ("assets", ""), "too_short", "expected a placeholder"),
        ({"assets": {"x": {"type": "sound"}}}, ("assets", "x", "type"), "literal_error", 'expected "image"'),
        ({"assets": {"x": {"url": "y"}}}, ("assets", "x", "url"), "extra_forbidden", "known are type, format"),
        ({"assets": {"x": {"part": 3}}}, ("assets", "x", "part"), "string_type", "expected a string, found a number"),
        ({"assets": {"x": {"part": "a"}}}, ("assets", "x", "part"), "value_error", 'no part named "a"'),
        ({"assets": {"x": {"data_base64": "AA"}}}, ("assets", "x", "data_base64"), "value_error", "not base64"),
        ({"assets": {"qq": {"data_base64": "AAAA"}}}, ("assets", "qq"), "asset_unused", "no text of the request"),
        ({"temperature": 1}, ("temperature",), "extra_forbidden", "known are state"),
        ({"state": "a\ud800"}, ("state",), "string_unicode", "U+D800"),
        ({"state": {"a": ["ok", "\udfff"]}}, ("state", "a", 1), "string_unicode", "U+DFFF"),
        ({"state": [{"\ud800": 1}]}, ("state", 0), "string_unicode", "U+D800"),
        ({"state": [1e999]}, ("state", 0), "finite_number", "range"),
        ({"prefix": "\ud800"}, ("prefix",), "string_unicode", "U+D800"),
        ({"model": "\ud800"}, ("model",), "string_unicode", "U+D800"),
    ],
)
def test_a_fault_of_the_request(changed: dict[str, Any], loc: tuple[Any, ...], kind: str, words: str) -> None:
    (fault,) = faults({**body(), **changed})
    assert (fault.loc, fault.type) == (("body", *loc), kind)
    assert words in fault.msg


@pytest.mark.parametrize(
    ("question", "loc", "kind", "words"),
    [
        ("Is it?", (), "model_attributes_type", "found a string"),
        ({}, ("type",), "union_tag_not_found", "noul, choice, score"),
        ({"type": "box", "instructions": "The dog"}, ("type",), "not_supported", "box"),
        ({"type": "multi"}, ("type",), "union_tag_invalid", '"multi"'),
        ({"type": ["noul"]}, ("type",), "union_tag_invalid", "found an array"),
        ({**NOUL, "weight": 2}, ("noul", "weight"), "extra_forbidden", "instructions"),
        ({**NOUL, "instructions": 5}, ("noul", "instructions"), "content_type", "found a number"),
        ({**NOUL, "criteria": ["yes"]}, ("noul", "criteria"), "model_attributes_type", "found an array"),
        ({**NOUL, "criteria": {"yes": "x"}}, ("noul", "criteria", "yes"), "extra_forbidden", "true, false"),
        ({**NOUL, "criteria": {"true": 1}}, ("noul", "criteria", "true"), "content_type", "found a number"),
        ({"type": "choice"}, ("choice", "criteria"), "missing", "required"),
        ({"type": "choice", "criteria": None}, ("choice", "criteria"), "missing", "required"),
        ({"type": "choice", "criteria": {}}, ("choice", "criteria"), "too_short", "at least 1 option"),
        ({"type": "choice", "criteria": ["a"]}, ("choice", "criteria"), "dict_type", "found an array"),
        ({"type": "choice", "criteria": {"a": 1}}, ("choice", "criteria", "a"), "content_type", "found a number"),
        ({"type": "choice", "criteria": {"\ud800": None}}, ("choice", "criteria"), "string_unicode", "U+D800"),
        (
            {"type": "choice", "criteria": {f"{i}": None for i in range(256)}},
            ("choice", "criteria"),
            "too_long",
            "at most 255 options, found 256",
        ),
        ({"type": "score"}, ("score", "criteria"), "missing", "required"),
        ({"type": "score", "criteria": []}, ("score", "criteria"), "too_short", "at least 1 level"),
        ({"type": "score", "criteria": {"0": "x"}}, ("score", "criteria"), "list_type", "found an object"),
        ({"type": "score", "criteria": ["a", None]}, ("score", "criteria", 1), "content_type", "found null"),
        ({"type": "score", "criteria": ["a"] * 256}, ("score", "criteria"), "too_long", "at most 255 levels"),
    ],
)
def test_a_fault_of_a_question(question: Any, loc: tuple[Any, ...], kind: str, words: str) -> None:
    (fault,) = faults(body(question))
    assert (fault.loc, fault.type) == (("body", "questions", "q", *loc), kind)
    assert words in fault.msg


def test_the_limits_themselves_are_allowed() -> None:
    most = {"type": "choice", "criteria": {f"{i}": None for i in range(255)}}
    levels = {"type": "score", "criteria": ["x"] * 255}
    questions = {f"{i}": most if i % 2 else levels for i in range(64)}
    assert len(parse_request({"state": "", "questions": questions}).questions) == 64


@pytest.mark.parametrize("found", [None, [], "text", 3, True])
def test_a_body_that_is_no_object(found: Any) -> None:
    assert [fault.loc for fault in faults(found)] == [("body",)]


def test_all_faults_are_told_at_once() -> None:
    found = faults({"questions": {"a": {"type": "box"}, "b": {"type": "score", "criteria": [1]}}, "seed": 1})
    assert [".".join(map(str, fault.loc)) for fault in found] == [
        "body.questions.a.type",
        "body.questions.b.score.criteria.0",
        "body.state",
        "body.seed",
    ]
    assert faults({}) == [
        Fault(("body", "questions"), "Field required", "missing"),
        Fault(("body", "state"), "Field required", "missing"),
    ]


def test_a_deeply_nested_state_is_refused_not_followed() -> None:
    deep: Any = "x"
    for _ in range(65):
        deep = [deep]
    (fault,) = faults(body(state=deep))
    assert (fault.loc, fault.type) == (("body", "state"), "too_deep")
    assert parse_request(body(state=deep[0])).state == deep[0]


def test_a_hostile_request_gets_a_short_answer_in_utf8() -> None:
    found = faults(body(**{f"\ud800{i}": i for i in range(5000)}))
    assert len(found) == 100
    json.dumps([fault.as_dict() for fault in found], ensure_ascii=False).encode("utf-8")


def test_the_error_crosses_processes() -> None:
    error = InvalidRequest([Fault(("body", "state"), "Field required", "missing"), Fault(("body",), "no", "x")])
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.faults, str(copy)) == (error.faults, "state: Field required; no")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters()) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["type", "criteria", "\udfff"]), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(["state", "questions", "model", "prefix", "pin_state", "normalize", "assets", "x"])
QUESTION = st.fixed_dictionaries(
    {"type": st.sampled_from(["noul", "choice", "score", "box"]) | JSON},
    optional={"instructions": JSON, "criteria": JSON},
)


@given(
    JSON
    | st.dictionaries(KEYS, JSON)
    | st.fixed_dictionaries(
        {"state": JSON, "questions": st.dictionaries(st.text(max_size=4), QUESTION, min_size=1, max_size=3)}
    )
)
def test_any_json_is_read_or_refused(found: Any) -> None:
    try:
        request = parse_request(found)
    except InvalidRequest as error:
        assert error.faults
        json.dumps([fault.as_dict() for fault in error.faults], ensure_ascii=False).encode("utf-8")
    else:
        assert request.questions
        json.dumps(request.state, ensure_ascii=False, allow_nan=False).encode("utf-8")
