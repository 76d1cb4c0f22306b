"""The dense kernels at the release's sizes: what each is bound to, and the bytes that it has to move.

Bytes: weights, scales, cached rows and activations, each read or written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import FP8_BLOCK
from mimo_vk.vulkan.bench_device import DenseSizes
from mimo_vk.vulkan.device import Device, Program, view
from mimo_vk.vulkan.kernels import (
    ADD,
    ATTENTION,
    EMBED,
    KV_APPEND,
    LINEAR_BF16,
    LINEAR_F32,
    LINEAR_FP8,
    LINEAR_INT8,
    RMS_NORM,
    ROUTE,
    SPLIT_ROPE,
    SWIGLU,
    WEIGHTED_SUM,
    Kernel,
)


@dataclass(frozen=True)
class DenseCase:
    """One kernel recorded over ``rows`` rows; running the program moves ``bytes``."""

    name: str
    rows: int
    bytes: int
    program: Program


class DenseBench:
    """Makes the cases one by one; the tensors of one are freed when the next is made."""

    def __init__(self, device: Device, select_decode: int, sizes: DenseSizes) -> None:
        self._device = device
        self._select_decode = select_decode
        self._sizes = sizes
        self._rng = np.random.default_rng(0)
        self._step = device.host(4, np.uint32)
        self._across = 1 if device.info.kind == "CPU" else 64  # groups beside each other in a row

    def cases(self) -> Iterator[DenseCase]:
        """All kernels: one row, as in decoding, and the products and attention with several."""
        sizes = self._sizes
        for rows in (1, sizes.many):
            yield self._linear(LINEAR_FP8, sizes.qkv_width, sizes.hidden, rows)
            yield self._linear(LINEAR_BF16, sizes.hidden, sizes.mixed, rows)
            yield self._linear(LINEAR_INT8, sizes.hidden, sizes.mixed, rows)
            yield self._linear(LINEAR_F32, sizes.hidden, sizes.hidden, rows)
            yield self._attention(rows, 0)
            yield self._attention(rows, sizes.window)
        yield from self._row_kernels()

    def _data(self, values: NDArray[Any]) -> Any:
        """A tensor in the device's memory that holds ``values`` as words."""
        words = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
        tensor = self._device.device(len(words), np.uint32)
        view(tensor)[:] = words
        self._device.upload([tensor]).eval()
        return tensor

    def _floats(self, *shape: int) -> Any:
        return self._data(self._rng.standard_normal(shape, dtype=np.float32))

    def _case(
        self,
        kernel: Kernel,
        name: str,
        rows: int,
        inputs: Sequence[Any],
        outputs: Sequence[int],
        groups: tuple[int, int],
        push: dict[str, int],
        unread: int = 0,
        **constants: int,
    ) -> DenseCase:
        """``name`` goes after the kernel's; ``outputs``: words of each; ``unread``: bytes of inputs left alone."""
        out = [self._device.device(words) for words in outputs]
        pipeline = self._device.pipeline(kernel, [self._step, *inputs, *out], (*groups, 1), push, constants)
        nbytes = 4 * (sum(tensor.size() for tensor in inputs) + sum(outputs)) - unread
        return DenseCase(f"{kernel.name} {name}", rows, nbytes, Program(self._device).dispatch(pipeline, out))

    def _start(self, rows: int, start: int = 0) -> None:
        view(self._step)[:] = [rows, start, 0, 0]

    def _linear(self, kernel: Kernel, n: int, k: int, rows: int) -> DenseCase:
        self._start(rows)
        columns = {LINEAR_F32: 1, LINEAR_BF16: 2}.get(kernel, 4)  # of a word
        push = {"n": n, "items": k // columns // 4, "x_stride": k, "w_at": 0, "y_stride": n, "y_at": 0}
        inputs = [self._floats(rows, k), self._weights(kernel, n, k)]
        tile = {"ROWS": 1, "OUTPUTS": 2} if rows == 1 else {"ROWS": 4, "OUTPUTS": 4}
        blocks = -(-k // FP8_BLOCK)
        if kernel is LINEAR_INT8:
            push |= {"s_at": 0}
            inputs.append(self._floats(n))
        elif kernel is LINEAR_FP8:
            push |= {"s_at": 0, "blocks": blocks}
            grid = self._rng.uniform(1e-4, 2e-4, (-(-n // FP8_BLOCK), blocks)).astype(np.float32)
            scale_rows = (np.arange(n) // FP8_BLOCK).astype(np.uint32)
            inputs.append(self._data(np.concatenate([scale_rows, grid.ravel().view(np.uint32)])))
            tile["SELECT_DECODE"] = self._select_decode
        groups = -(-n // (8 * tile["OUTPUTS"])), -(-rows // tile["ROWS"])
        return self._case(kernel, f"{n}x{k}", rows, inputs, [rows * n], groups, push, **tile)

    def _weights(self, kernel: Kernel, n: int, k: int) -> Any:
        if kernel is LINEAR_F32:
            return self._floats(n, k)
        if kernel is LINEAR_BF16:
            values = self._rng.standard_normal((n, k), dtype=np.float32).view(np.uint32)
            return self._data((values >> 16).astype(np.uint16))
        return self._data(self._rng.integers(0, 0x7F, (n, k), dtype=np.uint8))  # no NaN code of FP8 among them

    def _attention(self, rows: int, window: int) -> DenseCase:
        """The last rows of a context of ``keys`` positions, or of one longer than a window."""
        sizes, kv = self._sizes, self._sizes.kv_heads
        cached = window or sizes.keys
        self._start(rows, sizes.keys - rows)
        push = {
            "heads": sizes.heads, "kv_heads": kv, "head_dim": sizes.head_dim, "v_dim": sizes.v_dim,
            "out_stride": sizes.mixed, "window": window, "cache_rows": cached, "keys_at": 0, "values_at": 0,
            "has_sink": 1, "sinks_at": 0, "scale_bits": bits(sizes.head_dim**-0.5),
        }  # fmt: skip
        own = [self._floats(rows, width) for width in (sizes.q_width, kv * sizes.head_dim, kv * sizes.v_dim)]
        kept = [self._floats(kv, cached, width) for width in (sizes.head_dim, sizes.v_dim)]
        heads = 1 if rows == 1 or sizes.heads == kv else 2
        groups = kv * -(-sizes.heads // kv // heads), rows
        return self._case(
            ATTENTION,
            f"{cached} keys",
            rows,
            [*own, *kept, self._floats(sizes.heads)],
            [rows * sizes.mixed],
            groups,
            push,
            HEADS=heads,
            STEPS=-(-sizes.head_dim // 32),
        )

    def _row_kernels(self) -> Iterator[DenseCase]:
        """What a token takes beside the products, one row each."""
        sizes, groups, hidden = self._sizes, (self._across, 1), self._sizes.hidden
        kv, half, chosen = sizes.kv_heads, sizes.rope_dim // 2, sizes.chosen
        self._start(1)
        push = {
            "width": hidden,
            "stride": hidden,
            "w_at": 0,
            "eps_bits": bits(1e-5),
            "inverse_width_bits": bits(1 / hidden),
        }
        yield self._case(RMS_NORM, f"{hidden}", 1, [self._floats(hidden), self._floats(hidden)], [hidden], (1, 1), push)
        push = {"width": hidden, "stride": hidden}
        yield self._case(ADD, f"{hidden}", 1, [self._floats(hidden), self._floats(hidden)], [hidden], groups, push)
        inner = sizes.inner
        push = {"width": inner, "in_stride": inner, "gate_at": 0, "up_at": 0, "y_stride": inner}
        yield self._case(SWIGLU, f"{inner}", 1, [self._floats(inner), self._floats(inner)], [inner], groups, push)
        push = {"width": hidden, "stride": hidden, "choices": chosen}
        yield self._case(
            WEIGHTED_SUM,
            f"{chosen}x{hidden}",
            1,
            [self._floats(chosen, hidden), self._floats(chosen)],
            [hidden],
            groups,
            push,
        )
        ids, table = self._data(np.array([1], np.uint32)), self._floats(2, hidden // 2)
        push = {"width": hidden, "stride": hidden, "items": hidden // 8, "w_at": 0, "first_id": 0, "count": 2}
        yield self._case(EMBED, f"{hidden}", 1, [ids, table], [hidden], groups, push, unread=2 * hidden)
        push = {
            "stride": sizes.qkv_width, "chunks": kv, "heads": sizes.heads, "kv_heads": kv, "head_dim": sizes.head_dim,
            "v_dim": sizes.v_dim, "turned": half, "value_scale_bits": bits(0.5),
        }  # fmt: skip
        parts = [sizes.q_width, kv * sizes.head_dim, kv * sizes.v_dim]
        yield self._case(
            SPLIT_ROPE,
            f"{sizes.qkv_width}",
            1,
            [self._floats(sizes.qkv_width), self._floats(2, half)],
            parts,
            groups,
            push,
        )
        push = {
            "kv_heads": kv,
            "head_dim": sizes.head_dim,
            "v_dim": sizes.v_dim,
            "cache_rows": 1,
            "keys_at": 0,
            "values_at": 0,
        }
        own = [self._floats(width) for width in parts[1:]]
        yield self._case(KV_APPEND, f"{parts[1] + parts[2]}", 1, own, parts[1:], groups, push)
        experts = sizes.experts
        push = {"experts": experts, "stride": experts, "chosen": chosen, "bias_at": 0, "scaling_bits": bits(1.0)}
        yield self._case(
            ROUTE, f"{experts}", 1, [self._floats(experts), self._floats(experts)], [chosen, chosen], (1, 1), push
        )


def bits(value: float) -> int:
    """A float32's bits, for a push constant."""
    return int(np.float32(value).view(np.uint32))
