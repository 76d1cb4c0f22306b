"""Compiled twins of the operations that only the picture tower uses: the same bits as ``reference.py``.

Attention is cut into tasks of one kv head and a few rows, as many as make 16 pairs of row and query head: they share
the loads of keys and values. A row that doesn't see one of the task's keys gives it the weight +0, which changes no sum
where the values are finite; where they aren't, a task has one row. Nothing depends on the threads.
Compiled code checks no bounds, so the shapes are asserted here.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from cpu_fallback.attention_kernels import LANES, PLANE_ROW, score_kernels, score_keys
from cpu_fallback.compiled_attention import DEPTH, NO_SINK, SERIAL_WORK, addresses_of, lane_tree, sum_values, weigh
from cpu_fallback.compiled_elementary import exp, reciprocal, rsqrt
from cpu_fallback.compiled_elementary import gelu as gelu_of
from cpu_fallback.compiled_rows import fold, shares
from cpu_fallback.elementary import INFINITY, ZERO
from cpu_fallback.jit import jit
from cpu_fallback.row_kernels import square_lanes
from cpu_fallback.vector_ir import WIDTH
from mimo_vk.formats import F32
from mimo_vk.ops import SinkReading

__all__ = ["add_row", "gelu", "layer_norm", "patch_attention"]

PAIRS = 16  # of a task: rows times the query heads of a kv head
KEY0, DENOMINATOR = 1, 2  # readings of the sink, 0 where there is none


@jit()
def add_row_to(x: Any, row: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[i, c] = x[i, c] + row[c]


def add_row(x: F32, row: F32) -> F32:
    assert row.shape == x.shape[1:], (x.shape, row.shape)
    out = np.empty_like(x)
    add_row_to(x, row, out)
    return out


@jit()
def layer_norm_rows(x: Any, weight: Any, inverse: Any, eps: Any, out: Any) -> None:
    n, width = x.shape
    whole = width // LANES * LANES
    lanes = np.empty(LANES, np.float32)
    centred = np.empty(width, np.float32)
    for i in range(n):
        lanes[:] = ZERO
        for first in range(0, width, LANES):
            for lane in range(min(LANES, width - first)):
                lanes[lane] = lanes[lane] + x[i, first + lane]
        mean = fold(lanes) * inverse
        for c in range(width):
            centred[c] = x[i, c] - mean
        lanes[:] = ZERO
        square_lanes(centred.ctypes.data, whole // LANES, lanes.ctypes.data)
        for lane in range(width - whole):
            lanes[lane] = lanes[lane] + centred[whole + lane] * centred[whole + lane]
        root = rsqrt(fold(lanes) * inverse + eps)
        for c in range(width):
            out[i, c] = (centred[c] * root) * weight[c]


def layer_norm(x: F32, weight: F32, eps: float) -> F32:
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    out = np.empty_like(x)
    layer_norm_rows(x, weight, np.float32(1 / x.shape[1]), np.float32(eps), out)
    return out


@jit()
def gelu_range(x: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = gelu_of(x[i])


@jit(parallel=True)
def gelu_parts(parts: Any, x: Any, out: Any) -> None:
    for part in numba.prange(parts):
        first, last = x.size * part // parts, x.size * (part + 1) // parts
        gelu_range(x[first:last], out[first:last])


def gelu(x: F32, threads: int = 1) -> F32:
    out = np.empty_like(x)
    parts = shares(threads, x.size)
    if parts == 1:
        gelu_range(x.reshape(-1), out.reshape(-1))
    else:
        gelu_parts(parts, x.reshape(-1), out.reshape(-1))
    return out


@jit()
def plane_of_pairs(q: Any, row: Any, rows: Any, first: Any, group: Any, out: Any) -> None:
    """Heads ``first`` .. of ``rows`` rows of q to out [planes, width, 8], pair row*group + head; zeros elsewhere."""
    out[:] = ZERO
    for r in range(rows):
        for g in range(group):
            pair = r * group + g
            for d in range(q.shape[2]):
                out[pair // WIDTH, d, pair % WIDTH] = q[row + r, first + g, d]


@jit()
def score_span(kernels: Any, q_planes: Any, addresses: Any, first: Any, last: Any, first_lane: Any, rounds: Any,
               scale: Any, scores: Any, maxima: Any) -> None:  # fmt: skip
    """Scores of keys first..last-1 of the task's, and each pair's largest. Two planes share the loads of the keys."""
    planes = q_planes.shape[0]
    q_bytes, plane_bytes = np.int64(q_planes.shape[1] * PLANE_ROW), np.int64(scores.shape[1] * 4)
    table = addresses[first:].ctypes.data
    p = 0
    while p < planes:
        here = min(2, planes - p)
        q, out = q_planes.ctypes.data + p * q_bytes, scores.ctypes.data + p * plane_bytes
        high = maxima.ctypes.data + p * PLANE_ROW
        lane, scale_at = first_lane + first, scale.ctypes.data
        score_keys(kernels[here - 1], q, table, last - first, scale_at, out, plane_bytes, high, lane, rounds)
        p += here


@jit()
def judge_keys(first: Any, last: Any, low: Any, row: Any, rows: Any, group: Any, reach: Any, first_sink: Any,
               first_lane: Any, rounds: Any, scores: Any, maxima: Any) -> None:  # fmt: skip
    """Keys that some rows don't see: -inf for those, the maximum for the others. The sink joins key 0, if any does.

    first and last count from position ``low``; first_sink [group] or empty.
    """
    for j in range(first, last):
        place, position = first_lane + j, low + j
        slot = ((place % LANES) * rounds + place // LANES) * WIDTH
        for pair in range(rows * group):
            p, at = pair // WIDTH, slot + pair % WIDTH
            if position == 0 and first_sink.size:
                scores[p, at] = scores[p, at] + first_sink[pair % group]
            i = row + pair // group
            if not i - reach <= position <= i + reach:
                scores[p, at] = -INFINITY
            elif scores[p, at] > maxima[p, pair % WIDTH]:
                maxima[p, pair % WIDTH] = scores[p, at]


@jit()
def finish_pairs(row: Any, rows: Any, first: Any, group: Any, sink: Any, maxima: Any, lanes: Any, sums: Any, v_dim: Any,
                 out: Any) -> None:  # fmt: skip
    """Each pair's sums [pairs, d] times the reciprocal of its weights' total, to out [r, heads*v_dim]."""
    for pair in range(rows * group):
        p, lane, head = pair // WIDTH, pair % WIDTH, first + pair % group
        total = lane_tree(lanes, p, lane)
        if sink.size:
            total = total + exp(sink[head] - maxima[p, lane])
        inverse = reciprocal(total)
        for d in range(v_dim):
            out[row + pair // group, head * v_dim + d] = sums[pair, d] * inverse


@jit()
def raise_pairs(rows: Any, first: Any, group: Any, sink: Any, maxima: Any) -> None:
    for pair in range(rows * group):
        s = sink[first + pair % group]
        if s > maxima[pair // WIDTH, pair % WIDTH]:
            maxima[pair // WIDTH, pair % WIDTH] = s


@jit()
def attend_patches(part: Any, parts: Any, kernels: Any, width: Any, q: Any, key_at: Any, value_at: Any, start: Any,
                   reach: Any, tile: Any, sink: Any, reading: Any, scale: Any, vectors: Any, v_dim: Any,
                   out: Any) -> None:  # fmt: skip
    """Every ``parts``-th task from ``part``: a kv head and ``tile`` rows of q."""
    count, heads = q.shape[0], q.shape[1]
    kv, n = key_at.shape
    group = heads // kv
    planes = (tile * group + WIDTH - 1) // WIDTH
    q_planes = np.empty((planes, width, WIDTH), np.float32)
    most_rounds = (min(n, 2 * reach + tile) + 2 * LANES - 2) // LANES | 1
    space = np.zeros(planes * LANES * most_rounds * WIDTH, np.float32)
    value_rows = np.empty((most_rounds, vectors * WIDTH), np.float32)
    maxima, unused = np.empty((planes, WIDTH), np.float32), np.empty((planes, WIDTH), np.float32)
    lanes = np.empty((planes, LANES, WIDTH), np.float32)
    stack = np.empty((DEPTH, tile * group, vectors * WIDTH), np.float32)
    at_key0, in_sum = sink[:0], sink[:0]
    if reading == DENOMINATOR:
        in_sum = sink
    tiles = (count + tile - 1) // tile
    for task in range(part, kv * tiles, parts):
        h, begin = task // tiles, task % tiles * tile
        rows, row = min(tile, count - begin), start + begin
        low, high = max(0, row - reach), min(n, row + rows + reach)
        core_low, core_high = max(low, row + rows - 1 - reach), min(n, row + reach + 1)
        if reading == KEY0:
            at_key0 = sink[h * group : (h + 1) * group]
            core_low = max(core_low, 1)
        core_low = min(core_low, high)
        core_high = max(core_high, core_low)
        first_lane = low % LANES
        rounds = (first_lane + high - low + LANES - 1) // LANES | 1  # odd: the lanes' keys differ in their cache sets
        scores = space[: planes * LANES * rounds * WIDTH].reshape(planes, LANES * rounds * WIDTH)
        plane_of_pairs(q, begin, rows, h * group, group, q_planes)
        maxima[:] = -INFINITY
        unused[:] = ZERO
        keys = key_at[h, low:high]
        for first, last, seen in ((0, core_low - low, False), (core_low - low, core_high - low, True),
                                  (core_high - low, high - low, False)):  # fmt: skip
            if first < last:
                found = maxima if seen else unused
                score_span(kernels, q_planes, keys, first, last, first_lane, rounds, scale, scores, found)
                if not seen:
                    judge_keys(first, last, low, row, rows, group, reach, at_key0, first_lane, rounds, scores, maxima)
        raise_pairs(rows if in_sum.size else 0, h * group, group, in_sum, maxima)
        weigh(scores, rounds, high - low, first_lane, maxima, lanes)
        sums = stack[:, : rows * group]
        sum_values(scores, rounds, high - low, first_lane, value_at[h, low:high], vectors, value_rows, sums)
        finish_pairs(begin, rows, h * group, group, in_sum, maxima, lanes, sums[0], v_dim, out)


@jit(parallel=True)
def attend_patches_parts(parts: Any, kernels: Any, width: Any, q: Any, key_at: Any, value_at: Any, start: Any,
                         reach: Any, tile: Any, sink: Any, reading: Any, scale: Any, vectors: Any, v_dim: Any,
                         out: Any) -> None:  # fmt: skip
    for part in numba.prange(parts):
        attend_patches(
            part, parts, kernels, width, q, key_at, value_at, start, reach, tile, sink, reading, scale, vectors, v_dim,
            out,
        )  # fmt: skip


def patch_attention(
    q: F32,
    k: F32,
    v: F32,
    start: int,
    reach: int | None,
    sink: F32 | None,
    reading: SinkReading,
    threads: int = 1,
) -> F32:
    """As ``Ops.patch_attention``, on ``threads`` threads."""
    rows, heads, head_dim = q.shape
    n, kv, v_dim = v.shape
    assert k.shape == (n, kv, head_dim) and heads % kv == 0 and 0 <= start <= n - rows, (q.shape, k.shape, start)
    assert sink is None or sink.shape == (heads,)
    key_at, _keys = addresses_of(k, k[:0].transpose(1, 0, 2), 0, 0, LANES)
    value_at, _values = addresses_of(v, v[:0].transpose(1, 0, 2), 0, 0, WIDTH)
    group, span = heads // kv, n if reach is None else min(reach, n)
    tile = max(1, PAIRS // group) if np.isfinite(v).all() else 1
    width = -(-head_dim // LANES)
    kernels, _code = score_kernels(width)
    out = np.empty((rows, heads * v_dim), np.float32)
    readings = {"key0": KEY0, "denominator": DENOMINATOR}
    some_sink = (NO_SINK, 0) if sink is None else (sink, readings[reading])
    scale = np.array([head_dim**-0.5], np.float32)
    task = kernels, width * LANES, q, key_at, value_at, start, span, tile, *some_sink, scale, -(-v_dim // WIDTH), v_dim
    if threads == 1 or rows * heads * min(2 * span + 1, n) * (head_dim + v_dim) < SERIAL_WORK:
        attend_patches(0, 1, *task, out)
    else:
        attend_patches_parts(threads, *task, out)
    return out
