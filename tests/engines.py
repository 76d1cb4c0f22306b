"""Engines for tests: the shared defaults, with what a test changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mimo_vk.engine import Engine
from mimo_vk.settings import Settings
from tools import make_checkpoint
from tools.checkpoint.geometry import TINY

PROMPT = [5, 200, 17, 33, 33, 90, 411, 2, 8, 300]


def open_engine(model: Path, **changes: Any) -> Engine:
    """An engine on the CPU with a small context, and one thread: small matrices are done before another one wakes."""
    return Engine.open(replace(Settings(model=model, cpu=True, threads=1, ctx=512), **changes))


def make_flash(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two layers of Flash in their true size, with 8 experts and the small checkpoint's vocabulary.

    Its own would be 2.5 GB of rows that are like any others.
    """
    find = make_checkpoint.find_geometry
    with monkeypatch.context() as patch:
        words: dict[str, Any] = {"vocab": TINY.vocab, "base_tokens": TINY.base_tokens}
        patch.setattr(make_checkpoint, "find_geometry", lambda *asked: replace(find(*asked), **words))
        make_checkpoint.make(out, "flash-slice", layers=2, experts=8)
    return out
