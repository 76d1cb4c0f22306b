"""One MoE step with the device and the CPU side by side, against each of them alone: is it the larger or the sum?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from mimo_vk.formats import Expert
from mimo_vk.ops import Ops
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.client import DeviceClient
from mimo_vk.vulkan.listing import DeviceInfo

REPEAT = 9
MOST = 64  # experts on the CPU's side


@dataclass(frozen=True)
class Overlap:
    """Median seconds of a step of one row: ``cold`` experts on the CPU, ``held`` on the device, both at once."""

    cold: int
    held: int
    cpu: float
    device: float
    together: float

    def line(self) -> str:
        """For a person."""
        cpu, device, both = (1e3 * seconds for seconds in (self.cpu, self.device, self.together))
        return (
            f"one row: {self.cold} experts on the CPU {cpu:.1f} ms, {self.held} on the device {device:.1f} ms, "
            f"side by side {both:.1f} ms (the larger {max(cpu, device):.1f}, the sum {cpu + device:.1f})"
        )


def measure(info: DeviceInfo, ops: Ops, experts: Sequence[Expert]) -> Overlap:
    """``experts`` are all held by the device; the CPU gets as many (of the same, again) as take it about as long.

    Errors: TierGone.
    """
    inner, hidden = experts[0].gate.shape
    shape = TierShape(hidden, inner, top_k=len(experts), max_rows=1, staging=len(experts))
    x = np.random.default_rng(5).standard_normal((1, hidden), dtype=np.float32)
    pairs = np.array([(slot, 0) for slot in range(len(experts))], np.uint32)
    with DeviceClient(info, shape, len(experts)) as client:
        held = client.wait_ready()
        for slot, expert in enumerate(experts[:held]):
            client.upload(expert, slot)

        def on_device() -> None:
            client.start_step(x, pairs[:held])
            client.finish_step(held)

        def on_cpu(count: int = 1) -> None:
            many = [experts[i % len(experts)] for i in range(count)]
            expert_of = np.arange(count, dtype=np.int32)
            act = ops.expert_gate_up(many, expert_of, np.zeros(count, np.int32), x)
            ops.expert_down(many, expert_of, act)

        cold = int(min(MOST, max(1, timed(on_device) / timed(on_cpu))))

        def together() -> None:
            client.start_step(x, pairs[:held])
            on_cpu(cold)
            client.finish_step(held)

        return Overlap(cold, held, timed(lambda: on_cpu(cold)), timed(on_device), timed(together))


def timed(work: Callable[[], None]) -> float:
    """Median seconds, after one run that isn't counted."""
    work()
    seconds = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
