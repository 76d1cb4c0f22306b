"""Try a Vulkan device: every bit of its results against numpy's, then its kernels' speed. Status 1 if a bit differs.

    .venv/bin/python tools/gpu_check.py [DEVICE] [--kp FILE]

DEVICE: an index or a part of a name; the best GPU where none is given. FILE: what kp is installed from where it is not
yet, a wheel or the source archive (`pip download --no-deps --no-binary kp kp==0.9.0`, 0.1 MB), without a network.

What it needs there: Python with numpy, numba and pytest in .venv (`make dev` does all of it, kp included, where there
is a network), the GPU's Vulkan driver and libvulkan1, libfmt; to build kp also setuptools, cmake, g++, libvulkan-dev,
libfmt-dev, pybind11 (2.13 or newer), the headers of Python. Shaders are in the tree as they are run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cpu_fallback.reference import ReferenceOps
from mimo_vk.bench_kernels import random_mxfp4
from mimo_vk.errors import MimoError
from mimo_vk.formats import F32, Expert
from mimo_vk.vulkan import bench_device
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.client import DeviceClient
from mimo_vk.vulkan.listing import DeviceInfo, choose, list_devices

ROOT = Path(__file__).resolve().parents[1]
RawDescription = argparse.RawDescriptionHelpFormatter
SHAPES = ((32, 32), (256, 64), (288, 544), (4096, 2048))  # hidden and inner size
ROWS, EXPERTS = 3, 5


def random_expert(rng: np.random.Generator, hidden: int, inner: int) -> Expert:
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    return Expert(*(random_mxfp4(rng, *shape) for shape in shapes))


def compare(info: DeviceInfo, hidden: int, inner: int) -> int:
    """How many of the device's results have other bits than numpy's, over every expert and row.

    NaN is no difference where the device takes subnormal floats for zero: that is what it leaves to the CPU.
    """
    rng = np.random.default_rng(hidden)
    shape = TierShape(hidden, inner, top_k=EXPERTS, max_rows=ROWS, staging=EXPERTS)
    experts = [random_expert(rng, hidden, inner) for _ in range(EXPERTS)]
    x: F32 = rng.standard_normal((ROWS, hidden), dtype=np.float32)
    pairs = np.array([(slot, row) for slot in range(EXPERTS) for row in range(ROWS)], np.uint32)
    with DeviceClient(info, shape, EXPERTS) as client:
        held = client.wait_ready()
        while held < EXPERTS:
            held, before = client.grow(), held
            if held == before:
                raise MimoError(f"device {info.describe()}: no room for {EXPERTS} experts")
        for slot, expert in enumerate(experts):
            client.upload(expert, slot)
        client.start_step(x, pairs)
        found = client.finish_step(len(pairs)).copy()
    slots, rows = pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32)
    ops = ReferenceOps()
    expected = ops.expert_down(experts, slots, ops.expert_gate_up(experts, slots, rows, x))
    left = np.isnan(found) & client.flushes
    return int(((found.view(np.uint32) != expected.view(np.uint32)) & ~left).sum())


def ensure_kp(file: Path | None) -> None:
    """Install kp from ``file`` if it is not there yet. Errors: MimoError."""
    if find_spec("kp") is not None:
        return
    if file is None:
        raise MimoError("kp is not installed: make dev builds it, or --kp FILE")
    environment = {**os.environ, "SETUP_PYTHON": sys.executable}
    if subprocess.run(["bash", "tools/setup.sh", "--kp", str(file.resolve())], cwd=ROOT, env=environment).returncode:
        raise MimoError(f"kp could not be installed from {file}")


def files_of_tests() -> list[str]:
    return [
        "tests/test_oracle.py",
        *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_vulkan_*.py")),
    ]


def tests_of_bits(info: DeviceInfo, files: Sequence[str]) -> tuple[bool, str]:
    """Run the tests that compare bits on a device; whether none failed, and pytest's last line."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "pyproject.toml",
        "-q",
        "-m",
        "bits",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "VULKAN_TEST_DEVICE": str(info.index)}, capture_output=True, text=True
    )
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no output"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line, flush=True)
    return done.returncode == 0, lines[-1].strip("= ")


def experts(info: DeviceInfo) -> int:
    """Compare experts of several sizes, a line for each; how many results differ."""
    wrong = 0
    for hidden, inner in SHAPES:
        began = time.perf_counter()
        differ = compare(info, hidden, inner)
        wrong += differ
        verdict = f"{differ} DIFFER" if differ else "the same bits"
        seconds = time.perf_counter() - began
        print(f"experts {hidden:5} x {inner:5}, {EXPERTS * ROWS} pairs: {verdict} ({seconds:.1f} s)", flush=True)
    return wrong


def main(arguments: list[str]) -> int:
    """Print the table. Errors: MimoError."""
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__, formatter_class=RawDescription)
    parser.add_argument("device", nargs="?", default="auto")
    parser.add_argument("--kp", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    ensure_kp(options.kp)
    info = choose(list_devices(), options.device)
    if info is None:
        print("no GPU is listed; a CPU driver is tried only by its index or name")
        return 1
    print(f"device {info.describe()}, Vulkan {info.api}, subgroups of {info.subgroup_size}")
    wrong = experts(info)
    passed, said = tests_of_bits(info, files_of_tests())
    print(f"tests of bits, layers and models included: {said}", flush=True)
    print(bench_device.HEADER)
    for result in bench_device.measure(info):
        print(result.line())
    verdict = "every bit is the CPU's" if passed and not wrong else "NOT THE SAME BITS"
    print(f"{verdict}; {time.perf_counter() - began:.0f} s in all")
    return int(not passed or wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MimoError as error:
        sys.exit(f"{error}")
