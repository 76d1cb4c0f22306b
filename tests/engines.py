"""Engines for tests: the shared defaults, with what a test changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mimo_vk.engine import Engine
from mimo_vk.settings import Settings

PROMPT = [5, 200, 17, 33, 33, 90, 411, 2, 8, 300]


def open_engine(model: Path, **changes: Any) -> Engine:
    """An engine on the CPU with two threads and a small context."""
    return Engine.open(replace(Settings(model=model, cpu=True, threads=2, ctx=512), **changes))
