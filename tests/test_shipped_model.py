"""What a newcomer meets first: the program without --model, answering from the checkpoint that comes along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_vk.engine import shipped_model

CHAT = [sys.executable, "-m", "mimo_vk", "chat", "--cpu"]
QUESTIONS = "What is 17 + 25?\nWhat is the capital of Peru?\n"


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_chat_answers_sensibly(project_root: Path, backend: str) -> None:
    """The same answers on both backends; the line that says which model this is goes to standard error."""
    done = subprocess.run(
        CHAT,
        input=QUESTIONS,
        cwd=project_root,
        env={**os.environ, "MIMO_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "42" in first
    assert "Lima" in second
    assert "demonstration model" in done.stderr


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in shipped_model().rglob("*")) < 20e6
