"""Attention in compiled code, the same bits as ``reference_attention.py``.

The work is cut into tasks of one row and one kv head; a thread takes every so many-th. A task scores its keys, turns
the scores into weights, and sums the values lane by lane. Nothing depends on the threads.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from cpu_fallback.attention_kernels import (
    BIT_REVERSED,
    LANES,
    PLANE_ROW,
    gather_values,
    lane_values,
    score_kernels,
    score_keys,
    subtract_maximum,
    sum_weights,
)
from cpu_fallback.compiled_elementary import exp, reciprocal
from cpu_fallback.jit import jit
from cpu_fallback.vector_ir import WIDTH
from mimo_vk.formats import F32

SERIAL_WORK = 1 << 16  # multiplications below which waking threads costs more than it saves
DEPTH = 6  # partial sums that the tree of 32 lanes holds at once


@jit()
def row_addresses(block, cache_rows, start, low, out):  # type: ignore[no-untyped-def]
    """Addresses of positions low, low + 1, ... of every kv head: out [kv, positions]."""
    kv, rows = cache_rows.shape[0], cache_rows.shape[1]
    width = np.int64(block.shape[2] * 4)
    for h in range(kv):
        for i in range(out.shape[1]):
            position = low + i
            if position < start:
                out[h, i] = cache_rows.ctypes.data + (h * rows + position % rows) * width
            else:
                out[h, i] = block.ctypes.data + ((position - start) * kv + h) * width


@jit()
def widened(block, cache_rows, start, low, width, out, addresses):  # type: ignore[no-untyped-def]
    """As row_addresses, of copies [kv, positions, width] padded with zeros: for rows that fill no whole vectors."""
    kv, rows = cache_rows.shape[0], cache_rows.shape[1]
    d = block.shape[2]
    for h in range(kv):
        for i in range(out.shape[1]):
            position = low + i
            row = cache_rows[h, position % rows] if position < start else block[position - start, h]
            for c in range(width):
                out[h, i, c] = row[c] if c < d else np.float32(0)
            addresses[h, i] = out.ctypes.data + (h * out.shape[1] + i) * np.int64(4 * width)


@jit()
def plane_of_heads(q, row, first, heads, out):  # type: ignore[no-untyped-def]
    """``heads`` heads of a row of q from ``first``, to out [planes, width, 8]; zeros elsewhere."""
    out[:] = 0
    for h in range(heads):
        for d in range(q.shape[2]):
            out[h // WIDTH, d, h % WIDTH] = q[row, first + h, d]


@jit()
def first_round(lane, first_lane):  # type: ignore[no-untyped-def]
    """The first round in which the lane has a key."""
    return 1 if lane < first_lane else 0


@jit()
def keys_in_lane(lane, first_lane, count):  # type: ignore[no-untyped-def]
    return (count + first_lane - lane + LANES - 1) // LANES - first_round(lane, first_lane)


@jit()
def weigh(scores, rounds, count, first_lane, maxima, lanes):  # type: ignore[no-untyped-def]
    """Scores, a plane a row, to exp(s - maximum), and their sums by lane to lanes [planes, 32, 8]."""
    for p in range(scores.shape[0]):
        plane = scores[p]
        subtract_maximum(plane.ctypes.data, plane.size // WIDTH, maxima.ctypes.data + p * PLANE_ROW)
        for i in range(plane.size):
            plane[i] = exp(plane[i])
        for lane in range(LANES):
            start = lane * rounds + first_round(lane, first_lane)
            keys = keys_in_lane(lane, first_lane, count)
            sum_weights(plane.ctypes.data + start * PLANE_ROW, keys, lanes[p, lane].ctypes.data)


@jit()
def raise_to_sink(maxima, sink, first, heads):  # type: ignore[no-untyped-def]
    for g in range(heads):
        s = sink[first + g]
        if s > maxima[g // WIDTH, g % WIDTH]:
            maxima[g // WIDTH, g % WIDTH] = s


@jit()
def lane_tree(lanes, p, h):  # type: ignore[no-untyped-def]
    """Lane l takes l+16, then l+8, l+4, l+2, l+1, in place; the sum of head h of plane p."""
    half = 16
    while half:
        for lane in range(half):
            lanes[p, lane, h] = lanes[p, lane, h] + lanes[p, lane + half, h]
        half //= 2
    return lanes[p, 0, h]


@jit()
def sum_values(scores, rounds, count, first_lane, addresses, vectors, rows, stack):  # type: ignore[no-untyped-def]
    """tree of e_j*v_j over the keys to stack[0] [heads, vectors*8]. stack is [6, heads, vectors*8]."""
    heads = stack.shape[1]
    depth = 0
    for index in range(LANES):
        lane = BIT_REVERSED[index]
        keys = keys_in_lane(lane, first_lane, count)
        start = lane * rounds + first_round(lane, first_lane)
        gather_values(addresses.ctypes.data, (lane - first_lane) & (LANES - 1), count, vectors, rows.ctypes.data)
        for h in range(0, heads, WIDTH):
            e = scores[h // WIDTH].ctypes.data + start * PLANE_ROW
            here = min(WIDTH, heads - h)
            lane_values(e, rows.ctypes.data, keys, here, vectors, stack[depth, h].ctypes.data)
        depth += 1
        done = index
        while done & 1:
            depth -= 1
            add_into(stack[depth - 1], stack[depth])
            done >>= 1


@jit()
def add_into(a, b):  # type: ignore[no-untyped-def]
    for h in range(a.shape[0]):
        for d in range(a.shape[1]):
            a[h, d] = a[h, d] + b[h, d]


@jit()
def score(kernels, q_planes, addresses, count, first_lane, rounds, scale, scores, maxima):  # type: ignore[no-untyped-def]
    """Scores of the keys, a plane a row, and each head's largest. Two planes share the loads of the keys."""
    planes = q_planes.shape[0]
    q_bytes, plane_bytes = np.int64(q_planes.shape[1] * PLANE_ROW), np.int64(scores.shape[1] * 4)
    q, table, scale_at = q_planes.ctypes.data, addresses.ctypes.data, scale.ctypes.data
    out, high = scores.ctypes.data, maxima.ctypes.data
    p = 0
    while p < planes:
        here = min(2, planes - p)
        row, first, top = q + p * q_bytes, out + p * plane_bytes, high + p * PLANE_ROW
        score_keys(kernels[here - 1], row, table, count, scale_at, first, plane_bytes, top, first_lane, rounds)
        p += here


@jit()
def attend_part(part, parts, kernels, width, q, key_at, value_at, low, start, window, sink, scale, vectors, v_dim, out):  # type: ignore[no-untyped-def]
    """Every ``parts``-th task from ``part``."""
    n, heads = q.shape[0], q.shape[1]
    kv, positions = key_at.shape
    group = heads // kv
    planes = (group + WIDTH - 1) // WIDTH
    q_planes = np.empty((planes, width, WIDTH), np.float32)
    most_rounds = (min(positions, window) + 2 * LANES - 2) // LANES | 1
    space = np.zeros(planes * LANES * most_rounds * WIDTH, np.float32)
    rows = np.empty((most_rounds, vectors * WIDTH), np.float32)
    maxima = np.empty((planes, WIDTH), np.float32)
    lanes = np.empty((planes, LANES, WIDTH), np.float32)
    stack = np.empty((DEPTH, group, vectors * WIDTH), np.float32)
    for task in range(part, kv * n, parts):
        h, i = task // n, task % n
        first = max(np.int64(0), start + i - window + 1)
        count = start + i + 1 - first
        here = first - low
        first_lane = first % LANES
        rounds = (
            first_lane + count + LANES - 1
        ) // LANES | 1  # odd, so that the lanes' keys differ in their cache sets
        scores = space[: planes * LANES * rounds * WIDTH].reshape(planes, LANES * rounds * WIDTH)
        plane_of_heads(q, i, h * group, group, q_planes)
        maxima[:] = -np.inf
        score(kernels, q_planes, key_at[h, here : here + count], count, first_lane, rounds, scale, scores, maxima)
        if sink.size:
            raise_to_sink(maxima, sink, h * group, group)
        weigh(scores, rounds, count, first_lane, maxima, lanes)
        sum_values(scores, rounds, count, first_lane, value_at[h, here : here + count], vectors, rows, stack)
        for g in range(group):
            total = lane_tree(lanes, g // WIDTH, g % WIDTH)
            if sink.size:
                total = total + exp(sink[h * group + g] - maxima[g // WIDTH, g % WIDTH])
            inverse = reciprocal(total)
            for d in range(v_dim):
                out[i, (h * group + g) * v_dim + d] = stack[0, g, d] * inverse


@jit(parallel=True)
def attend(parts, kernels, width, q, key_at, value_at, low, start, window, sink, scale, vectors, v_dim, out):  # type: ignore[no-untyped-def]
    for part in numba.prange(parts):
        attend_part(
            part, parts, kernels, width, q, key_at, value_at, low, start, window, sink, scale, vectors, v_dim, out
        )


NO_SINK = np.zeros(0, np.float32)


def addresses_of(
    block: F32, cache_rows: F32, start: int, low: int, multiple: int
) -> tuple[NDArray[np.int64], F32 | None]:
    """Row addresses [kv, positions] from position ``low``; rows whose length is no multiple are copied and padded.

    The copies, where there are any, must outlive the addresses.
    """
    positions = start + len(block) - low
    kv, width = block.shape[1:]
    table = np.empty((kv, positions), np.int64)
    if width % multiple == 0:
        row_addresses(block, cache_rows, start, low, table)
        return table, None
    padded_width = -(-width // multiple) * multiple
    copies = np.empty((kv, positions, padded_width), np.float32)
    widened(block, cache_rows, start, low, padded_width, copies, table)
    return table, copies


def attention(
    q: F32,
    k: F32,
    v: F32,
    keys: F32,
    values: F32,
    start: int,
    window: int | None,
    sink: F32 | None,
    threads: int = 1,
) -> F32:
    """As ``Ops.attention``, on ``threads`` threads."""
    n, heads, head_dim = q.shape
    v_dim = v.shape[2]
    # compiled code checks no bounds
    assert k.shape[0] == v.shape[0] == n and k.shape[2] == head_dim and heads % k.shape[1] == 0, (q.shape, k.shape)
    assert len(keys) == len(values) == k.shape[1] == v.shape[1], (keys.shape, values.shape, k.shape, v.shape)
    assert keys.shape[1] == values.shape[1] >= min(start, window or start), (keys.shape, values.shape, start, window)
    assert keys.shape[2] == head_dim and values.shape[2] == v_dim, (keys.shape, values.shape, q.shape, v.shape)
    assert sink is None or sink.shape == (heads,)
    span = start + n if window is None else window
    low = max(0, start - span + 1)
    key_at, _keys = addresses_of(k, keys, start, low, LANES)
    value_at, _values = addresses_of(v, values, start, low, WIDTH)
    rounds = -(-head_dim // LANES)
    kernels, _code = score_kernels(rounds)
    out = np.empty((n, heads * v_dim), np.float32)
    scale = np.array([head_dim**-0.5], np.float32)
    sizes = -(-v_dim // WIDTH), v_dim
    some_sink = NO_SINK if sink is None else sink
    task = kernels, rounds * LANES, q, key_at, value_at, low, start, span, some_sink, scale, *sizes, out
    if threads == 1 or n * heads * min(span, start + n) * (head_dim + v_dim) < SERIAL_WORK:
        attend_part(0, 1, *task)
    else:
        attend(threads, *task)
    return out
