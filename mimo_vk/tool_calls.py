"""The text of one ``<tool_call>`` block to function calls with typed arguments.

Forms read: ``<function=N><parameter=K>V</parameter></function>``, compact or each piece on lines of its own, several
functions in a block, a JSON object in place of the parameters, and a block that is only ``{"name", "arguments"}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mimo_vk.tool_schema import ToolSchemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_STARTS = ("<function=", "{")

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
_SEAM = re.compile(rf"\s*{CLOSE}\s*{OPEN}")
_IMPLIED_END = re.compile(rf"\s*(?:(?=<function=)|(?={CLOSE}\s*{OPEN})|\Z)")
_PARAMETER = re.compile(r"(\s*)<parameter=([^<>\n]+)>")
_JSON = re.compile(r"\s*(?=\{)")
_END = r"\s*(?:</tool_call>|<function=|\Z)"
# Where a value ends: at its tag, or where that is missing at the next parameter or the function's end. A closing tag
# counts only where a call goes on or ends behind it, so that a value may speak of tags.
_VALUE_END = re.compile(
    rf"</parameter>(?=\s*<parameter=|\s*</function>|{_END})|(?=<parameter=[^<>\n]+>)|(?=</function>{_END})"
    rf"|(?={CLOSE}\s*{OPEN})"
)
_LOOSE_VALUE_END = re.compile(r"</parameter>|(?=</function>)")


@dataclass
class Call:
    """One function call. ``start`` is where it stands in the block; ``closed`` whether its end was seen."""

    name: str
    start: int
    arguments: dict[str, Any] = field(default_factory=dict)
    closed: bool = False


class Unfinished(Exception):
    """The text stops inside a value, so that a closing tag behind it may belong to the value."""


class Malformed(Exception):
    """The text is no tool call."""


def could_start(body: str) -> bool | None:
    """Whether the text behind ``<tool_call>`` begins as a call does; None while too little of it is known."""
    begun = body.lstrip()
    if begun.startswith(_STARTS):
        return True
    return None if any(start.startswith(begun) for start in _STARTS) else False


def parse_block(body: str, schemas: ToolSchemas) -> list[Call]:
    """The calls of a block, ``body`` being all between its tags. Raises Unfinished or Malformed, see there."""
    return _Reader(body, schemas, cut=False, loose=False).block()


def parse_loose(body: str, schemas: ToolSchemas) -> list[Call]:
    """The same where a value's closing tag is missing, ended by the block's end. Raises Malformed."""
    return _Reader(body, schemas, cut=False, loose=True).block()


def parse_cut(body: str, schemas: ToolSchemas) -> tuple[list[Call], str | None]:
    """What an answer that ended inside a block holds: the calls that count, and the text of one that doesn't, if any.

    A call counts if it was closed, or if it is declared and all its required parameters were closed.
    """
    try:
        calls = _Reader(body, schemas, cut=True, loose=True).block()
    except Malformed:
        return [], body
    last = calls[-1]
    if last.closed or (schemas.declares(last.name) and schemas.required(last.name) <= set(last.arguments)):
        return calls, None
    return calls[:-1], body[last.start :].lstrip() if calls[:-1] else body


class _Reader:
    """One pass over a block. cut: the end of the text is not the block's end. loose: an open value ends anyhow."""

    def __init__(self, body: str, schemas: ToolSchemas, cut: bool, loose: bool) -> None:
        self.body, self.schemas, self.cut, self.loose = body, schemas, cut, loose
        self.at = 0

    def block(self) -> list[Call]:
        """All calls, at least one. What stands between or behind the functions is left out."""
        if self._match(_JSON):
            return [self._json_call()]
        calls: list[Call] = []
        while match := self._match(_FUNCTION):
            calls.append(Call(match[1].strip(), match.start()))
            self._function(calls[-1])
            if not calls[-1].closed:
                break
            self._match(_SEAM)  # a value without its end ran on into the next block
        if not calls:
            raise Malformed
        return calls

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.body, self.at)
        if match:
            self.at = match.end()
        return match

    def _function(self, call: Call) -> None:
        """Read up to the function's end, which other functions or the block's end may imply."""
        while not call.closed:
            if parameter := self._match(_PARAMETER):
                if not self._value(call, parameter[2].strip(), on_lines="\n" in parameter[1]):
                    return
            elif self._match(_FUNCTION_END):
                call.closed = True
            elif not call.arguments and self._match(_JSON):
                if not self._json_arguments(call):
                    return
            elif self._match(_IMPLIED_END):
                call.closed = self.at < len(self.body) or not self.cut
                return
            elif self.cut:
                return
            else:
                raise Malformed

    def _value(self, call: Call, name: str, on_lines: bool) -> bool:
        """One parameter's value; False where the text ends before it does."""
        match = _VALUE_END.search(self.body, self.at)
        if match is None and self.loose:
            match = _LOOSE_VALUE_END.search(self.body, self.at)
        if match is None and not self.loose:
            raise Unfinished
        if match is None and self.cut:
            return False
        text = self.body[self.at : match.start() if match else len(self.body)]
        if on_lines:  # one newline on each side belongs to the layout
            text = text.removeprefix("\n").removesuffix("\n")
        call.arguments[name] = self.schemas.typed(call.name, name, text)
        self.at = match.end() if match else len(self.body)
        return True

    def _json_arguments(self, call: Call) -> bool:
        """A JSON object in place of parameters; False where a cut text ends inside it."""
        try:
            value = self._json_object()
        except (Malformed, Unfinished):
            if self.cut:
                return False
            raise
        call.arguments.update(self._typed(call.name, value))
        return True

    def _json_call(self) -> Call:
        value = self._json_object()
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise Malformed from None
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            raise Malformed
        return Call(name, 0, self._typed(name, arguments), closed=True)

    def _json_object(self) -> dict[str, Any]:
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.body, self.at)
        except json.JSONDecodeError as error:
            inside_string = error.msg.startswith("Unterminated string")
            raise (Unfinished if inside_string and not self.loose else Malformed) from None
        except (ValueError, RecursionError):
            raise Malformed from None
        assert isinstance(value, dict)
        return value

    def _typed(self, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.schemas.retyped(function, key, value) for key, value in arguments.items()}
