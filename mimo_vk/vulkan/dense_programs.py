"""The dense layers as recorded programs: for each layer two halves, in one size for each class of block.

The first half goes from the residual ``h0`` through attention to ``h1`` and on to the router's scores; the second adds
the feed-forward to ``h1``, which gives the next layer's ``h0``, and appends the block's keys and values to the cache.
So a cache is only read in the one and only written in the other, and no tensor is written twice in a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mimo_vk.vulkan.dense_layout import DenseLayout, DenseShape, LayerPlace, MatrixPlace, Part, Place, row_width
from mimo_vk.vulkan.dense_slabs import DenseSlabs
from mimo_vk.vulkan.device import Device, Pipeline, Program
from mimo_vk.vulkan.kernels import (
    ADD,
    ATTENTION,
    ATTENTION_JOIN,
    ATTENTION_MAX,
    ATTENTION_PART,
    KV_APPEND,
    LINEAR_BF16,
    LINEAR_F32,
    LINEAR_FP8,
    LINEAR_INT8,
    RMS_NORM,
    SPLIT_ROPE,
    SWIGLU,
    Kernel,
)

LINEAR = {"f32": LINEAR_F32, "bf16": LINEAR_BF16, "int8": LINEAR_INT8, "fp8": LINEAR_FP8}
OCTETS = 8  # rows of a matrix that a group of a linear kernel takes at a time, for each of its OUTPUTS
TILES = {1: (1, 2)}  # rows of x and of the matrix that an octet takes, by the rows of the class
MANY = (4, 4)  # in all larger classes
MOST_GROUPS = 32768
PARTS = 8  # groups of the attention kernels that share a group's work


def bits(value: float) -> int:
    """A float32's bits, for a push constant."""
    return int(np.float32(value).view(np.uint32))


class Pipelines:
    """Pipelines by what they are bound to, so that layers share them."""

    def __init__(self, device: Device, select_decode: int) -> None:
        self._device = device
        self._select_decode = select_decode
        self._made: dict[tuple[Any, ...], Pipeline] = {}

    def get(
        self, kernel: Kernel, tensors: Sequence[Any], groups: tuple[int, int], push: dict[str, int], depth: int = 1,
        **constants: int,
    ) -> tuple[Pipeline, dict[str, int]]:  # fmt: skip
        """A part for ``Program.dispatch_parts``. ``depth``: groups in z."""
        key = (kernel.name, *map(id, tensors), groups, depth, *constants.items())
        if key not in self._made:
            if "SELECT_DECODE" in kernel.constants:
                constants["SELECT_DECODE"] = self._select_decode
            self._made[key] = self._device.pipeline(kernel, tensors, (*groups, depth), push, constants)
        return self._made[key], push


class Activations:
    """The tensors of blocks of up to ``rows`` rows, made as they are asked for; what no kernel writes stays zero."""

    def __init__(self, device: Device, rows: int) -> None:
        self.rows = rows
        self._device = device
        self._made: dict[tuple[str, int], Any] = {}

    def get(self, name: str, width: int) -> Any:
        """The tensor of a name for rows of ``width`` floats."""
        if (name, width) not in self._made:
            self._made[name, width] = tensor = self._device.device(self.rows * width)
            self._device.upload([tensor]).eval()
        return self._made[name, width]


class Programs:
    """What the programs of layers and of the picture tower have in common, for blocks of up to ``rows`` rows."""

    def __init__(
        self, device: Device, slabs: DenseSlabs, pipelines: Pipelines, rows: int, hidden: int, eps: float
    ) -> None:
        self._device = device
        self._slabs = slabs
        self._pipelines = pipelines
        self._rows = rows
        self._hidden = hidden
        self._eps = eps
        self.width = row_width(hidden)
        self.activations = Activations(device, rows)
        self._by_row = 1 if device.info.kind == "CPU" else rows  # groups in y
        self._across = 1 if device.info.kind == "CPU" else 64

    def tensor(self, name: str) -> Any:
        """An activation as wide as the residual."""
        return self.activations.get(name, self.width)

    def _run(
        self, program: Program, kernel: Kernel, tensors: Sequence[Any], groups: tuple[int, int], push: dict[str, int],
        writes: Sequence[Any], depth: int = 1, **constants: int,
    ) -> None:  # fmt: skip
        program.dispatch_parts([self._pipelines.get(kernel, tensors, groups, push, depth, **constants)], writes)

    def _norm(self, program: Program, x: Any, weight: Place, y: Any, step: Any = None) -> None:
        push = {
            "width": self._hidden, "stride": self.width, "w_at": weight.at, "eps_bits": bits(self._eps),
            "inverse_width_bits": bits(1 / self._hidden),
        }  # fmt: skip
        tensors = [self._slabs.step if step is None else step, x, self._slabs.at(weight), y]
        self._run(program, RMS_NORM, tensors, (self._by_row, 1), push, [y])

    def _add(self, program: Program, a: Any, b: Any, y: Any) -> None:
        push = {"width": self._hidden, "stride": self.width}
        self._run(program, ADD, [self._slabs.step, a, b, y], (self._across, self._by_row), push, [y])

    def _swiglu(self, program: Program, gate: Any, up: Any, act: Any, columns: int) -> None:
        width = row_width(columns)
        push = {"width": columns, "in_stride": width, "gate_at": 0, "up_at": 0, "y_stride": width}
        self._run(program, SWIGLU, [self._slabs.step, gate, up, act], (self._across, self._by_row), push, [act])

    def _linear(
        self, program: Program, x: Any, x_stride: int, matrix: MatrixPlace, y: Any, y_stride: int, step: Any = None
    ) -> None:
        """y = matrix times rows of x, a dispatch for each part of the matrix."""
        rows, outputs = TILES.get(self._rows, MANY)
        step = self._slabs.step if step is None else step
        parts = []
        for part in matrix.parts:
            scales = [] if part.scales is None else [self._slabs.at(part.scales)]
            tensors = [step, x, self._slabs.at(part.place), *scales, y]
            groups = min(MOST_GROUPS, -(-part.rows // (OCTETS * outputs))), -(-self._by_row // rows)
            push = linear_push(matrix, part, x_stride, y_stride)
            parts.append(self._pipelines.get(LINEAR[matrix.format], tensors, groups, push, ROWS=rows, OUTPUTS=outputs))
        program.dispatch_parts(parts, [y])


class Recorder(Programs):
    """Records the programs of one class of block: 1 row, or up to ``rows``."""

    def __init__(
        self, device: Device, layout: DenseLayout, slabs: DenseSlabs, pipelines: Pipelines, rows: int, y: Any,
        tables: dict[float, Any],
    ) -> None:  # fmt: skip
        """``y`` [rows, hidden's width] is what the experts gave, ``tables`` the cosines and sines by theta."""
        super().__init__(device, slabs, pipelines, rows, layout.shape.hidden, layout.shape.eps)
        self._shape: DenseShape = layout.shape
        self._y = y
        self._tables = tables

    def first_half(self, place: LayerPlace) -> Program:
        """Attention and its residual; the norm after it, and the router's scores where there is a router."""
        program, spec = Program(self._device), place.spec
        h0, x1, o, h1, x2 = (self.tensor(name) for name in ("h0", "x1", "o", "h1", "x2"))
        q_width, k_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        v_width, mixed_width = spec.num_kv_heads * spec.v_head_dim, row_width(spec.num_heads * spec.v_head_dim)
        qkv_width = row_width(q_width + k_width + v_width)
        qkv, mixed = self.activations.get("qkv", qkv_width), self.activations.get("mixed", mixed_width)
        q, k, v = (self.activations.get(*one) for one in (("q", q_width), ("k", k_width), ("v", v_width)))
        self._norm(program, h0, place.input_norm, x1)
        self._linear(program, x1, self.width, place.qkv, qkv, qkv_width)
        self._split(program, place, qkv, qkv_width, [q, k, v])
        self._attention(program, place, [q, k, v], mixed, mixed_width)
        self._linear(program, mixed, mixed_width, place.o_proj, o, self.width)
        self._add(program, h0, o, h1)
        self._norm(program, h1, place.post_norm, x2)
        if place.router is not None:
            width = self.scores_width
            self._linear(program, x2, self.width, place.router, self.activations.get("scores", width), width)
        return program

    @property
    def scores_width(self) -> int:
        return row_width(self._shape.experts)

    def second_half(self, place: LayerPlace) -> Program:
        """The feed-forward's residual, after a dense MLP where there is one; the block's rows into the cache."""
        program = Program(self._device)
        added = self._y if place.router is not None else self._mlp(program, place)
        self._add(program, self.tensor("h1"), added, self.tensor("h0"))
        self._append(program, place)
        return program

    def _mlp(self, program: Program, place: LayerPlace) -> Any:
        assert place.gate is not None and place.up is not None and place.down is not None
        x2, width = self.tensor("x2"), row_width(self._shape.inner)
        gate, up, act = (self.activations.get(name, width) for name in ("gate", "up", "act"))
        self._linear(program, x2, self.width, place.gate, gate, width)
        self._linear(program, x2, self.width, place.up, up, width)
        self._swiglu(program, gate, up, act, self._shape.inner)
        self._linear(program, act, width, place.down, self.tensor("down"), self.width)
        return self.tensor("down")

    def head(self, norm: Place, matrix: MatrixPlace, step: Any) -> Program:
        """The last norm and the logits of the rows in ``hidden``, under a step of its own."""
        program, width = Program(self._device), row_width(self._shape.vocab)
        hidden, normed = self.tensor("hidden"), self.tensor("normed")
        self._norm(program, hidden, norm, normed, step)
        self._linear(program, normed, self.width, matrix, self.activations.get("logits", width), width, step)
        return program

    def _split(self, program: Program, place: LayerPlace, qkv: Any, stride: int, out: list[Any]) -> None:
        spec = place.spec
        push = {
            "stride": stride, "chunks": self._shape.qkv_chunks, "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "v_dim": spec.v_head_dim,
            "turned": self._shape.rope_dim // 2, "value_scale_bits": bits(self._shape.value_scale),
        }  # fmt: skip
        tensors = [self._slabs.step, qkv, self._tables[spec.rope_theta], *out]
        self._run(program, SPLIT_ROPE, tensors, (self._across, self._by_row), push, out)

    def _attention(self, program: Program, place: LayerPlace, qkv: list[Any], out: Any, out_stride: int) -> None:
        spec, cache, sink = place.spec, place.cache, place.sink
        push = {
            "heads": spec.num_heads, "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim,
            "v_dim": spec.v_head_dim, "out_stride": out_stride, "window": spec.window or 0, "cache_rows": cache.rows,
            "keys_at": cache.keys.at, "values_at": cache.values.at, "has_sink": int(sink is not None),
            "sinks_at": 0 if sink is None else sink.at, "scale_bits": bits(spec.head_dim**-0.5),
        }  # fmt: skip
        slab = self._slabs.at(place.input_norm if sink is None else sink)
        if self._rows == 1 and spec.window is None and self._device.info.kind != "CPU":
            self._attention_in_parts(program, place, qkv, slab, out, push)
            return
        tensors = [self._slabs.step, *qkv, self._slabs.at(cache.keys), self._slabs.at(cache.values), slab, out]
        heads = 2 if spec.num_heads // spec.num_kv_heads > 1 else 1
        groups = spec.num_kv_heads * -(-spec.num_heads // spec.num_kv_heads // heads), self._by_row
        steps = -(-spec.head_dim // 32)
        self._run(program, ATTENTION, tensors, groups, push, [out], HEADS=heads, STEPS=steps)

    def _attention_in_parts(
        self, program: Program, place: LayerPlace, qkv: list[Any], slab: Any, out: Any, numbers: dict[str, int]
    ) -> None:
        """The same in three dispatches: one row over all positions has too few groups to fill a device."""
        spec, step = place.spec, self._slabs.step
        keys, values = self._slabs.at(place.cache.keys), self._slabs.at(place.cache.values)
        maxima = self.activations.get("maxima", PARTS * spec.num_heads)
        sums = self.activations.get("sums", PARTS * spec.num_heads * (spec.v_head_dim + 1))
        q, k, v = qkv
        groups, steps = (spec.num_heads, 1), -(-spec.head_dim // 32)
        for kernel, tensors, written in (
            (ATTENTION_MAX, [step, q, k, keys, maxima], maxima),
            (ATTENTION_PART, [step, q, k, v, keys, values, slab, maxima, sums], sums),
        ):
            push = {name: numbers[name] for name in kernel.push}
            self._run(program, kernel, tensors, groups, push, [written], PARTS, HEADS=1, STEPS=steps)
        push = {name: numbers[name] for name in ATTENTION_JOIN.push}
        self._run(program, ATTENTION_JOIN, [step, slab, maxima, sums, out], (self._across, 1), push, [out])

    def _append(self, program: Program, place: LayerPlace) -> None:
        spec, cache = place.spec, place.cache
        k = self.activations.get("k", spec.num_kv_heads * spec.head_dim)
        v = self.activations.get("v", spec.num_kv_heads * spec.v_head_dim)
        keys, values = self._slabs.at(cache.keys), self._slabs.at(cache.values)
        push = {
            "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "v_dim": spec.v_head_dim,
            "cache_rows": cache.rows, "keys_at": cache.keys.at, "values_at": cache.values.at,
        }  # fmt: skip
        tensors = [self._slabs.step, k, v, keys, values]
        self._run(program, KV_APPEND, tensors, (self._across, self._by_row), push, [keys, values])


def linear_push(matrix: MatrixPlace, part: Part, x_stride: int, y_stride: int) -> dict[str, int]:
    """The constants of a product with some rows of a matrix, whose outputs lie together in a row of y."""
    push = {
        "n": part.rows, "items": matrix.items, "x_stride": x_stride, "w_at": part.place.at, "y_stride": y_stride,
        "y_at": part.first,
    }  # fmt: skip
    if part.scales is not None:
        push["s_at"] = part.scales.at
    if matrix.format == "fp8":
        push["blocks"] = matrix.blocks
    return push
