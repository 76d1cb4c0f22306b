"""The reference backend: every operation of ``mimo_vk/ops.py`` in vectorised numpy, each rounding spelled out.

It needs nothing but numpy and runs on one thread. Sums never go through numpy's reductions, whose order is its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from cpu_fallback import elementary, reference_attention, reference_linear
from cpu_fallback.elementary import ZERO, reciprocal, rsqrt, sigmoid
from cpu_fallback.reference_linear import LANES, padded, tree
from mimo_vk.formats import F32, Expert, Matrix, MatrixBF16, MatrixMXFP4
from mimo_vk.ops import Ids, Index, QkvLayout, SinkReading

ROUTER_FLOOR = np.float32(1e-20)  # added to the sum of the chosen scores


P = ParamSpec("P")
R = TypeVar("R")


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Infinities and NaN flow through without warnings. A fresh context per call, as one is not reentrant."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return wrapped


class ReferenceOps:
    """``mimo_vk.ops.Ops`` in numpy."""

    name = "numpy"

    def embed(self, table: MatrixBF16, ids: Ids) -> F32:
        return (table.data[ids].astype(np.uint32) << np.uint32(16)).view(np.float32)

    @quiet
    def linear(self, matrix: Matrix, x: F32) -> F32:
        return reference_linear.linear(matrix, x)

    @quiet
    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        root = rsqrt(row_sums(x * x) * np.float32(1 / x.shape[1]) + np.float32(eps))
        return (x * root[:, None]) * weight

    @quiet
    def add(self, a: F32, b: F32) -> F32:
        return a + b

    @quiet
    def swiglu(self, gate: F32, up: F32) -> F32:
        return (gate * sigmoid(gate)) * up

    @quiet
    def split_qkv(self, qkv: F32, layout: QkvLayout, value_scale: float) -> tuple[F32, F32, F32]:
        n = qkv.shape[0]
        chunks = qkv.reshape(n, layout.chunks, -1)
        kv = layout.num_kv_heads // layout.chunks
        q_end = layout.num_heads // layout.chunks * layout.head_dim
        k_end = q_end + kv * layout.head_dim
        q = chunks[:, :, :q_end].reshape(n, layout.num_heads, layout.head_dim)
        k = chunks[:, :, q_end:k_end].reshape(n, layout.num_kv_heads, layout.head_dim)
        v = chunks[:, :, k_end:].reshape(n, layout.num_kv_heads, layout.v_head_dim)
        return q.copy(), k.copy(), v * np.float32(value_scale)

    @quiet
    def rope(self, x: F32, cos: F32, sin: F32) -> F32:
        half = cos.shape[1]
        a, b = x[..., :half], x[..., half : 2 * half]
        c, s = cos[:, None], sin[:, None]
        out = x.copy()
        out[..., :half] = a * c - b * s
        out[..., half : 2 * half] = b * c + a * s
        return out

    @quiet
    def attention(
        self, q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None
    ) -> F32:
        return reference_attention.attention(q, k, v, keys, values, start, window, sink)

    @quiet
    def route(self, logits: F32, bias: F32, top_k: int, scaling: float) -> tuple[Index, F32]:
        """As the protocol says; a NaN score ranks below every number."""
        scores = sigmoid(logits)
        order = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top_k]
        chosen = np.take_along_axis(scores, order, axis=1)
        total = np.full(len(logits), ZERO)
        for j in range(top_k):
            total = total + chosen[:, j]
        total = total + ROUTER_FLOOR
        weights = (chosen * reciprocal(total)[:, None]) * np.float32(scaling)
        return order.astype(np.int32), weights

    @quiet
    def expert_gate_up(self, experts: Sequence[Expert], expert_of: Index, row_of: Index, x: F32) -> F32:
        rows = x[row_of]
        gate = pairs_linear([expert.gate for expert in experts], expert_of, rows)
        up = pairs_linear([expert.up for expert in experts], expert_of, rows)
        return self.swiglu(gate, up)

    @quiet
    def expert_down(self, experts: Sequence[Expert], expert_of: Index, act: F32) -> F32:
        return pairs_linear([expert.down for expert in experts], expert_of, act)

    @quiet
    def weighted_sum(self, y: F32, weights: F32) -> F32:
        total = np.zeros((y.shape[0], y.shape[2]), np.float32)
        for j in range(y.shape[1]):
            np.add(total, weights[:, j, None] * y[:, j], out=total)
        return total

    @quiet
    def add_row(self, x: F32, row: F32) -> F32:
        return x + row

    @quiet
    def layer_norm(self, x: F32, weight: F32, eps: float) -> F32:
        centred = x - (row_sums(x) * np.float32(1 / x.shape[1]))[:, None]
        return self.rms_norm(centred, weight, eps)

    @quiet
    def gelu(self, x: F32) -> F32:
        return elementary.gelu(x)

    @quiet
    def patch_attention(
        self, q: F32, k: F32, v: F32, start: int, reach: int | None, sink: F32 | None, reading: SinkReading
    ) -> F32:
        return reference_attention.patch_attention(q, k, v, start, reach, sink, reading)


def row_sums(x: F32) -> F32:
    """Each row's sum with g = 1: x [n, H] to [n]."""
    n, width = x.shape
    words = padded(x, -(-width // LANES) * LANES).reshape(n, -1, LANES)
    lanes = np.zeros((n, LANES), np.float32)
    for s in range(words.shape[1]):
        np.add(lanes, words[:, s], out=lanes)
    return tree(lanes)


def pairs_linear(matrices: Sequence[MatrixMXFP4], matrix_of: Index, x: F32) -> F32:
    """Row p of x times matrices[matrix_of[p]], matrix_of non-decreasing: [P, N]."""
    out = np.empty((len(x), matrices[0].shape[0]), np.float32)
    edges = np.searchsorted(matrix_of, np.arange(len(matrices) + 1))
    for matrix, first, last in zip(matrices, edges, edges[1:], strict=False):
        if first < last:
            out[first:last] = reference_linear.linear(matrix, x[first:last])
    return out
