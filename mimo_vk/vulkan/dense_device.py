"""The program's side of the layers that live on the device: sending the weights, running blocks, saving rings.

The device process does what it is told in order, so a block's steps are collected until a result is needed, and then go
in one message. A TierGone from here means that the device is lost; ``lost`` says so once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, DenseMatrix, MatrixBF16, MatrixF32, MatrixFP8, MatrixInt8
from mimo_vk.stats import Stats
from mimo_vk.vision_weights import BiasedMatrix, VisionBlock, VisionWeights
from mimo_vk.vulkan.arena import BULK_WORDS, HEAD_ROWS, DenseArena
from mimo_vk.vulkan.client import DeviceClient, TierGone
from mimo_vk.vulkan.dense_layout import (
    BiasedPlace,
    DenseLayout,
    MatrixPlace,
    Place,
    TowerBlockPlace,
    TowerPlace,
    TowerShape,
)  # fmt: skip
from mimo_vk.weight_check import Progress
from mimo_vk.weights import LayerWeights, Weights

Words = NDArray[np.uint32]


class SavedRings:
    """A copy of the device layers' rings that the device keeps, until its slot is wanted for another."""

    def __init__(self, slot: int, length: int) -> None:
        self.slot = slot
        self.length = length
        self.valid = True


class DenseDevice:
    """The layers on the device, and the head where it is there too. After ``gone`` there are none."""

    def __init__(self, client: DeviceClient, layout: DenseLayout) -> None:
        assert client.dense_arena is not None
        self.client = client
        self.arena: DenseArena = client.dense_arena
        self.layers = frozenset(layout.layers)
        self.has_head = layout.head is not None
        self.tower: TowerShape | None = layout.shape.tower
        self.max_rows = layout.shape.max_rows
        self.seconds = 0.0  # waited for layers; the head's are the engine's to count
        self.holder: object | None = None  # the cache whose rows the device has
        self._layout = layout
        self._saves: list[weakref.ref[SavedRings] | None] = [None] * layout.shape.saves
        self._oldest = 0

    @property
    def gone(self) -> bool:
        """Whether the device is lost, or closed."""
        return bool(self.client.gone)

    def lost(self, error: TierGone) -> None:
        """The device can't be used any more."""
        self.client.drop(error)

    def close(self) -> None:
        """End the device process."""
        self.client.close()

    def count(self, stats: Stats) -> None:
        """Write what there is, and the time that it took, into the engine's counters."""
        stats.device_layers = 0 if self.gone else len(self.layers)
        stats.device_head = self.has_head and not self.gone
        stats.parts["layers"] = self.seconds

    def send(self, weights: Weights, progress: Progress | None = None) -> None:
        """Send the weights of the device's layers. Errors: TierGone."""
        total = 4 * sum(sum(self._layout.slabs[kind]) for kind in ("W", "S"))
        done = half = 0
        for place, at, piece in pieces(self._layout, weights):
            self.client.answer("fill", left=1)  # the half that comes next is free once the message before the last is
            self.arena.bulk[half, : piece.size] = piece.ravel()
            self.client.ask("fill", place.kind, place.slab, place.at + at, piece.size, half)
            half = 1 - half
            done += piece.nbytes
            if progress is not None:
                progress("sending the dense weights to the device", min(done, total), total)
        self.client.answer("fill")

    def take(self, cache: object) -> None:
        """The next block's rows are this cache's: what is there, or saved, of another is of no use any more."""
        self.holder = cache
        for reference in self._saves:
            saved = reference and reference()
            if saved:
                saved.valid = False
        self._saves = [None] * len(self._saves)

    def save(self, length: int) -> SavedRings | None:
        """Keep a copy of the rings of a state of ``length`` rows; None where there is no room, or no device."""
        slot = self._free_slot()
        saved = SavedRings(slot, length)
        try:
            self.client.ask("save", slot, length)
            if self.client.answer("save") != [True]:
                return None
        except TierGone as error:
            self.lost(error)
            return None
        self._saves[slot] = weakref.ref(saved)
        return saved

    def _free_slot(self) -> int:
        for slot, reference in enumerate(self._saves):
            if reference is None or reference() is None:
                return slot
        slot, self._oldest = self._oldest, (self._oldest + 1) % len(self._saves)
        reference = self._saves[slot]
        saved = reference and reference()
        if saved:
            saved.valid = False
        return slot

    def restore(self, saved: SavedRings) -> None:
        """Make a copy the rings again."""
        assert saved.valid
        try:
            self.client.ask("restore", saved.slot, saved.length)
        except TierGone as error:
            self.lost(error)

    def block(self, start: int, rows: int) -> Block:
        """Begin a block of ``rows`` rows from position ``start`` on. Errors: TierGone."""
        return Block(self, start, rows)

    def logits(self, h: F32) -> F32:
        """Hidden rows [n, H] to raw logits [n, vocab]. Errors: TierGone."""
        out = np.empty((len(h), self._layout.shape.vocab), np.float32)
        for first in range(0, len(h), HEAD_ROWS):
            rows = h[first : first + HEAD_ROWS]
            self.arena.h[: len(rows)] = rows
            self.client.ask("head", len(rows))
            self.client.answer("head")
            out[first : first + len(rows)] = self.arena.logits[: len(rows)]
        return out

    def wait(self) -> None:
        """Wait for all blocks' answers, and count the time. Errors: TierGone."""
        began = time.perf_counter()
        self.client.answer("layers")
        self.seconds += time.perf_counter() - began


class Block:
    """One block's way through the device's layers. Layers come in their order; the residual stays on the device."""

    def __init__(self, device: DenseDevice, start: int, rows: int) -> None:
        if device.client.pending("layers"):  # of a block that was given up: its results must not come over this one's
            device.client.ask("layers", rows, start, [])  # an interrupt may have lost its answer, but not this one's
            device.wait()
        self._device = device
        self._start = start
        self._rows = rows
        self._steps: list[list[Any]] = []

    def enter(self, h: F32) -> None:
        """Bring the residual [rows, H] to the device."""
        self._device.arena.h[: self._rows] = h
        self._steps.append(["enter"])

    def layer(self, index: int) -> None:
        """Attention of a layer, and what follows up to the experts: all of a layer with a dense MLP."""
        self._steps.append(["layer", index])

    def for_experts(self) -> tuple[F32, F32]:
        """The normed rows [rows, H] and the router's logits [rows, experts] of the layer begun last."""
        self._flush()
        arena = self._device.arena
        return arena.x[: self._rows].copy(), arena.scores[: self._rows].copy()

    def add(self, index: int, y: F32) -> None:
        """End a layer with experts: the residual plus what they gave, [rows, H]."""
        self._device.arena.y[: self._rows] = y
        self._steps.append(["add", index])

    def leave(self) -> F32:
        """The residual [rows, H]."""
        self._steps.append(["leave"])
        self._flush()
        return self._device.arena.h[: self._rows].copy()

    def _flush(self) -> None:
        self._device.client.ask("layers", self._rows, self._start, self._steps)
        self._steps = []
        self._device.wait()


def pieces(layout: DenseLayout, weights: Weights) -> Iterator[tuple[Place, int, Words]]:
    """Every word that the device's slabs begin with: a place, a word in it, and the words from there on, [n] or [n, m].

    Each piece is at most BULK_WORDS.
    """
    for index, place in layout.layers.items():
        layer = weights.layers[index]
        yield place.input_norm, 0, layer.input_norm.view(np.uint32)
        yield place.post_norm, 0, layer.post_attention_norm.view(np.uint32)
        if place.sink is not None and layer.attention.sink is not None:
            yield place.sink, 0, layer.attention.sink.view(np.uint32)
        for at, matrix in matrices(layout, index, layer):
            yield from matrix_pieces(at, matrix)
    if layout.head is not None:
        yield layout.head.norm, 0, weights.norm.view(np.uint32)
        yield from matrix_pieces(layout.head.matrix, weights.lm_head)
    if layout.tower is not None:
        assert weights.vision is not None
        yield from tower_pieces(layout.tower, weights.vision)


def tower_pieces(place: TowerPlace, weights: VisionWeights) -> Iterator[tuple[Place, int, Words]]:
    """The picture tower's words."""
    yield from matrix_pieces(place.embed, weights.patch_embed)
    for at, block in zip(place.blocks, weights.blocks, strict=True):
        yield from block_pieces(at, block)
    yield place.norm, 0, weights.merger_norm.view(np.uint32)
    yield from matrix_pieces(place.up, weights.merger_up)
    yield from matrix_pieces(place.down, weights.merger_down)


def block_pieces(place: TowerBlockPlace, block: VisionBlock) -> Iterator[tuple[Place, int, Words]]:
    """A block of the tower's, Q apart from K and V."""
    yield place.norm1, 0, block.norm1.view(np.uint32)
    yield place.norm2, 0, block.norm2.view(np.uint32)
    if place.sinks is not None and block.sinks is not None:
        yield place.sinks, 0, block.sinks.view(np.uint32)
    q_rows, qkv = place.q.matrix.rows, block.qkv
    parts: list[tuple[BiasedPlace, BiasedMatrix]] = [
        (place.q, BiasedMatrix(MatrixBF16(qkv.matrix.data[:q_rows]), qkv.bias[:q_rows])),
        (place.kv, BiasedMatrix(MatrixBF16(qkv.matrix.data[q_rows:]), qkv.bias[q_rows:])),
        (place.proj, block.proj), (place.gate, block.gate), (place.up, block.up), (place.down, block.down),
    ]  # fmt: skip
    for at, part in parts:
        assert (at.matrix.rows, at.matrix.columns) == part.matrix.shape, at
        yield from matrix_pieces(at.matrix, part.matrix)
        yield at.bias, 0, part.bias.view(np.uint32)


def matrices(layout: DenseLayout, index: int, layer: LayerWeights) -> Iterator[tuple[MatrixPlace, DenseMatrix]]:
    """A layer's matrices with their places."""
    place = layout.layers[index]
    found: list[tuple[MatrixPlace | None, DenseMatrix]] = [
        (place.qkv, layer.attention.qkv_proj), (place.o_proj, layer.attention.o_proj),
    ]  # fmt: skip
    if layer.router is not None:
        found.append((place.router, layer.router.gate))
    if layer.mlp is not None:
        found += [(place.gate, layer.mlp.gate), (place.up, layer.mlp.up), (place.down, layer.mlp.down)]
    for at, matrix in found:
        assert at is not None and at.format == format_of(matrix) and (at.rows, at.columns) == matrix.shape, at
        yield at, matrix


def format_of(matrix: DenseMatrix) -> str:
    """The name by which the layout knows a format."""
    return {MatrixF32: "f32", MatrixBF16: "bf16", MatrixInt8: "int8", MatrixFP8: "fp8"}[type(matrix)]


def matrix_pieces(place: MatrixPlace, matrix: DenseMatrix) -> Iterator[tuple[Place, int, Words]]:
    """A matrix's rows, each padded with zeros to whole uvec4, and its scales."""
    codes = matrix.data if isinstance(matrix, MatrixF32 | MatrixBF16) else matrix.codes
    row_words = 4 * place.items
    step = max(1, BULK_WORDS // row_words)
    for part in place.parts:
        for first in range(0, part.rows, step):
            count = min(step, part.rows - first)
            rows = codes[part.first + first : part.first + first + count]
            yield part.place, first * row_words, padded_words(rows, row_words)
        if part.scales is not None:
            assert isinstance(matrix, MatrixFP8 | MatrixInt8)
            yield part.scales, 0, scale_words(matrix, part.first, part.rows)


def padded_words(rows: NDArray[Any], row_words: int) -> Words:
    """Stored rows as words, zeros behind each: [n, row_words]; a view where nothing is missing."""
    stored = rows.view(np.uint8)
    if stored.shape[1] != 4 * row_words:
        padded = np.zeros((len(rows), 4 * row_words), np.uint8)
        padded[:, : stored.shape[1]] = stored
        stored = padded
    return stored.view(np.uint32)


def scale_words(matrix: MatrixFP8 | MatrixInt8, first: int, rows: int) -> Words:
    """What the products of some rows read beside the codes."""
    if isinstance(matrix, MatrixInt8):
        return matrix.scales[first : first + rows].view(np.uint32)
    scale_row = matrix.scale_row[first : first + rows].astype(np.uint32)
    return np.concatenate([scale_row, matrix.scales.view(np.uint32).ravel()])
