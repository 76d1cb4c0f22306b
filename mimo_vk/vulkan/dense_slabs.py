"""The device's buffers for dense layers: slabs of weights, filled piece by piece, slabs of cached rows, saved rings."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_vk.vulkan.arena import BULK_WORDS
from mimo_vk.vulkan.dense_layout import DenseLayout, Place
from mimo_vk.vulkan.device import Device, DeviceError, Program, view
from mimo_vk.vulkan.kernels import COPY_RING, FILL

FILL_GROUPS = 1024
RING_GROUPS = 256
WEIGHTS = ("W", "S")
ROWS = ("K", "V")


class DenseSlabs:
    """All slabs of a layout. The host writes weights straight into them where memory is shared; rows it never sees."""

    def __init__(self, device: Device, layout: DenseLayout) -> None:
        """Errors: DeviceError where they don't fit; what was made is freed."""
        self._device = device
        self._layout = layout
        self._host = device.info.shares_memory
        self.tensors: dict[str, list[Any]] = {kind: [] for kind in layout.slabs}
        self._saved: dict[tuple[int, str, int], Any] = {}  # slot, kind and slab: the rings that were saved
        self._programs: dict[tuple[str, int], list[Program]] = {}
        try:
            for kind, sizes in layout.slabs.items():
                for words in sizes:
                    self.tensors[kind].append(self._make(kind, words))
        except DeviceError:
            self._free()
            raise
        self.step = device.host(4, np.uint32)
        if not self._host:
            self._staging = device.host(BULK_WORDS, np.uint32)
            self._place = device.host(4, np.uint32)
            self._fill = {kind: [self._fill_program(tensor) for tensor in self.tensors[kind]] for kind in WEIGHTS}

    def _make(self, kind: str, words: int) -> Any:
        host = kind in WEIGHTS and self._host
        return self._device.host(words, np.uint32) if host else self._device.storage(words)

    def _free(self) -> None:
        for tensors in self.tensors.values():
            for tensor in tensors:
                tensor.destroy()
        self.tensors.clear()

    def at(self, place: Place) -> Any:
        """The tensor that a place lies in."""
        return self.tensors[place.kind][place.slab]

    def _fill_program(self, tensor: Any) -> Program:
        pipeline = self._device.pipeline(FILL, [self._place, self._staging, tensor], (FILL_GROUPS, 1, 1), {})
        return Program(self._device).dispatch(pipeline, [tensor])

    def fill(self, kind: str, slab: int, at: int, words: NDArray[np.uint32]) -> None:
        """Write words of a slab of weights, from ``at`` on; at most BULK_WORDS."""
        if kind not in WEIGHTS or at + len(words) > self._layout.slabs[kind][slab]:
            raise DeviceError(f"words {at} to {at + len(words)} of slab {slab} of {kind}")
        if self._host:
            view(self.tensors[kind][slab])[at : at + len(words)] = words
            return
        view(self._staging)[: len(words)] = words
        view(self._place)[:2] = at, len(words)
        self._fill[kind][slab].run()

    def save(self, slot: int, start: int) -> bool:
        """Copy the rings of a state of ``start`` rows to a slot; False where there is no room for one more."""
        with contextlib.suppress(DeviceError):
            self._copy_rings("save", slot, start)
            return True
        return False

    def restore(self, slot: int, start: int) -> None:
        """The reverse."""
        self._copy_rings("restore", slot, start)

    def _copy_rings(self, way: str, slot: int, start: int) -> None:
        if (way, slot) not in self._programs:
            self._programs[way, slot] = self._ring_programs(way, slot)
        view(self.step)[:] = 0, start, 0, 0
        for program in self._programs[way, slot]:
            program.run()

    def _ring_programs(self, way: str, slot: int) -> list[Program]:
        return [
            self._ring_program(way, slot, kind, slab)
            for kind in ROWS
            for slab in range(len(self.tensors[kind]))
            if self._rings(kind, slab)
        ]

    def _rings(self, kind: str, slab: int) -> list[dict[str, int]]:
        """The rings that lie in a slab: what copy_ring needs, from the ring to where it is saved."""
        found, at = [], 0
        for layer in self._layout.layers.values():
            spec, cache = layer.spec, layer.cache
            place, width = (cache.keys, spec.head_dim) if kind == "K" else (cache.values, spec.v_head_dim)
            if spec.window is None or place.slab != slab:
                continue
            found.append(
                {"kv_heads": spec.num_kv_heads, "width": width, "window": spec.window, "from_rows": cache.rows,
                 "from_at": place.at, "to_rows": spec.window, "to_at": at}
            )  # fmt: skip
            at += spec.num_kv_heads * spec.window * width
        return found

    def _ring_program(self, way: str, slot: int, kind: str, slab: int) -> Program:
        rings, tensor = self._rings(kind, slab), self.tensors[kind][slab]
        if (slot, kind, slab) not in self._saved:
            last = rings[-1]
            words = last["to_at"] + last["kv_heads"] * last["to_rows"] * last["width"]
            self._saved[slot, kind, slab] = self._device.storage(words)
        ends = [tensor, self._saved[slot, kind, slab]]
        if way == "restore":
            ends.reverse()
            rings = [reverse(ring) for ring in rings]
        pipeline = self._device.pipeline(COPY_RING, [self.step, *ends], (1, RING_GROUPS, 1), rings[0])
        return Program(self._device).dispatch_parts([(pipeline, ring) for ring in rings], [ends[1]])


def reverse(ring: dict[str, int]) -> dict[str, int]:
    """The constants of the way back."""
    swapped = {"from_rows": "to_rows", "from_at": "to_at", "to_rows": "from_rows", "to_at": "from_at"}
    return {name: ring[swapped.get(name, name)] for name in ring}
