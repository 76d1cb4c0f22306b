"""MoE steps with the device and the CPU side by side, against each of them alone: is it the larger or the sum?

A CPU driver (Lavapipe) gets one thread, as the CPU's side should have then: on shared cores nothing could overlap.
"""

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
ONE_THREAD = ("env", "LP_NUM_THREADS=1")


@dataclass(frozen=True)
class Trace:
    """When each side began and ended one step, in seconds from its start, on one clock that both processes read."""

    cpu: tuple[float, float]
    device: tuple[float, float]

    @property
    def both(self) -> float:
        """Seconds in which both sides were at work."""
        return max(0.0, min(self.cpu[1], self.device[1]) - max(self.cpu[0], self.device[0]))


@dataclass(frozen=True)
class Overlap:
    """Median seconds of a step of one row: ``cold`` experts on the CPU, ``held`` on the device, both at once."""

    cold: int
    held: int
    cpu: float
    device: float
    together: float
    trace: Trace  # of the run that took the median time

    def lines(self) -> list[str]:
        """For a person."""
        cpu, device, both = (1e3 * seconds for seconds in (self.cpu, self.device, self.together))
        sides = [(name, *(1e3 * at for at in side)) for name, side in vars(self.trace).items()]
        trace = "; ".join(f"{name} at work from {first:.1f} to {last:.1f} ms" for name, first, last in sides)
        return [
            f"one row: {self.cold} experts on the CPU {cpu:.1f} ms, {self.held} on the device {device:.1f} ms, "
            f"side by side {both:.1f} ms (the larger {max(cpu, device):.1f}, the sum {cpu + device:.1f})",
            f"  trace: {trace}; both for {1e3 * self.trace.both:.1f} ms",
        ]


def measure(info: DeviceInfo, ops: Ops, experts: Sequence[Expert]) -> list[Overlap]:
    """Half of ``experts`` on the device and half on the CPU; then as many on the CPU (the same, again) as take as long.

    Errors: TierGone.
    """
    inner, hidden = experts[0].gate.shape
    count = len(experts) // 2
    shape = TierShape(hidden, inner, top_k=count, max_rows=1, staging=count)
    with DeviceClient(info, shape, count, launcher=ONE_THREAD if info.kind == "CPU" else ()) as client:
        count = min(count, client.wait_ready())
        for slot, expert in enumerate(experts[:count]):
            client.upload(expert, slot)
        step = _Step(client, ops, experts[count:], count)
        balanced = int(min(MOST, max(1, step.device_alone() / step.cpu_alone(1))))
        return [step.overlap(cold) for cold in (len(experts) - count, balanced)]


class _Step:
    """A step of one row on either side, or on both."""

    def __init__(self, client: DeviceClient, ops: Ops, experts: Sequence[Expert], held: int) -> None:
        self._client, self._ops, self._experts, self._held = client, ops, experts, held
        hidden = experts[0].down.shape[0]
        self._x = np.random.default_rng(5).standard_normal((1, hidden), dtype=np.float32)
        self._pairs = np.array([(slot, 0) for slot in range(held)], np.uint32)

    def overlap(self, cold: int) -> Overlap:
        alone = self.cpu_alone(cold), self.device_alone()
        self._together(cold)
        runs = sorted((self._together(cold) for _ in range(REPEAT)), key=lambda run: run[0])
        seconds, trace = runs[REPEAT // 2]
        return Overlap(cold, self._held, *alone, seconds, trace)

    def device_alone(self) -> float:
        def run() -> None:
            self._client.start_step(self._x, self._pairs)
            self._client.finish_step(self._held)

        return timed(run)

    def cpu_alone(self, count: int) -> float:
        return timed(lambda: self._on_cpu(count))

    def _on_cpu(self, count: int) -> None:
        many = [self._experts[i % len(self._experts)] for i in range(count)]
        expert_of = np.arange(count, dtype=np.int32)
        act = self._ops.expert_gate_up(many, expert_of, np.zeros(count, np.int32), self._x)
        self._ops.expert_down(many, expert_of, act)

    def _together(self, cold: int) -> tuple[float, Trace]:
        began = time.monotonic()
        self._client.start_step(self._x, self._pairs)
        first = time.monotonic()
        self._on_cpu(cold)
        last = time.monotonic()
        self._client.finish_step(self._held)
        seconds = time.monotonic() - began
        device = self._client.last_step
        return seconds, Trace((first - began, last - began), (device[0] - began, device[1] - began))


def timed(work: Callable[[], None]) -> float:
    """Median seconds, after one run that isn't counted."""
    work()
    seconds = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
