"""The declared tools, and a call's argument from text to the type that its JSON schema declares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_DEPTH = 8  # of references and alternatives that are followed: a schema may refer to itself
_ORDER = ("null", "boolean", "integer", "number", "object", "array")  # a string is what remains


class ToolSchemas:
    """Tools by name, declared as OpenAI does ({"function": {"name", "parameters"}}) or bare."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                self._parameters[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def declares(self, function: str) -> bool:
        return function in self._parameters

    def required(self, function: str) -> set[str]:
        """The names that a call must have."""
        names = self._parameters.get(function, {}).get("required")
        return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()

    def typed(self, function: str, parameter: str, text: str) -> Any:
        """A value's text as the declared type; the text itself where it doesn't fit or nothing is declared."""
        return typed_value(text, self._schema(function, parameter), self._parameters.get(function, {}))

    def retyped(self, function: str, parameter: str, value: Any) -> Any:
        """The same for a value that came as JSON: only a string that may not be one is read again."""
        root = self._parameters.get(function, {})
        schema = self._schema(function, parameter)
        if not isinstance(value, str) or "string" in _kinds(schema, root, _DEPTH):
            return value
        return typed_value(value, schema, root)

    def _schema(self, function: str, parameter: str) -> Any:
        properties = self._parameters.get(function, {}).get("properties")
        return properties.get(parameter) if isinstance(properties, Mapping) else None


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A text read by a JSON schema: type, type lists, enum, const, anyOf, oneOf, allOf, local $ref.

    Where several types are allowed the stricter goes first (a nullable string's "null" is null), a string last. What
    fits none stays the text, verbatim.
    """
    members = _members(_resolved(schema, root))
    for member in members:
        spelled = member if isinstance(member, str) else json.dumps(member, ensure_ascii=False)
        if spelled == (text if isinstance(member, str) else text.strip()):
            return member
    kinds = _kinds(schema, root, _DEPTH)
    for kind in _ORDER:
        if kind in kinds:
            fits, value = _read(text.strip(), kind)
            if fits:
                return value
    return text


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind any ``$ref: "#/..."`` into the function's own parameters; {} where there is none."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for step in reference.removeprefix("#/").split("/"):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def _members(schema: Mapping[str, Any]) -> list[Any]:
    """The values of enum and const."""
    members = schema.get("enum")
    return [*(members if isinstance(members, list) else []), *([schema["const"]] if "const" in schema else [])]


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Every type that a schema allows, through its alternatives."""
    schema = _resolved(schema, root)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {k for k in kind if isinstance(k, str)}
    kinds = {_kind_of(member) for member in _members(schema)}
    for key in ("anyOf", "oneOf", "allOf") if depth else ():
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            kinds |= _kinds(branch, root, depth - 1)
    if kinds:
        return kinds
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else set()


def _kind_of(value: Any) -> str:
    """The JSON type of a parsed value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return {int: "integer", float: "number", dict: "object", list: "array"}.get(type(value), "string")


def _read(word: str, kind: str) -> tuple[bool, Any]:
    """A word as a JSON value of one kind, if it is one. An integer may be written 5.0, a boolean True."""
    if kind == "boolean":
        return word.lower() in ("true", "false"), word.lower() == "true"
    try:
        value = json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False, None
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return False, None  # beyond the range of a float
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return True, int(value)
    found = _kind_of(value)
    return found == kind or (kind == "number" and found == "integer"), value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")
