"""Compiled twins of the operations that go row by row: the same bits as ``reference.py``.

Each public function is the operation of that name in ``mimo_vk/ops.py``. ``threads`` is how many may share the rows;
small calls stay on the calling thread, as waking others costs more than the work. ``attention`` is re-exported.
Compiled code checks no bounds, so the shapes are asserted here.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from cpu_fallback.compiled_attention import attention
from cpu_fallback.compiled_elementary import reciprocal, rsqrt, sigmoid
from cpu_fallback.elementary import ZERO
from cpu_fallback.jit import jit
from cpu_fallback.reference import ROUTER_FLOOR
from cpu_fallback.reference_linear import LANES
from cpu_fallback.row_kernels import square_lanes
from mimo_vk.formats import F32, MatrixBF16
from mimo_vk.ops import Ids, Index, QkvLayout

__all__ = ["add", "attention", "embed", "rms_norm", "rope", "route", "split_qkv", "swiglu", "weighted_sum"]

PARALLEL_ELEMENTS = 1 << 15  # below: one thread


def shares(threads: int, elements: int) -> int:
    return threads if elements >= PARALLEL_ELEMENTS else 1


@jit()
def embed_rows(table: Any, ids: Any, out: Any) -> None:
    for i in range(ids.size):
        row = table[ids[i]]
        for c in range(row.size):
            out[i, c] = np.uint32(row[c]) << np.uint32(16)


def embed(table: MatrixBF16, ids: Ids) -> F32:
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < len(table.data)), ids
    out = np.empty((len(ids), table.data.shape[1]), np.uint32)
    embed_rows(table.data, ids, out)
    return out.view(np.float32)


@jit()
def fold(lanes: Any) -> Any:
    """The tree of 32 lanes, in place: lane l takes l+16, then l+8, l+4, l+2, l+1."""
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] = lanes[lane] + lanes[lane + half]
        half //= 2
    return lanes[0]


@jit()
def norm_rows(first: Any, last: Any, x: Any, weight: Any, inverse: Any, eps: Any, out: Any) -> None:
    width = x.shape[1]
    whole = width // LANES * LANES
    lanes = np.empty(LANES, np.float32)
    for i in range(first, last):
        lanes[:] = ZERO
        square_lanes(x[i].ctypes.data, whole // LANES, lanes.ctypes.data)
        for lane in range(width - whole):
            lanes[lane] = lanes[lane] + x[i, whole + lane] * x[i, whole + lane]
        root = rsqrt(fold(lanes) * inverse + eps)
        for c in range(width):
            out[i, c] = (x[i, c] * root) * weight[c]


@jit(parallel=True)
def norm_parts(parts: Any, x: Any, weight: Any, inverse: Any, eps: Any, out: Any) -> None:
    n = x.shape[0]
    for part in numba.prange(parts):
        norm_rows(n * part // parts, n * (part + 1) // parts, x, weight, inverse, eps, out)


def rms_norm(x: F32, weight: F32, eps: float, threads: int = 1) -> F32:
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    out = np.empty_like(x)
    constants = np.float32(1 / x.shape[1]), np.float32(eps)
    parts = shares(threads, x.size)
    if parts == 1:
        norm_rows(0, len(x), x, weight, *constants, out)
    else:
        norm_parts(parts, x, weight, *constants, out)
    return out


@jit()
def add_flat(a: Any, b: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = a[i] + b[i]


def add(a: F32, b: F32) -> F32:
    assert a.shape == b.shape, (a.shape, b.shape)
    out = np.empty_like(a)
    add_flat(a.reshape(-1), b.reshape(-1), out.reshape(-1))
    return out


@jit()
def swiglu_range(gate: Any, up: Any, out: Any) -> None:
    for i in range(out.size):  # from 0: an index that might be negative would keep LLVM from loading vectors
        out[i] = (gate[i] * sigmoid(gate[i])) * up[i]


@jit(parallel=True)
def swiglu_parts(parts: Any, gate: Any, up: Any, out: Any) -> None:
    for part in numba.prange(parts):
        first, last = out.size * part // parts, out.size * (part + 1) // parts
        swiglu_range(gate[first:last], up[first:last], out[first:last])


def swiglu(gate: F32, up: F32, threads: int = 1) -> F32:
    assert gate.shape == up.shape, (gate.shape, up.shape)
    out = np.empty_like(gate)
    flat = gate.reshape(-1), up.reshape(-1), out.reshape(-1)
    parts = shares(threads, gate.size)
    if parts == 1:
        swiglu_range(*flat)
    else:
        swiglu_parts(parts, *flat)
    return out


@jit()
def copy(source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = source[i]


@jit()
def scale(source: Any, factor: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = source[i] * factor


@jit()
def split_rows(qkv: Any, chunks: Any, value_scale: Any, q: Any, k: Any, v: Any) -> None:
    q_size, k_size, v_size = q.shape[1] // chunks, k.shape[1] // chunks, v.shape[1] // chunks
    for i in range(q.shape[0]):
        at = 0
        for chunk in range(chunks):
            copy(qkv[i, at : at + q_size], q[i, chunk * q_size : (chunk + 1) * q_size])
            at += q_size
            copy(qkv[i, at : at + k_size], k[i, chunk * k_size : (chunk + 1) * k_size])
            at += k_size
            scale(qkv[i, at : at + v_size], value_scale, v[i, chunk * v_size : (chunk + 1) * v_size])
            at += v_size


def split_qkv(qkv: F32, layout: QkvLayout, value_scale: float) -> tuple[F32, F32, F32]:
    n, heads, kv = len(qkv), layout.num_heads, layout.num_kv_heads
    assert qkv.shape[1] == (heads + kv) * layout.head_dim + kv * layout.v_head_dim, (qkv.shape, layout)
    assert heads % layout.chunks == kv % layout.chunks == 0, layout
    q = np.empty((n, heads, layout.head_dim), np.float32)
    k = np.empty((n, kv, layout.head_dim), np.float32)
    v = np.empty((n, kv, layout.v_head_dim), np.float32)
    split_rows(qkv, layout.chunks, np.float32(value_scale), q.reshape(n, -1), k.reshape(n, -1), v.reshape(n, -1))
    return q, k, v


@jit()
def rope_rows(x: Any, cos: Any, sin: Any, out: Any) -> None:
    n, heads, width = x.shape
    half = cos.shape[1]
    for i in range(n):
        for h in range(heads):
            for d in range(half):
                a, b, c, s = x[i, h, d], x[i, h, half + d], cos[i, d], sin[i, d]
                out[i, h, d] = a * c - b * s
                out[i, h, half + d] = b * c + a * s
            for d in range(2 * half, width):
                out[i, h, d] = x[i, h, d]


def rope(x: F32, cos: F32, sin: F32) -> F32:
    assert cos.shape == sin.shape and len(cos) == len(x) and 2 * cos.shape[1] <= x.shape[2], (x.shape, cos.shape)
    out = np.empty_like(x)
    rope_rows(x, cos, sin, out)
    return out


@jit()
def best_left(choice: Any, taken: Any) -> Any:
    """The index of the largest choice not taken; the lower one among equals; NaN below every number."""
    best = -1
    for e in range(choice.size):
        if taken[e]:
            continue
        if best < 0 or choice[e] > choice[best] or (choice[best] != choice[best] and choice[e] == choice[e]):
            best = e
    return best


@jit()
def route_rows(logits: Any, bias: Any, scaling: Any, ids: Any, weights: Any) -> None:
    n, experts = logits.shape
    top_k = ids.shape[1]
    scores = np.empty(experts, np.float32)
    choice = np.empty(experts, np.float32)
    taken = np.empty(experts, np.bool_)
    for i in range(n):
        for e in range(experts):
            scores[e] = sigmoid(logits[i, e])
        for e in range(experts):
            choice[e] = scores[e] + bias[e]
            taken[e] = False
        total = ZERO
        for j in range(top_k):
            e = best_left(choice, taken)
            taken[e] = True
            ids[i, j] = e
            weights[i, j] = scores[e]
            total = total + scores[e]
        inverse = reciprocal(total + ROUTER_FLOOR)
        for j in range(top_k):
            weights[i, j] = (weights[i, j] * inverse) * scaling


def route(logits: F32, bias: F32, top_k: int, scaling: float) -> tuple[Index, F32]:
    assert bias.shape == logits.shape[1:] and 0 < top_k <= len(bias), (logits.shape, bias.shape, top_k)
    ids = np.empty((len(logits), top_k), np.int32)
    weights = np.empty((len(logits), top_k), np.float32)
    route_rows(logits, bias, np.float32(scaling), ids, weights)
    return ids, weights


@jit()
def sum_rows(first: Any, last: Any, y: Any, weights: Any, out: Any) -> None:
    for i in range(first, last):
        for c in range(y.shape[2]):
            out[i, c] = ZERO
        for j in range(y.shape[1]):
            weight = weights[i, j]
            for c in range(y.shape[2]):
                out[i, c] = out[i, c] + weight * y[i, j, c]


@jit(parallel=True)
def sum_parts(parts: Any, y: Any, weights: Any, out: Any) -> None:
    n = y.shape[0]
    for part in numba.prange(parts):
        sum_rows(n * part // parts, n * (part + 1) // parts, y, weights, out)


def weighted_sum(y: F32, weights: F32, threads: int = 1) -> F32:
    assert weights.shape == y.shape[:2], (y.shape, weights.shape)
    out = np.empty((y.shape[0], y.shape[2]), np.float32)
    parts = min(shares(threads, y.size), max(1, len(y)))
    if parts == 1:
        sum_rows(0, len(y), y, weights, out)
    else:
        sum_parts(parts, y, weights, out)
    return out
