"""The experts that lie on the device, in slabs of slots, and the step that multiplies rows of x with some of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, U8
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.device import Device, DeviceError, Pipeline, Program, view
from mimo_vk.vulkan.device_check import Arithmetic
from mimo_vk.vulkan.kernels import COPY, DOWN, GATE_UP
from mimo_vk.vulkan.layout import ROUND, ROWS

SHARED_SLAB = 256 << 20  # bytes of a slab that the host writes: its memory is taken when it is made
OWN_SLAB = 1 << 30
TRACKS = 8  # groups in y on a device with its own cores: pairs computed side by side
COPY_GROUPS = 256
SMALL_STEP = 64 << 10  # bytes of a step's activations and results that cost less to copy than to compile for twice


class Buffers:
    """The activations and results of steps of up to ``pairs`` pairs. All slabs use them, one after the other."""

    def __init__(self, device: Device, shape: TierShape, pairs: int) -> None:
        self.pairs = pairs
        self.act = device.device(pairs * shape.layout.act_rounds * ROUND)
        self.y = device.device(pairs * shape.hidden)


class Slab:
    """One buffer of ``slots`` slots, and a program over it for each size of step."""

    def __init__(self, tensor: Any, first: int, slots: int) -> None:
        self.tensor = tensor
        self.first = first
        self.slots = slots
        self.programs: list[Program] = []  # in the order of ExpertSlabs' buffers


class ExpertSlabs:
    """Slots for experts, added slab by slab up to a limit, and steps over them."""

    def __init__(self, device: Device, shape: TierShape, max_slots: int, arithmetic: Arithmetic) -> None:
        self._device = device
        self._shape = shape
        self._layout = shape.layout
        self._max_slots = max_slots
        self._constants = {
            "SELECT_DECODE": arithmetic.select_decode,
            "SHARE_LOADS": int(device.info.subgroup_size >= 8),
            "FLUSHES": int(arithmetic.flushes),
        }
        self._host = device.info.shares_memory  # slabs that the host writes straight into
        self._tracks = 1 if device.info.kind == "CPU" else TRACKS
        words = shape.max_rows * self._layout.rounds * ROUND
        self.table = device.host(2 + 2 * shape.max_pairs, np.uint32)
        self._x = device.host(words) if self._host else device.device(words)
        self._send_x = None if self._host else device.upload([self._x])
        self.buffers = [Buffers(device, shape, pairs) for pairs in self._step_sizes()]
        self.slabs: list[Slab] = []
        if not self._host:
            self._staging = device.host(self._layout.slot_bytes // 4, np.uint32)
            self._place = device.host(4, np.uint32)
            self._copies: list[Program] = []

    def _step_sizes(self) -> list[int]:
        """Pairs that programs are made for: a row's, and as many as there may be. A step copies its whole size."""
        shape = self._shape
        largest = 4 * shape.max_pairs * (self._layout.act_rounds * ROUND + shape.hidden)
        return sorted({shape.max_pairs} if largest <= SMALL_STEP else {shape.top_k, shape.max_pairs})

    @property
    def slots(self) -> int:
        """Slots that there are so far."""
        return sum(slab.slots for slab in self.slabs)

    def grow(self) -> int:
        """Add a slab, a smaller one where a whole one doesn't fit; returns how many slots there are then."""
        slot_bytes = self._layout.slot_bytes
        most = min(self._device.max_bytes, SHARED_SLAB if self._host else OWN_SLAB)
        count = min(self._max_slots - self.slots, max(1, most // slot_bytes))
        while count and not self._device.fits(count * slot_bytes, self._host):
            count //= 2
        if count:
            self._add(count)
        return self.slots

    def _add(self, count: int) -> None:
        words = count * self._layout.slot_bytes // 4
        make = self._device.host if self._host else self._device.storage
        slab = Slab(make(words, np.uint32), self.slots, count)
        slab.programs = [self._program(slab, buffers) for buffers in self.buffers]
        if not self._host:
            pipeline = self._device.pipeline(
                COPY, [self._place, self._staging, slab.tensor], (COPY_GROUPS, 1, 1),
                {"count": self._layout.slot_bytes // 16},
            )  # fmt: skip
            self._copies.append(Program(self._device).dispatch(pipeline, [slab.tensor]))
        self.slabs.append(slab)

    def _program(self, slab: Slab, buffers: Buffers) -> Program:
        up, down = self.pipelines(slab, buffers)
        return Program(self._device).dispatch(up, [buffers.act]).dispatch(down, [buffers.y])

    def pipelines(self, slab: Slab, buffers: Buffers) -> tuple[Pipeline, Pipeline]:
        """Gate and up with SwiGLU into ``buffers.act``; down from there into ``buffers.y``."""
        layout, tracks = self._layout, min(self._tracks, buffers.pairs)
        weights = [slab.tensor, slab.tensor]
        up = self._device.pipeline(
            GATE_UP,
            [self.table, self._x, *weights, buffers.act],
            (layout.act_rounds * ROUND // ROWS // GATE_UP.local_size, tracks, 1),
            layout.gate_up_push(),
            self._constants,
        )
        down = self._device.pipeline(
            DOWN,
            [self.table, buffers.act, *weights, buffers.y],
            (-(-layout.hidden // ROWS // DOWN.local_size), tracks, 1),
            layout.down_push(),
            self._constants,
        )
        return up, down

    def upload(self, slot: int, stored: U8) -> None:
        """Put an expert, as ``SlotLayout.store`` wrote it, into a slot."""
        index, at = self._find(slot)
        expert, size = self._layout.parts(stored), self._layout.slot_bytes
        if self._host:
            self._layout.pack(expert, view(self.slabs[index].tensor).view(np.uint8)[at * size : (at + 1) * size])
            return
        self._layout.pack(expert, view(self._staging).view(np.uint8))
        view(self._place)[0] = at * size // 16
        self._copies[index].run()

    def _find(self, slot: int) -> tuple[int, int]:
        for index, slab in enumerate(self.slabs):
            if slab.first <= slot < slab.first + slab.slots:
                return index, slot - slab.first
        raise DeviceError(f"slot {slot} of {self.slots}")

    def step(self, x: F32, pairs: NDArray[np.uint32], y: F32) -> None:
        """y[p] = expert in slot pairs[p, 0] of row pairs[p, 1] of x (in the shaders' order); slots non-decreasing."""
        if len(pairs) and int(pairs[:, 1].max()) >= len(x):
            raise DeviceError(f"a pair's row {int(pairs[:, 1].max())} of {len(x)}")
        view(self._x)[: x.size] = x.ravel()
        if self._send_x is not None:
            self._send_x.eval()
        which = next(i for i, buffers in enumerate(self.buffers) if len(pairs) <= buffers.pairs)
        buffers, hidden = self.buffers[which], self._shape.hidden
        for slab, first, last in self._by_slab(pairs):
            count = last - first
            table = view(self.table)
            table[0] = count
            table[2 : 2 + 2 * count] = (pairs[first:last] - np.array([slab.first, 0], np.uint32)).ravel()
            slab.programs[which].run()
            y[first:last] = view(buffers.y)[: count * hidden].reshape(count, hidden)

    def warm_up(self) -> None:
        """Run each program once without a pair: drivers compile at the first run."""
        view(self.table)[0] = 0
        for slab in self.slabs:
            for program in slab.programs:
                program.run()

    def _by_slab(self, pairs: NDArray[np.uint32]) -> Iterator[tuple[Slab, int, int]]:
        slots = pairs[:, 0]
        first = 0
        for slab in self.slabs:
            last = int(np.searchsorted(slots, slab.first + slab.slots))
            if first < last:
                yield slab, first, last
            first = last
        if first < len(pairs):
            raise DeviceError(f"slot {int(slots[-1])} of {self.slots}")
