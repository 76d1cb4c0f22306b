"""Attention in numpy, in the order of addition of ``mimo_vk/ops.py``.

Rows are taken a few at a time. Keys are laid out by position in rounds of 32, so that the lane of a key, its position
mod 32, is its place in the round; what a row doesn't see adds +0, which changes no sum (a sum is never -0).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpu_fallback.elementary import INFINITY, ZERO, exp, reciprocal
from cpu_fallback.reference_linear import LANES, tree
from mimo_vk.formats import F32
from mimo_vk.ops import SinkReading

GROUP_ELEMENTS = 1 << 18  # floats in the largest temporary: rows are grouped to stay near it


def by_position(block: F32, cache: F32, first: int, start: int, width: int) -> F32:
    """Positions from ``first`` (a multiple of 32) to the block's end, in whole rounds: [rounds, 32, kv, width].

    Older rows from the cache (position j in row j mod rows), the rest from the block [n, kv, d]; zeros elsewhere.
    """
    n, kv, d = block.shape
    count = start - first
    rounds = -(-(count + n) // LANES)
    out = np.zeros((rounds * LANES, kv, width), np.float32)
    if count > 0:
        # a ring may have lost the positions below start - rows: no row of the block sees those
        kept = min(count, cache.shape[1])
        positions = np.arange(start - kept, start)
        out[count - kept : count, :, :d] = cache[:, positions % cache.shape[1]].transpose(1, 0, 2)
    out[count : count + n, :, :d] = block
    return out.reshape(rounds, LANES, kv, width)


def scores(q: F32, keys: F32, scale: np.float32) -> F32:
    """q [r, kv, G, width] and keys [rounds, 32, kv, width] to tree(q.k)*scale [r, kv, G, rounds*32]."""
    r, kv, g, width = q.shape
    out = np.empty((r, kv, g, keys.shape[0], LANES), np.float32)
    for t, round_keys in enumerate(keys):
        k = round_keys.transpose(1, 0, 2)[:, None]  # [kv, 1, 32 keys, width]
        lanes = np.zeros((r, kv, g, LANES, LANES), np.float32)
        for d in range(0, width, LANES):
            np.add(lanes, q[..., None, d : d + LANES] * k[..., d : d + LANES], out=lanes)
        np.multiply(tree(lanes), scale, out=out[:, :, :, t])
    return out.reshape(r, kv, g, -1)


def weighted_values(e: F32, values: F32, visible: NDArray[np.bool_]) -> F32:
    """tree over keys of e*v: e [r, kv, G, J], values [rounds, 32, kv, vd], visible [r, J] to [r, kv, G, vd]."""
    r, kv, g, _ = e.shape
    lanes = np.zeros((r, kv, g, values.shape[3], LANES), np.float32)
    for t, round_values in enumerate(values):
        here = slice(t * LANES, (t + 1) * LANES)
        seen = visible[:, here]
        products = e[:, :, :, None, here] * round_values.transpose(1, 2, 0)[:, None]
        if not seen.all():
            products = np.where(seen[:, None, None, None, :], products, ZERO)  # 0 * inf would be NaN
        np.add(lanes, products, out=lanes)
    return tree(lanes)


def attend(s: F32, values: F32, visible: NDArray[np.bool_], sink: F32 | None) -> F32:
    """Scores s [r, kv, G, J] of laid-out keys; visible [r, J]; sink [kv, G]: [r, kv, G, vd]."""
    seen = visible[:, None, None, :]
    s = np.where(seen, s, -INFINITY)
    m = s.max(axis=-1)
    if sink is not None:
        m = np.where(sink > m, sink, m)
    e = np.where(seen, exp(s - m[..., None]), ZERO)
    lanes = np.zeros((*m.shape, LANES), np.float32)
    for t in range(0, e.shape[-1], LANES):
        np.add(lanes, e[..., t : t + LANES], out=lanes)
    den = tree(lanes)
    if sink is not None:
        den = den + exp(sink - m)
    return weighted_values(e, values, visible) * reciprocal(den)[..., None]


def attention(q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None) -> F32:
    """As ``Ops.attention``."""
    n, heads, head_dim = q.shape
    kv, v_dim = v.shape[1:]
    group = heads // kv
    width = -(-head_dim // LANES) * LANES
    scale = np.float32(head_dim**-0.5)
    oldest = 0 if window is None else max(0, start - window + 1)
    first = oldest - oldest % LANES
    all_keys = by_position(k, keys, first, start, width)
    all_values = by_position(v, values, first, start, v_dim)
    q_padded = np.zeros((n, kv, group, width), np.float32)
    q_padded[..., :head_dim] = q.reshape(n, kv, group, head_dim)
    by_kv = None if sink is None else sink.reshape(kv, group)
    out = np.empty((n, kv, group, v_dim), np.float32)
    step = max(1, GROUP_ELEMENTS // (heads * LANES * max(LANES, v_dim)))
    for i in range(0, n, step):
        row = start + np.arange(i, min(i + step, n))[:, None]
        low = np.zeros_like(row) if window is None else np.maximum(row - window + 1, 0)
        a = (int(low[0, 0]) - first) // LANES  # rounds that some row of this group sees
        b = (int(row[-1, 0]) - first) // LANES + 1
        position = first + np.arange(a * LANES, b * LANES)
        visible = (position >= low) & (position <= row)
        s = scores(q_padded[i : i + step], all_keys[a:b], scale)
        out[i : i + step] = attend(s, all_values[a:b], visible, by_kv)
    return out.reshape(n, heads * v_dim)


def patch_attention(
    q: F32, k: F32, v: F32, start: int, reach: int | None, sink: F32 | None, reading: SinkReading
) -> F32:
    """As ``Ops.patch_attention``."""
    rows, heads, head_dim = q.shape
    n, kv, v_dim = v.shape
    group = heads // kv
    width = -(-head_dim // LANES) * LANES
    all_keys = by_position(k, k[:0].transpose(1, 0, 2), 0, 0, width)
    all_values = by_position(v, v[:0].transpose(1, 0, 2), 0, 0, v_dim)
    q_padded = np.zeros((rows, kv, group, width), np.float32)
    q_padded[..., :head_dim] = q.reshape(rows, kv, group, head_dim)
    by_kv = None if sink is None else sink.reshape(kv, group)
    out = np.empty((rows, kv, group, v_dim), np.float32)
    step = max(1, GROUP_ELEMENTS // (heads * LANES * max(LANES, v_dim)))
    for i in range(0, rows, step):
        row = start + np.arange(i, min(i + step, rows))[:, None]
        low = np.maximum(row - (n if reach is None else reach), 0)
        high = np.minimum(row + (n if reach is None else reach), n - 1)
        a, b = int(low[0, 0]) // LANES, int(high[-1, 0]) // LANES + 1  # rounds that some row of this group sees
        position = np.arange(a * LANES, b * LANES)
        s = scores(q_padded[i : i + step], all_keys[a:b], np.float32(head_dim**-0.5))
        if by_kv is not None and reading == "key0" and a == 0:
            s[..., 0] = s[..., 0] + by_kv
        visible = (position >= low) & (position <= high)
        out[i : i + step] = attend(s, all_values[a:b], visible, by_kv if reading == "denominator" else None)
    return out.reshape(rows, heads * v_dim)
