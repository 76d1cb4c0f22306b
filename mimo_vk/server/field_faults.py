"""A body's first faulty field as a refusal: pydantic finds it, the words are ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_vk.server.errors import ApiError

_KINDS = {
    "string_type": "a string",
    "string_unicode": "text that is valid Unicode",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "string_pattern_mismatch": "1 to 64 printable ASCII characters but space, < and >",  # Name is all that has one
}
_BOUNDS = {
    "greater_than_equal": ("ge", "a number of at least"),
    "less_than_equal": ("le", "a number of at most"),
    "less_than": ("lt", "a number below"),
}


def refusal(errors: list[Any]) -> ApiError:
    """ApiError 400 for what pydantic found: of several faults one that is there and wrong, which says more."""
    first = min(errors, key=lambda error: error["type"] == "missing")
    kind, path = first["type"], field_path(first["loc"])
    if kind == "extra_forbidden":
        return ApiError(400, f"{path}: this field is not supported", param=path, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{path}: missing", param=path, code="missing_required_parameter")
    if kind == "value_error":  # raised by a validator of ours: names its field where it concerns more than one
        text = str(first["ctx"]["error"])
        name, colon, rest = text.partition(": ")
        path, text = (path, text) if path or not colon else (name, rest)
        return ApiError(400, f"{path}: {text}", param=path or None, code="invalid_value")
    found = first["input"]
    if kind == "part_type" and isinstance(found, dict):
        found, path = found.get("type"), path + ".type"
    if path.endswith("].type") and ".content[" in path:
        path = path.removesuffix(".type")
        return ApiError(400, f"{path}: {_part_refusal(found)}", param=path, code="unsupported_content")
    return ApiError(400, f"{path}: {said(first)}", param=path or None, code="invalid_value")


def said(error: Mapping[str, Any]) -> str:
    """What was expected, and what was found."""
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _KINDS:
        return f"expected {_KINDS[kind]}, found {shown(found)}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        if context[key] == 0 and kind == "less_than_equal":
            return f"only 0 is supported, found {shown(found)}"
        bound = context[key]
        return f"expected {words} {int(bound) if bound == int(bound) else bound}, found {shown(found)}"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        return _length(kind, found, context)
    if kind == "literal_error":
        values = context["expected"].replace("True", "true").replace("False", "false")
        several = " or " in values
        return (
            f"{'expected ' if several else 'only '}{values}{'' if several else ' is supported'}, found {shown(found)}"
        )
    if kind == "message_role" and isinstance(found, dict):
        role = f"found {shown(found['role'])}" if found.get("role") is not None else "it is missing"
        return f"{error['msg'].replace('an object whose role is', 'the role')}, {role}"
    return f"{error['msg']}, found {shown(found)}"  # a union's own message


def _length(kind: str, found: Any, context: Mapping[str, Any]) -> str:
    unit = "character" if kind.startswith("string") else "item"
    bound = context["min_length" if kind.endswith("short") else "max_length"]
    if bound == 0:
        return f"only {'an empty object' if isinstance(found, dict) else 'an empty list'} is supported"
    many = f"{'at least' if kind.endswith('short') else 'at most'} {bound} {unit}{'' if bound == 1 else 's'}"
    return f"expected {many}, found {len(found) or 'none'}"


def _part_refusal(found: Any) -> str:
    if found == "image_url":
        return "pictures stand in the messages of a user only"
    return f"{shown(found)} parts are not supported, only text and, of a user's, image_url are"


def field_path(loc: tuple[int | str, ...]) -> str:
    """``messages[0].content`` of pydantic's location, whose tags of unions stand in angle brackets."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path


def shown(value: Any) -> str:
    """A short value as JSON has it, of anything else what it is."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return _cut(repr(value))
    if isinstance(value, str):
        return repr(_cut(value))
    return "an object" if isinstance(value, dict) else "a list"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
