"""Exact checks of an answer: what the held-out list says of it, and whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """An answer as the engine's parser splits it. ``stopped``: it ended by itself."""

    content: str
    reasoning: str = ""
    tool_calls: Sequence[dict[str, Any]] = field(default_factory=tuple)
    stopped: bool = True


def holds(check: dict[str, Any], answer: Answer) -> bool:
    """Whether the answer ended by itself and is what the check asks for. ValueError for an unknown check."""
    if not answer.stopped:
        return False
    text, kind = answer.content.strip(), check["type"]
    if kind == "call":
        return list(answer.tool_calls) == [{"name": check["name"], "arguments": check["arguments"]}]
    if answer.tool_calls:
        return False
    if kind == "exact":
        return text in check["any"]
    if kind == "contains":
        return all(part in text for part in check["all"])
    if kind == "starts":
        return text.startswith(check["text"])
    if kind == "story":
        return _is_story(check, text)
    raise ValueError(f"unknown check {kind!r}")


def _is_story(check: dict[str, Any], text: str) -> bool:
    """Long enough, on this animal by this name throughout, with an end."""
    named = text.count(check["name"]) >= 4 and check["animal"] in text
    return named and len(text.split()) >= check["words"] and text.endswith("The end.")
