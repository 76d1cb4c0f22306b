"""Answers split into content, reasoning and calls: the rules by example, and the same for every cutting of the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_vk.chat_format import ChatTemplate
from mimo_vk.stream import AnswerParser, Content, Event, FinishReason, Reasoning, ToolCall
from mimo_vk.tool_schema import typed_value
from tests.small_tokenizer import small_tokenizer

PARAMETERS = {
    "type": "object",
    "required": ["s"],
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": "array"},
        "z": {"type": ["string", "null"]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]


def events_of(parts: list[str], reason: FinishReason = "stop", tools: Any = TOOLS) -> tuple[list[Event], AnswerParser]:
    parser = AnswerParser(tools)
    events = [event for part in parts for event in parser.push(part)]
    return events + parser.finish(reason), parser


def read(text: str, reason: FinishReason = "stop", tools: Any = TOOLS) -> tuple[str, str, list[tuple[str, Any]]]:
    """(content, reasoning, calls), pushed a character at a time."""
    _, parser = events_of(list(text), reason, tools)
    return parser.content, parser.reasoning, [(call["name"], call["arguments"]) for call in parser.tool_calls]


def call_of(body: str, reason: FinishReason = "stop", tools: Any = TOOLS) -> Any:
    content, reasoning, calls = read(f"<tool_call>{body}</tool_call>", reason, tools)
    assert (content, reasoning, len(calls)) == ("", "", 1)
    return calls[0]


def merged(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        if out and isinstance(event, Content | Reasoning) and type(out[-1]) is type(event):
            out[-1] = type(event)(out[-1].text + event.text)
        else:
            out.append(event)
    return out


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("Hello <b>world</b> < 3", "Hello <b>world</b> < 3", ""),
        ("<think>why\n</think>\n\nThis.", "\n\nThis.", "why\n"),
        ("<think></think>This.", "This.", ""),
        ("a<think>b</think>c<think>d</think>e", "ace", "bd"),
        ("\n<think>b</think>c", "c", "b"),
        ("a</think>b", "ab", ""),
        ("<think>a<think>b</think>c", "c", "ab"),
        ("<think>a</thinking></think>c", "c", "a</thinking>"),
        ("<thin", "<thin", ""),
        ("<think>a</thin", "a</thin", ""),
        ("", "", ""),
        (" \n", " \n", ""),
    ],
)
def test_reasoning_and_content(text: str, content: str, reasoning: str) -> None:
    assert read(text) == (content, reasoning, [])


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_reasoning_cut_short_is_reasoning(reason: FinishReason) -> None:
    assert read("x<think>abc</th", reason) == ("x", "abc</th", [])
    assert read("<think>a</think>b<think>c", reason) == ("b", "ac", [])


def test_reasoning_that_stops_unclosed_is_content_and_is_given_again() -> None:
    events, parser = events_of(["x<think>ab", "c"])
    assert events == [Content("x"), Reasoning("ab"), Reasoning("c"), Content("abc")]
    assert (parser.content, parser.reasoning) == ("xabc", "")
    assert read("<think>a</think>b<think>c") == ("bc", "a", [])


def test_text_comes_out_as_soon_as_it_is_known() -> None:
    parser = AnswerParser()
    assert parser.push("Hello <") == [Content("Hello ")]
    assert parser.push("thin") == []
    assert parser.push("g") == [Content("<thing")]
    assert parser.push("<think>a</thi") == [Reasoning("a")]
    assert parser.push("nk>b<tool_ca") == [Content("b")]
    assert parser.push("ll><function=f><parameter=s>1</parameter></function></tool_call") == []
    assert parser.push("> ") == [ToolCall(0, "f", {"s": "1"})]
    assert parser.push("c") == [Content(" c")]
    assert parser.finish("stop") == []


def test_a_call_inside_reasoning_closes_it() -> None:
    text = "<think>I'll call <tool_call><function=g></function></tool_call>done"
    assert read(text) == ("done", "I'll call ", [("g", {})])


COMPACT = "<function=f><parameter=s>a b</parameter><parameter=i>3</parameter></function>"
LINES = "\n<function=f>\n<parameter=s>\na b\n</parameter>\n<parameter=i>\n3\n</parameter>\n</function>\n"


@pytest.mark.parametrize(
    "body",
    [
        COMPACT,
        LINES,
        "<function=f><parameter=s>a b<parameter=i>3</function>",
        "\n<function=f>\n<parameter=s>\na b\n<parameter=i>\n3\n</function>\n",
        '<function=f>{"s": "a b", "i": 3}</function>',
        '\n<function=f>\n{"s": "a b", "i": "3"}\n</function>\n',
        '{"name": "f", "arguments": {"s": "a b", "i": 3}}',
        '\n{"name": "f", "arguments": "{\\"s\\": \\"a b\\", \\"i\\": 3}"}\n',
        "<function=f><parameter=s>a b</parameter><parameter=i>3</parameter>",
        "<function=f><parameter=s>a b</parameter><parameter=i>3",
    ],
)
def test_the_forms_of_a_call(body: str) -> None:
    assert call_of(body) == ("f", {"s": "a b", "i": 3})


def test_several_functions_in_a_block_and_several_blocks() -> None:
    text = f"Both:\n<tool_call>{COMPACT}\n<function=g></function></tool_call>\n\n<tool_call>{COMPACT}</tool_call>\n"
    first = ("f", {"s": "a b", "i": 3})
    assert read(text) == ("Both:\n", "", [first, ("g", {}), first])
    events, _ = events_of([text])
    assert [event.index for event in events if isinstance(event, ToolCall)] == [0, 1, 2]
    unclosed = f"<tool_call>{COMPACT.removesuffix('</function>')}<function=g></tool_call>"
    assert read(unclosed) == ("", "", [first, ("g", {})])


def test_white_space_around_calls_is_left_out_only_where_it_stands_alone() -> None:
    call = "<tool_call><function=g></function></tool_call>"
    assert read(f"<think>x</think>\n\n{call}\n{call}\n") == ("", "x", [("g", {}), ("g", {})])
    assert read(f"a\n\n{call}\n b \n") == ("a\n\n\n b \n", "", [("g", {})])


@pytest.mark.parametrize(
    "value",
    [
        "&lt;b&gt; &amp; \"quoted\" \\n 'x'",
        "  spaces  ",
        "\n\nlines\n\n",
        "",
        "<b>bold</b> </b> <parameter> <function> a < b > c",
        "the tag </parameter> in a text",
        "the tag </function> in a text",
        'print("</tool_call>") and on',
        "<tool_call> opens, <think> too, </think>",
        "12",
        "null",
        "ünï 你好 🙂",
    ],
)
def test_a_string_is_verbatim(value: str) -> None:
    body = f"<function=f><parameter=s>{value}</parameter><parameter=other>{value}</parameter></function>"
    assert call_of(body) == ("f", {"s": value, "other": value})
    as_json = json.dumps({"s": value, "other": value}, ensure_ascii=False)
    assert call_of(f"<function=f>{as_json}</function>") == ("f", {"s": value, "other": value})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("i", "3", 3),
        ("i", " -3\n", -3),
        ("i", "3.0", 3),
        ("i", "3.5", "3.5"),
        ("i", "three", "three"),
        ("i", "007", "007"),
        ("i", "true", "true"),
        ("n", "3", 3),
        ("n", "3.5e2", 350.0),
        ("n", "NaN", "NaN"),
        ("n", "1e999", "1e999"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "1", "1"),
        ("o", '{"a": [1, "<"]}', {"a": [1, "<"]}),
        ("o", "[1]", "[1]"),
        ("o", "{'a': 1}", "{'a': 1}"),
        ("l", '[1, "zwei", null]', [1, "zwei", None]),
        ("l", "{}", "{}"),
        ("z", "null", None),
        ("z", "nothing", "nothing"),
        ("undeclared", "3", "3"),
    ],
)
def test_values_have_the_declared_type_or_stay_text(name: str, text: str, value: Any) -> None:
    found = call_of(f"<function=f><parameter={name}>{text}</parameter></function>")[1][name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "5x", "5x"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "number"}, {"type": "array"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "boolean"}, {"enum": [7]}]}, "7", 7),
        ({"allOf": [{"type": "integer"}]}, "7", 7),
        ({"enum": ["1", 2, None, True]}, "1", "1"),
        ({"enum": ["1", 2, None, True]}, "2", 2),
        ({"enum": ["1", 2, None, True]}, "null", None),
        ({"enum": ["1", 2, None, True]}, "true", True),
        ({"enum": ["a", "b"]}, "3", "3"),
        ({"type": "integer", "enum": [1, 2]}, "2", 2),
        ({"const": 4}, "4", 4),
        ({"$ref": "#/$defs/count"}, "4", 4),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/self"}, "4", "4"),
        ({"$ref": "#/$defs/none"}, "4", "4"),
        ({"$ref": "elsewhere"}, "4", "4"),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"items": {}}, "[]", []),
        ({}, "4", "4"),
        (True, "4", "4"),
        (None, "4", "4"),
    ],
)
def test_schemas(schema: Any, text: str, value: Any) -> None:
    root = {"$defs": {"count": {"type": "integer"}, "self": {"$ref": "#/$defs/self"}}}
    found = typed_value(text, schema, root)
    assert found == value and type(found) is type(value)


def test_undeclared_functions_and_no_tools_give_strings() -> None:
    body = "<function=h><parameter=i>3</parameter></function>"
    assert call_of(body) == ("h", {"i": "3"})
    assert call_of(body, tools=None) == ("h", {"i": "3"})


CUT = "<tool_call><function=f><parameter=i>3</parameter><parameter=s>abc"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CUT, CUT, []),
        (CUT + "</para", CUT + "</para", []),
        (CUT + "</parameter>", "", [("f", {"i": 3, "s": "abc"})]),
        (CUT + "</parameter></func", "", [("f", {"i": 3, "s": "abc"})]),
        (CUT + "</parameter><parameter=n>1", "", [("f", {"i": 3, "s": "abc"})]),
        (CUT + "</parameter></function>", "", [("f", {"i": 3, "s": "abc"})]),
        (CUT + "</parameter></function></tool", "", [("f", {"i": 3, "s": "abc"})]),
        ("<tool_call>", "<tool_call>", []),
        ("a <tool_call><fun", "a <tool_call><fun", []),
        ("<tool_call><function=h><parameter=x>1</parameter>", "<tool_call><function=h><parameter=x>1</parameter>", []),
        ("<tool_call><function=h></function>", "", [("h", {})]),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        ('<tool_call><function=f>{"s": "x', '<tool_call><function=f>{"s": "x', []),
        (
            "<tool_call><function=g></function><function=f><parameter=s>ab",
            "<tool_call><function=f><parameter=s>ab",
            [("g", {})],
        ),
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_a_call_cut_off(text: str, content: str, calls: list[Any], reason: FinishReason) -> None:
    assert read(text, reason) == (content, "", calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nonsense</tool_call> and more",
        "<tool_call></tool_call>",
        "Use the <tool_call> tag.",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=f>words</function></tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(text) == (text, "", [])


def test_a_call_without_its_closing_tags_leaves_the_next_one_alone() -> None:
    text = f"<tool_call><function=f><parameter=s>x</tool_call>\n<tool_call>{COMPACT}</tool_call>"
    assert read(text) == ("", "", [("f", {"s": "x"}), ("f", {"s": "a b", "i": 3})])


TAG_LIKE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>"]
MORE = ["<parameter=i>", "</parameter>", "3", "\n", " ", "<", "</", ">", "a", '"', "{", "}"]
WHOLE = [COMPACT, LINES, f"<tool_call>{COMPACT}</tool_call>", '{"name": "f", "arguments": {"s": "</tool_call>"}}']
fragments = st.one_of(st.sampled_from([*TAG_LIKE, *MORE, *WHOLE]), st.text(max_size=4))


@settings(max_examples=200, deadline=None)
@given(st.lists(fragments, max_size=14), st.sampled_from(["stop", "length", "cancelled"]), st.data())
def test_any_cutting_gives_the_same_events(pieces: list[str], reason: FinishReason, data: st.DataObject) -> None:
    text = "".join(pieces)
    whole, parser = events_of([text], reason)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for cutting in (parts, list(text)):
        events, other = events_of(cutting, reason)
        assert merged(events) == merged(whole)
        assert (other.content, other.reasoning, other.tool_calls) == (
            parser.content,
            parser.reasoning,
            parser.tool_calls,
        )


RELEASE = ChatTemplate(
    (Path(__file__).parent / "data" / "chat_template.jinja").read_text(encoding="utf-8"), "chat_template.jinja"
)
free_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20)
arguments = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), free_text, max_size=3)


@settings(max_examples=80, deadline=None)
@given(free_text, free_text, st.lists(st.tuples(st.sampled_from("fgh"), arguments), max_size=3))
def test_what_the_template_writes_is_read_back(reasoning: str, content: str, calls: list[tuple[str, Any]]) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": values}} for name, values in calls],
    }
    escapes = small_tokenizer().escapes
    text = escapes.unescape(RELEASE.render(escapes, [message], add_generation_prompt=False))
    answer = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>")
    shown = "" if calls and not content.strip() else content
    assert read(answer) == (shown, reasoning, [(name, values) for name, values in calls])
