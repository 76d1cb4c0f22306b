"""What every test may rely on: the tree's root, and no MIMO_ variable of the person who runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.make_checkpoint import make

for _name in [name for name in os.environ if name.startswith("MIMO_")]:
    del os.environ[_name]


@pytest.fixture(scope="session")
def project_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The discriminating small checkpoint, seed 0. Shared: a test that changes it works on a copy."""
    out = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make(out, "tiny")
    return out
