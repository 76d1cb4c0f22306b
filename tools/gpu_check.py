"""Try a Vulkan device: every bit of its kernels against numpy, then their speed. Exit status 1 if a bit differs.

tools/gpu_check.py [DEVICE]     an index or a part of a name; the best GPU where none is given

It needs the project with kp, built as tools/setup.sh does. On a machine without a network: `pip install --no-deps` of
the kp wheel that the script keeps in ~/.cache/mimo-vk/wheels, for the same Python, and libvulkan1 and libfmt beside it.
"""

from __future__ import annotations

import sys
import time
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

SHAPES = ((32, 32), (256, 64), (288, 544), (4096, 2048))  # hidden and inner size
ROWS, EXPERTS = 3, 5


def random_expert(rng: np.random.Generator, hidden: int, inner: int) -> Expert:
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    return Expert(*(random_mxfp4(rng, *shape) for shape in shapes))


def compare(info: DeviceInfo, hidden: int, inner: int) -> int:
    """How many of the device's results have other bits than numpy's, over every expert and row."""
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
    return int((found.view(np.uint32) != expected.view(np.uint32)).sum())


def main(arguments: list[str]) -> int:
    """Print the table. Errors: MimoError."""
    info = choose(list_devices(), arguments[0] if arguments else "auto")
    if info is None:
        print("no GPU is listed; a CPU driver is tried only by its index or name")
        return 1
    print(f"device {info.describe()}, Vulkan {info.api}, subgroups of {info.subgroup_size}")
    wrong = 0
    for hidden, inner in SHAPES:
        began = time.perf_counter()
        differ = compare(info, hidden, inner)
        wrong += differ
        verdict = f"{differ} DIFFER" if differ else "the same bits"
        seconds = time.perf_counter() - began
        print(f"experts {hidden:5} x {inner:5}, {EXPERTS * ROWS} pairs: {verdict} ({seconds:.1f} s)", flush=True)
    print(bench_device.HEADER)
    for result in bench_device.measure(info):
        print(result.line())
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MimoError as error:
        sys.exit(f"{error}")
