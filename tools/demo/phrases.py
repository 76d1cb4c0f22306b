"""The sentences and word lists of the training data, from phrases.json: all written for this project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PHRASES: dict[str, Any] = json.loads(Path(__file__).with_name("phrases.json").read_text(encoding="utf-8"))


def texts(name: str) -> list[str]:
    """A list of phrases or words."""
    listed = PHRASES[name]
    assert isinstance(listed, list) and all(isinstance(text, str) for text in listed), name
    return listed


def table(name: str) -> dict[str, str]:
    return dict(PHRASES[name])


def groups(name: str) -> dict[str, list[str]]:
    """Lists of phrases by label."""
    return dict(PHRASES[name])
