"""Attention in float64 straight from its definition, and a driver that feeds a backend in blocks through a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mimo_vk.formats import F32
from mimo_vk.ops import Ops


@dataclass
class Tensors:
    q: F32  # [length, heads, head_dim]
    k: F32  # [length, kv, head_dim]
    v: F32  # [length, kv, v_dim]
    sink: F32  # [heads]


@dataclass(frozen=True)
class Case:
    heads: int
    kv: int
    head_dim: int
    v_dim: int
    window: int | None
    sink: bool

    def tensors(self, rng: np.random.Generator, length: int) -> Tensors:
        def normal(*shape: int) -> F32:
            return rng.standard_normal(shape).astype(np.float32)

        q, k = 2 * normal(length, self.heads, self.head_dim), normal(length, self.kv, self.head_dim)
        return Tensors(q, k, normal(length, self.kv, self.v_dim), 2 * normal(self.heads))


def float64_attention(case: Case, t: Tensors) -> np.ndarray:
    """[length, heads*v_dim]."""
    length = len(t.q)
    k = np.repeat(t.k.astype(np.float64), case.heads // case.kv, axis=1)
    v = np.repeat(t.v.astype(np.float64), case.heads // case.kv, axis=1)
    scores = np.einsum("ihd,jhd->hij", t.q.astype(np.float64), k) / np.sqrt(case.head_dim)
    i, j = np.arange(length)[:, None], np.arange(length)
    hidden = (j > i) if case.window is None else (j > i) | (j <= i - case.window)
    weights = np.exp(np.where(hidden, -np.inf, scores))
    total = weights.sum(axis=2, keepdims=True)
    if case.sink:
        total = total + np.exp(t.sink.astype(np.float64))[:, None, None]
    return np.einsum("hij,jhd->ihd", weights / total, v).reshape(length, -1)


def run_in_blocks(ops: Ops, case: Case, t: Tensors, block: int, spare_rows: int = 0) -> F32:
    """Feed the rows ``block`` at a time; unwritten and lost cache rows hold NaN. [length, heads*v_dim]."""
    length = len(t.q)
    rows = (length if case.window is None else case.window) + spare_rows
    keys = np.full((case.kv, rows, case.head_dim), np.nan, np.float32)
    values = np.full((case.kv, rows, case.v_dim), np.nan, np.float32)
    out = []
    for start in range(0, length, block):
        here = slice(start, min(start + block, length))
        q, k, v = t.q[here], t.k[here], t.v[here]
        out.append(ops.attention(q, k, v, keys, values, start, case.window, t.sink if case.sink else None))
        for position in range(here.start, here.stop):
            keys[:, position % rows], values[:, position % rows] = t.k[position], t.v[position]
    return np.concatenate(out)
