"""The dense layers of a model in the device process: made as far as they fit, filled, and run block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mimo_vk.formats import F32
from mimo_vk.rope import RopeTable
from mimo_vk.vulkan.arena import HEAD_ROWS, DenseArena
from mimo_vk.vulkan.dense_layout import DenseLayout, DenseShape, row_width
from mimo_vk.vulkan.dense_programs import Pipelines, Recorder
from mimo_vk.vulkan.dense_slabs import DenseSlabs
from mimo_vk.vulkan.dense_tower import DeviceTower
from mimo_vk.vulkan.device import Device, DeviceError, Program, view

CLASSES = (1, 16)  # rows of a block that there are programs for, beside the largest


@dataclass
class BlockClass:
    """The programs for blocks of up to ``rows`` rows: two halves of each layer, and the host's ends of them."""

    rows: int
    halves: dict[int, tuple[Program, Program]]
    h0: Any
    x2: Any
    scores: Any
    send: Any  # h0 to the device


@dataclass
class HeadClass:
    """The last norm and the head for up to ``rows`` hidden rows, which the host sends."""

    rows: int
    program: Program
    step: Any
    hidden: Any
    logits: Any
    send: Any  # hidden to the device


class DenseLayers:
    """The layers of ``shape`` that fitted; see ``messages`` for what can be asked of them."""

    def __init__(self, device: Device, shape: DenseShape, arena: DenseArena, select_decode: int) -> None:
        self._device = device
        self._arena = arena
        self._layout, self._slabs = fitting(device, shape)
        self.shape = shape = self._layout.shape
        self._width = row_width(shape.hidden)
        self._y = device.host(shape.max_rows * self._width)
        self._ropes = {spec.rope_theta: RopeTable(spec.rope_theta, shape.rope_dim) for spec in shape.layers}
        self._tables = {theta: device.host(shape.max_rows * shape.rope_dim) for theta in self._ropes}
        self._pipelines = Pipelines(device, select_decode)
        sizes = sorted({*(rows for rows in CLASSES if rows < shape.max_rows), shape.max_rows})
        self._classes = [self._class(rows) for rows in sizes] if shape.layers else []
        self._heads = [self._head(rows) for rows in (1, HEAD_ROWS)] if shape.head else []
        self.tower = None
        if self._layout.tower is not None:
            self.tower = DeviceTower(device, self._layout, self._slabs, self._pipelines, arena)
        self.warm_up()

    @property
    def held(self) -> list[Any]:
        """The layers that are here, and whether the head is, and the tower."""
        return [list(self._layout.layers), self._layout.head is not None, self._layout.tower is not None]

    def _class(self, rows: int) -> BlockClass:
        recorder = Recorder(self._device, self._layout, self._slabs, self._pipelines, rows, self._y, self._tables)
        halves = {
            index: (recorder.first_half(place), recorder.second_half(place))
            for index, place in self._layout.layers.items()
        }
        h0, x2 = recorder.tensor("h0"), recorder.tensor("x2")
        scores = recorder.activations.get("scores", recorder.scores_width)
        return BlockClass(rows, halves, h0, x2, scores, self._device.upload([h0]))

    def _head(self, rows: int) -> HeadClass:
        assert self._layout.head is not None
        recorder = Recorder(self._device, self._layout, self._slabs, self._pipelines, rows, self._y, {})
        step, hidden = self._device.host(4, np.uint32), recorder.tensor("hidden")
        program = recorder.head(self._layout.head.norm, self._layout.head.matrix, step)
        logits = recorder.activations.get("logits", row_width(self.shape.vocab))
        return HeadClass(rows, program, step, hidden, logits, self._device.upload([hidden]))

    def warm_up(self) -> None:
        """Run each program once without a row: drivers compile at the first run. The tower's waits for a picture."""
        view(self._slabs.step)[:] = 0
        for block in self._classes:
            for halves in block.halves.values():
                for program in halves:
                    program.run()
        for head in self._heads:
            head.program.run()

    def fill(self, kind: str, slab: int, at: int, count: int, half: int) -> None:
        """Take weights from the arena."""
        self._slabs.fill(kind, slab, at, self._arena.bulk[half, :count])

    def save(self, slot: int, length: int) -> bool:
        """Copy the rings of a state of ``length`` rows to a slot; whether there was room for it."""
        return self._slabs.save(slot, length)

    def restore(self, slot: int, length: int) -> None:
        """The reverse."""
        self._slabs.restore(slot, length)

    def run(self, rows: int, start: int, steps: list[list[Any]]) -> None:
        """A block's steps: enter, layer and add by layer, leave."""
        block = next(block for block in self._classes if rows <= block.rows)
        self._begin(rows, start)
        for step in steps:
            match step:
                case ["enter"]:
                    self._put(block.h0, self._arena.h[:rows])
                    block.send.eval()
                case ["layer", index]:
                    self._layer(block, index, rows)
                case ["add", index]:
                    self._put(self._y, self._arena.y[:rows])
                    block.halves[index][1].run()
                case ["leave"]:
                    self._arena.h[:rows] = self._rows(block.h0, rows, self.shape.hidden)
                case _:
                    raise DeviceError(f"unknown step {step}")

    def _begin(self, rows: int, start: int) -> None:
        view(self._slabs.step)[:] = rows, start, 0, 0
        for theta, rope in self._ropes.items():
            tables = np.stack(rope.rows(start, rows), axis=1)
            view(self._tables[theta])[: tables.size] = tables.ravel()

    def _layer(self, block: BlockClass, index: int, rows: int) -> None:
        first, second = block.halves[index]
        first.run()
        if self._layout.layers[index].router is None:
            second.run()
            return
        self._arena.x[:rows] = self._rows(block.x2, rows, self.shape.hidden)
        self._arena.scores[:rows] = self._rows(block.scores, rows, self.shape.experts)

    def _put(self, tensor: Any, values: F32) -> None:
        view(tensor)[: len(values) * self._width].reshape(len(values), -1)[:, : values.shape[1]] = values

    def _rows(self, tensor: Any, rows: int, columns: int) -> F32:
        width = row_width(columns)
        found: F32 = view(tensor)[: rows * width].reshape(rows, width)[:, :columns]
        return found

    def head(self, rows: int) -> None:
        """The logits of the arena's ``h``."""
        head = next(head for head in self._heads if rows <= head.rows)
        view(head.step)[:] = rows, 0, 0, 0
        self._put(head.hidden, self._arena.h[:rows])
        head.send.eval()
        head.program.run()
        self._arena.logits[:rows] = self._rows(head.logits, rows, self.shape.vocab)


def fitting(device: Device, shape: DenseShape) -> tuple[DenseLayout, DenseSlabs]:
    """The slabs of as much as fits: first without the tower, then without the head, then with half the layers, ..."""
    while True:
        layout = DenseLayout(shape)
        try:
            return layout, DenseSlabs(device, layout)
        except DeviceError:
            if not shape.layers and not shape.head:
                raise
        if shape.tower is not None:
            shape = replace(shape, tower=None)
        elif shape.head:
            shape = replace(shape, head=False)
        else:
            shape = replace(shape, layers=shape.layers[: len(shape.layers) // 2])
