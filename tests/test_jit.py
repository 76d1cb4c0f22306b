"""Compiled code is cached where it can be, is never stale, and works where nothing is writable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import numpy as np
from cpu_fallback.jit import jit
from cpu_fallback.inner import double

@jit()
def apply(x):
    return double(x)

print(apply(np.float32(3)), sum(apply.stats.cache_hits.values()))
"""
INNER = """
from cpu_fallback.jit import jit

@jit()
def double(x):
    return x + x
"""


@pytest.fixture
def package(tmp_path: Path, project_root: Path) -> Path:
    """A copy of the package with a function of its own and a program that calls it through another."""
    root = tmp_path / "site"
    (root / "cpu_fallback").mkdir(parents=True)
    for name in ("__init__.py", "jit.py"):
        shutil.copy(project_root / "cpu_fallback" / name, root / "cpu_fallback" / name)
    (root / "cpu_fallback" / "inner.py").write_text(INNER)
    (root / "program.py").write_text(PROGRAM)
    return root


def run(root: Path, **environment: str) -> tuple[float, int]:
    """What the program printed: the result, and how often it found its code on disk."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(
        [sys.executable, str(root / "program.py")], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    value, hits = done.stdout.split()
    return float(value), int(hits)


def test_code_is_found_again_and_never_stale(package: Path) -> None:
    assert run(package) == (6, 0)
    assert run(package) == (6, 1)
    inner = package / "cpu_fallback" / "inner.py"
    inner.write_text(INNER.replace("x + x", "x + x + x"))
    assert run(package) == (9, 0)
    assert run(package) == (9, 1)


def test_damaged_cache_files_are_ignored(package: Path) -> None:
    run(package)
    files = list(package.rglob("*.nbc"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    assert run(package) == (6, 0)


def test_a_read_only_install_still_runs(package: Path, tmp_path: Path) -> None:
    """Neither beside the sources nor in the home directory: a file stands where each directory would be made."""
    (package / "__pycache__").write_text("")
    (package / "cpu_fallback" / "__pycache__").write_text("")
    home = tmp_path / "home"
    home.write_text("")
    blocked = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "NUMBA_CACHE_DIR": str(home / "cache")}
    assert run(package, **blocked) == (6, 0)
    assert run(package, **blocked) == (6, 0)
    assert not list(tmp_path.rglob("*.nbc"))


def test_the_home_directory_is_used_where_the_package_is_read_only(package: Path, tmp_path: Path) -> None:
    (package / "__pycache__").write_text("")
    (package / "cpu_fallback" / "__pycache__").write_text("")
    caches = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    assert run(package, **caches) == (6, 0)
    assert run(package, **caches) == (6, 1)
