"""The built wheel, installed elsewhere; and the set-up script's second run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TREES = ("mimo_vk", "cpu_fallback", "shaders")
DATA = {  # one file of each kind that isn't a module: its place in the tree, and in the wheel
    "shaders/probe.comp": "mimo_vk/shaders/probe.comp",
    "shaders/probe.spv": "mimo_vk/shaders/probe.spv",
    "shaders/include/probe.glsl": "mimo_vk/shaders/include/probe.glsl",
    "mimo_vk/demo/probe.json": "mimo_vk/demo/probe.json",
    "mimo_vk/server/web/probe.html": "mimo_vk/server/web/probe.html",
}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_list_of_kernels_is_whole(project_root: Path) -> None:
    rows = [
        line for line in (project_root / "shaders" / "README.md").read_text().splitlines() if line.startswith("| `")
    ]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(path.stem for path in (project_root / "shaders").glob("*.comp"))


@pytest.fixture(scope="module")
def wheel(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, to which a file of each kind of data was added."""
    tree = tmp_path_factory.mktemp("tree")
    for name in TREES:
        shutil.copytree(project_root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in project_root.iterdir():
        if path.is_file() and path.suffix in {".toml", ".md", ""}:
            shutil.copy(path, tree)
    for path_name in DATA:
        (tree / path_name).parent.mkdir(exist_ok=True)
        (tree / path_name).write_text("probe")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "out",
        ".",
        cwd=tree,
    )
    (built,) = (tree / "out").glob("mimo_vk-*.whl")
    return built


def test_wheel_carries_every_module_and_the_data(wheel: Path, project_root: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        str(path.relative_to(project_root))
        for name in ("mimo_vk", "cpu_fallback")
        for path in (project_root / name).rglob("*.py")
    }
    assert len(modules) >= 4
    assert modules - names == set(), "a package is missing from [tool.setuptools] packages"
    assert set(DATA.values()) - names == set()
    page = {str(path.relative_to(project_root)) for path in (project_root / "mimo_vk/server/web").iterdir()}
    assert len(page) >= 4 and page - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"mimo_vk", "cpu_fallback"}


def test_wheel_installed_elsewhere_runs(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    code = "import mimo_vk, cpu_fallback; print(mimo_vk.__file__, cpu_fallback.__file__, mimo_vk.__version__)"
    package, fallback, version = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert Path(package) == site / "mimo_vk/__init__.py"
    assert Path(fallback) == site / "cpu_fallback/__init__.py"
    assert (site / "mimo_vk/shaders/probe.spv").read_text() == "probe"
    assert run(site / "bin/mimo-vk", "--version", cwd=tmp_path, PYTHONPATH=str(site)) == f"mimo-vk {version}\n"


@pytest.fixture
def small_tree(project_root: Path, tmp_path: Path) -> Path:
    """A tree whose set-up looks complete: an environment, a mimo-vk in it, and the stamp."""
    tree = tmp_path / "tree"
    (tree / "tools").mkdir(parents=True)
    shutil.copy(project_root / "pyproject.toml", tree)
    shutil.copy(project_root / "tools/setup.sh", tree / "tools")
    run(sys.executable, "-m", "venv", "--without-pip", ".venv", cwd=tree)
    shutil.copy("/bin/true", tree / ".venv/bin/mimo-vk")
    stamp = run("bash", "tools/setup.sh", "--stamp", cwd=tree)
    (tree / ".venv/setup-stamp").write_text(stamp)
    return tree


def test_second_setup_does_nothing(small_tree: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small_tree.rglob("*")}
    done = subprocess.run(["bash", "tools/setup.sh"], cwd=small_tree, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path: path.stat().st_mtime_ns for path in small_tree.rglob("*")} == before


@pytest.mark.parametrize("change", ["nothing", "pyproject.toml", "script", "python", "stamp", "mimo-vk"])
def test_setup_notices_what_changed(small_tree: Path, change: str) -> None:
    if change in ("pyproject.toml", "script"):
        path = small_tree / {"pyproject.toml": "pyproject.toml", "script": "tools/setup.sh"}[change]
        path.write_text(path.read_text() + "\n# changed\n")
    elif change != "nothing":
        path = (
            small_tree
            / {"python": ".venv/bin/python", "stamp": ".venv/setup-stamp", "mimo-vk": ".venv/bin/mimo-vk"}[change]
        )
        path.unlink()
    done = subprocess.run(["bash", "tools/setup.sh", "--check"], cwd=small_tree, capture_output=True, timeout=60)
    assert done.returncode == (0 if change == "nothing" else 1)


def test_what_tests_need_is_set_up_apart(small_tree: Path) -> None:
    """An environment that only runs the program is not taken for one that can run the tests."""
    check = ["bash", "tools/setup.sh", "--dev", "--check"]
    assert subprocess.run(check, cwd=small_tree, timeout=60).returncode == 1
    shutil.copy(small_tree / ".venv/setup-stamp", small_tree / ".venv/setup-stamp-dev")
    assert subprocess.run(check, cwd=small_tree, timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["kp-0.9.0-cp311-cp311-linux_x86_64.whl", "kp-0.9.0.tar.gz"])
def test_kp_from_a_file_asks_no_index(small_tree: Path, tmp_path: Path, name: str) -> None:
    """With a Python that only writes down what it is asked, and makes the wheel that it is asked for."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f"""#!/bin/bash
echo "$@" >> {log}
[[ $* != *" wheel "* ]] || touch "$(sed 's/.* -w \\([^ ]*\\) .*/\\1/' <<<"$*")/kp-0.9.0-made.whl"
"""
    )
    python.chmod(0o755)
    file = tmp_path / name
    file.write_bytes(b"")
    run("bash", "tools/setup.sh", "--kp", str(file), cwd=small_tree, SETUP_PYTHON=str(python))
    *built, installed, tried = log.read_text().splitlines()
    assert installed.startswith("-m pip install") and "--no-index" in installed and "--no-deps" in installed
    assert installed.endswith("kp-0.9.0-made.whl" if built else name)
    assert tried == "-c import kp; kp.Manager"
    if name.endswith(".whl"):
        assert built == []
        return
    assert built[0] == "-m pybind11 --cmakedir"
    (command,) = built[1:]
    assert "--no-index" in command and "--no-build-isolation" in command and command.endswith(str(file))
