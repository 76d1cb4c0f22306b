"""The speed of the device's kernels at the release's sizes, each beside what the device copies, in a child process.

Medians of whole submissions, the host's share included. GB/s count weights, scales and cached rows, read once, and for
the dense kernels the activations too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from mimo_vk.errors import MimoError
from mimo_vk.probe import run_child
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.listing import ROOT, DeviceInfo

if TYPE_CHECKING:
    from mimo_vk.vulkan.device import Device, Program  # kp is loaded in the child alone

HIDDEN, INNER = 4096, 2048
SHORTEST, FEWEST = 0.3, 7  # seconds and runs that a median is taken over,
LONGEST = 2.0  # but after so many seconds there are enough
SECONDS = 600.0  # for everything: a CPU driver takes two minutes
HEADER = f"{'kernel on the device':28} {'pairs':>5} {'ms':>9} {'GB/s':>8} {'copy':>8} {'share':>6}"

START = """
import sys
sys.path.insert(0, {root!r})
from mimo_vk.vulkan.bench_device import main
main({info!r}, {hidden}, {inner}, {sizes!r})
"""


@dataclass(frozen=True)
class DenseSizes:
    """The release's, and for attention over all positions how many there are. The head's size has no row of its own."""

    hidden: int = 4096
    inner: int = 16384
    heads: int = 64
    kv_heads: int = 4
    head_dim: int = 192
    v_dim: int = 128
    rope_dim: int = 64
    window: int = 128
    experts: int = 256
    chosen: int = 8
    keys: int = 2048
    many: int = 8  # rows of a block

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        return self.heads * self.v_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + self.kv_heads * (self.head_dim + self.v_dim)


@dataclass(frozen=True)
class DeviceResult:
    """One kernel's median over some pairs of a matrix and a row, and the device's copy rate."""

    name: str
    pairs: int
    seconds: float
    bytes: int
    copy_gbps: float

    @property
    def gbps(self) -> float:
        return self.bytes / self.seconds / 1e9

    def line(self) -> str:
        speeds = f"{self.gbps:8.1f} {self.copy_gbps:8.1f} {self.gbps / self.copy_gbps:6.0%}"
        return f"{self.name:28} {self.pairs:5} {self.seconds * 1e3:9.3f} {speeds}"


def measure(
    info: DeviceInfo, hidden: int = HIDDEN, inner: int = INNER, sizes: DenseSizes | None = None
) -> list[DeviceResult]:
    """All kernels on one device. Errors: MimoError with what the child said."""
    dense = json.dumps(asdict(sizes or DenseSizes()))
    code = START.format(root=ROOT, info=info.as_json(), hidden=hidden, inner=inner, sizes=dense)
    child = run_child([sys.executable, "-c", code], SECONDS)
    if child.trouble:
        raise MimoError(f"device {info.describe()}: {child.trouble}")
    return [DeviceResult(**json.loads(line)) for line in child.output.splitlines()]


def main(info: str, hidden: int, inner: int, sizes: str) -> None:
    """In the child: a line of JSON for each kernel."""
    from mimo_vk.vulkan.device import Device

    given = DeviceInfo.from_json(info)
    for results in (
        expert_results(Device(given), hidden, inner),
        dense_results(Device(given), DenseSizes(**json.loads(sizes))),
    ):
        for result in results:
            print(json.dumps(asdict(result)), flush=True)


def dense_results(device: Device, sizes: DenseSizes) -> Iterator[DeviceResult]:
    """The dense path's kernels, each alone."""
    from mimo_vk.vulkan.bench_dense import DenseBench
    from mimo_vk.vulkan.device_check import check_arithmetic

    bench = DenseBench(device, check_arithmetic(device).select_decode, sizes)
    copy_gbps = copy_rate(device, 2 * sizes.hidden * sizes.qkv_width)
    for case in bench.cases():
        yield DeviceResult(case.name, case.rows, timed(case.program), case.bytes, copy_gbps)
    device.close()


def expert_results(device: Device, hidden: int, inner: int) -> Iterator[DeviceResult]:
    """Gate and up, and down: one expert, and as many as one slab holds of 8; one row each."""
    from mimo_vk.vulkan.device import Program, view
    from mimo_vk.vulkan.device_check import check_arithmetic
    from mimo_vk.vulkan.expert_slabs import ExpertSlabs

    shape = TierShape(hidden, inner, top_k=8, max_rows=1, staging=1)
    slabs = ExpertSlabs(device, shape, 8, check_arithmetic(device))
    slabs.grow()
    stored = np.random.default_rng(0).integers(0, 128, shape.layout.expert_bytes, dtype=np.uint8)
    for slot in range(slabs.slots):
        slabs.upload(slot, stored)
    slab, buffers = slabs.slabs[0], slabs.buffers[0]
    copy_gbps = copy_rate(device, slab.slots * shape.layout.slot_bytes)
    matrix = hidden * inner // 32 * 17  # bytes
    up, down = slabs.pipelines(slab, buffers)
    for count in sorted({1, slab.slots}):
        view(slabs.table)[0] = count
        view(slabs.table)[2 : 2 + 2 * count] = [word for slot in range(count) for word in (slot, 0)]
        for name, size, program in (
            ("expert_gate_up_mxfp4", 2 * matrix, Program(device).dispatch(up, [buffers.act])),
            ("expert_down_mxfp4", matrix, Program(device).dispatch(down, [buffers.y])),
        ):
            yield DeviceResult(name, count, timed(program), count * size, copy_gbps)
    device.close()


def copy_rate(device: Device, nbytes: int) -> float:
    """GB/s that a copying kernel moves, read and written, between two buffers of the device's own."""
    from mimo_vk.vulkan.device import Program
    from mimo_vk.vulkan.expert_slabs import COPY_GROUPS
    from mimo_vk.vulkan.kernels import COPY

    words = nbytes // 2 // 16 * 4
    place, source, target = device.host(4, np.uint32), device.storage(words), device.storage(words)
    groups = (16 * COPY_GROUPS, 1, 1)
    pipeline = device.pipeline(COPY, [place, source, target], groups, {"count": words // 4})
    return 2 * 4 * words / timed(Program(device).dispatch(pipeline, [target])) / 1e9


def timed(program: Program) -> float:
    """Median seconds of a run, after one that isn't counted."""
    program.run()
    seconds: list[float] = []
    while not seconds or sum(seconds) < SHORTEST or (len(seconds) < FEWEST and sum(seconds) < LONGEST):
        began = time.perf_counter()
        program.run()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
