"""A model's answer, as it streams, to content, reasoning and tool calls: the same whatever the pieces it comes in.

``<think>`` opens reasoning and ``</think>`` closes it, as does a ``<tool_call>`` inside it. A tag is never shown, nor
part of one: text that may still become a tag is held back until it is known. Tool calls come out whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mimo_vk.tool_calls import (
    CLOSE,
    OPEN,
    Call,
    Malformed,
    Unfinished,
    could_start,
    parse_block,
    parse_cut,
    parse_loose,
)
from mimo_vk.tool_schema import ToolSchemas

THINK, END_THINK = "<think>", "</think>"
TAGS = (THINK, END_THINK, OPEN, CLOSE)  # what a TextStream must keep for an AnswerParser
_LONGEST = max(map(len, TAGS))

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Content:
    """A piece of the answer proper."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call; the index counts the answer's calls from 0."""

    index: int
    name: str
    arguments: dict[str, Any]


Event = Content | Reasoning | ToolCall


class AnswerParser:
    """Push the answer's text, then finish. ``tools``: the declarations that type the arguments. ``calls`` False: a
    ``<tool_call>`` is text like any other.

    White space alone before a call, or behind one, is left out. An answer whose reasoning is never closed is content
    if it stopped by itself: since it was already given out as Reasoning, ``finish("stop")`` gives its text again as
    Content, and the properties then hold it as content only.
    """

    def __init__(self, tools: list[dict[str, Any]] | None = None, *, calls: bool = True) -> None:
        self._tags = (THINK, END_THINK, OPEN) if calls else (THINK, END_THINK)
        self._schemas = ToolSchemas(tools)
        self._state: Literal["content", "reasoning", "call"] = "content"
        self._text = ""  # not yet decided
        self._space = ""  # white space that is content only if more follows
        self._searched = 0  # in a call: no CLOSE before here ends it
        self._events: list[Event] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._open_since = 0  # the first piece of the reasoning that is open
        self._calls: list[dict[str, Any]] = []
        self._in_content = False  # whether content goes on without a break

    @property
    def state(self) -> Literal["content", "reasoning", "call"]:
        """What the next text would be part of, as far as is known."""
        return self._state

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """[{"name", "arguments"}] so far."""
        return list(self._calls)

    def push(self, text: str) -> list[Event]:
        """More of the answer; what it settles."""
        self._text += text
        while self._step():
            pass
        return self._taken()

    def finish(self, reason: FinishReason) -> list[Event]:
        """The end: what was held back, and how an answer cut in the middle is to be read."""
        while self._state == "call":
            self._end_call()
            while self._step():
                pass
        if self._state == "content":
            self._emit_content(self._text)
            if not self._calls:
                self._flush_space()
        else:
            self._emit_reasoning(self._text)
            if reason == "stop":
                self._reasoning, unclosed = self._reasoning[: self._open_since], self._reasoning[self._open_since :]
                self._emit_content("".join(unclosed))
                self._flush_space()
        self._text = ""
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = _joined(self._events), []
        return events

    def _step(self) -> bool:
        """Move past one tag or call; False when nothing more can be decided."""
        if self._state == "call":
            return self._step_call()
        emit = self._emit_content if self._state == "content" else self._emit_reasoning
        found = [(at, tag) for tag in self._tags if (at := self._text.find(tag)) >= 0]
        if not found:
            held = _held(self._text)
            emit(self._text[: len(self._text) - held])
            self._text = self._text[len(self._text) - held :]
            return False
        at, tag = min(found)
        emit(self._text[:at])
        self._text = self._text[at + len(tag) :]
        self._enter(tag)
        return True

    def _enter(self, tag: str) -> None:
        """What a tag does. A closing tag with nothing open, and an opening one with reasoning open, do nothing."""
        if tag == OPEN:
            self._state, self._searched = "call", 0
        elif tag == THINK and self._state == "content":
            if not self._in_content:
                self._space = ""
            self._state, self._open_since = "reasoning", len(self._reasoning)
        elif tag == END_THINK and self._state == "reasoning":
            self._state, self._in_content = "content", False

    def _step_call(self) -> bool:
        starts = could_start(self._text)
        if not starts:
            if starts is None:
                return False
            self._leave_call()
            self._emit_content(OPEN)
            return True
        while (end := self._text.find(CLOSE, self._searched)) >= 0:
            body, rest = self._text[:end], self._text[end + len(CLOSE) :]
            try:
                calls = parse_block(body, self._schemas)
            except Unfinished:
                self._searched = end + 1
                continue
            except Malformed:
                calls = []
            self._close_call(calls, "" if calls else OPEN + body + CLOSE, rest)
            return True
        self._searched = max(self._searched, len(self._text) - len(CLOSE) + 1)
        return False

    def _end_call(self) -> None:
        """The answer ends inside a block."""
        end = self._text.find(CLOSE)
        if end < 0 or not could_start(self._text):
            calls, cut = parse_cut(self._text, self._schemas)
            return self._close_call(calls, "" if cut is None else OPEN + cut, "")
        body, rest = self._text[:end], self._text[end + len(CLOSE) :]
        try:
            calls, text = parse_loose(body, self._schemas), ""
        except Malformed:
            calls, text = [], OPEN + body + CLOSE
        return self._close_call(calls, text, rest)

    def _close_call(self, calls: list[Call], text: str, rest: str) -> None:
        """Leave the block: its calls, then what of it remains text."""
        self._leave_call()
        for call in calls:
            self._space, self._in_content = "", False
            self._events.append(ToolCall(len(self._calls), call.name, call.arguments))
            self._calls.append({"name": call.name, "arguments": call.arguments})
        self._emit_content(text)
        self._text = rest

    def _leave_call(self) -> None:
        self._state, self._searched = "content", 0

    def _emit_content(self, text: str) -> None:
        if not self._in_content:
            stripped = text.lstrip()
            self._space += text[: len(text) - len(stripped)]
            text = stripped
        if text:
            self._flush_space()
            self._in_content = True
            self._content.append(text)
            self._events.append(Content(text))

    def _flush_space(self) -> None:
        space, self._space = self._space, ""
        if space:
            self._content.append(space)
            self._events.append(Content(space))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._reasoning.append(text)
            self._events.append(Reasoning(text))


def _held(text: str) -> int:
    """How many characters at the end may be the beginning of a tag."""
    at = text.rfind("<", max(0, len(text) - _LONGEST))
    return len(text) - at if at >= 0 and any(tag.startswith(text[at:]) for tag in (THINK, END_THINK, OPEN)) else 0


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind made one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        else:
            out.append(event)
    return out
