"""The operations that a backend provides, each with its shapes and its formula.

Every backend returns the same bytes. A product of a matrix [N, K] and a row x is added up so: the columns
are taken in words of g (MXFP4 8, FP8 and int8 4, BF16 2, float32 1); word i belongs to lane i mod 32; a word's
partial is ((v0*x0) + v1*x1) + ... in column order; a lane adds its words in order, starting from +0, as
``acc + p``, or ``acc + p*scale`` where the word's block has a scale (MXFP4, FP8; an int8 row's scale multiplies the
finished sum); then lane l takes lane l+16, l+8, l+4, l+2, l+1. Every add, subtract and multiply is one rounded
float32 operation, never fused. No result depends on how many rows are passed at once.

Arrays are float32, C-contiguous, rows first. Nothing is modified in place; results are fresh arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, Expert, Matrix, MatrixBF16

Ids = NDArray[np.int64]
Index = NDArray[np.int32]
SinkReading = Literal["key0", "denominator"]  # what the picture tower's sink logits are added to


@dataclass(frozen=True)
class QkvLayout:
    """How a fused qkv row is laid out: ``chunks`` times [Q heads | K heads | V heads]."""

    chunks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


class Ops(Protocol):
    """A backend. ``n`` rows are the tokens of a block."""

    name: str

    def embed(self, table: MatrixBF16, ids: Ids) -> F32:
        """Rows ``ids`` [n] of the table, exact: [n, H]."""

    def linear(self, matrix: Matrix, x: F32) -> F32:
        """x [n, K] times the matrix [N, K]: [n, N], in the order above."""

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """(x * rsqrt(ss*float32(1/H) + eps)) * weight, ss the sum of squares with g = 1: [n, H]."""

    def add(self, a: F32, b: F32) -> F32:
        """a + b."""

    def swiglu(self, gate: F32, up: F32) -> F32:
        """(gate * sigmoid(gate)) * up, sigmoid(x) = reciprocal(1 + exp(-x))."""

    def split_qkv(self, qkv: F32, layout: QkvLayout, value_scale: float) -> tuple[F32, F32, F32]:
        """Undo the chunks: q [n, heads, head_dim], k [n, kv, head_dim], v [n, kv, v_head_dim]; v times value_scale."""

    def rope(self, x: F32, cos: F32, sin: F32) -> F32:
        """Rotate pairs (i, i+d/2) of the first d dims of x [n, heads, head_dim] by tables [n, d/2]; the rest pass.

        out_a = a*cos - b*sin, out_b = b*cos + a*sin.
        """

    def attention(
        self, q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None
    ) -> F32:
        """Causal attention of a block whose first row stands at position ``start``: [n, heads*v_head_dim].

        q [n, heads, hd], k [n, kv, hd], v [n, kv, vd] are the block's own rows. Older rows come from the cache:
        keys [kv, rows, hd], values [kv, rows, vd], position j in row j (full, window None) or j mod rows (ring;
        rows >= window). Row i sees positions 0..start+i, with a window W the last W of them, itself included. Query
        head h reads kv head h // (heads/kv). s_j = tree(q.k_j, g=1) * float32(hd**-0.5); m = max of the visible s_j,
        and of sink[h] where there is a sink; e_j = exp(s_j - m); den = tree(e_j), + exp(sink[h] - m); out_d =
        tree(e_j*v_jd) * reciprocal(den). Over keys the lane is the absolute position mod 32, positions increasing.
        """

    def route(self, logits: F32, bias: F32, top_k: int, scaling: float) -> tuple[Index, F32]:
        """logits [n, E] to the top_k experts and their weights, best first: int32 [n, k], float32 [n, k].

        score = sigmoid(logits); the k largest of score + bias, the lower id among equals; total = the chosen scores
        from +0 in that order, + float32(1e-20); weight = (score*reciprocal(total))*float32(scaling).
        """

    def expert_gate_up(self, experts: Sequence[Expert], expert_of: Index, row_of: Index, x: F32) -> F32:
        """swiglu(gate x, up x) of P pairs (expert, row): [P, I]. expert_of [P] is non-decreasing, row_of indexes x."""

    def expert_down(self, experts: Sequence[Expert], expert_of: Index, act: F32) -> F32:
        """down of each pair's activations [P, I]: [P, H]."""

    def weighted_sum(self, y: F32, weights: F32) -> F32:
        """y [n, k, H] and weights [n, k] to [n, H]: weights[:, j] * y[:, j] added over j from +0, in router order."""


class VisionOps(Ops, Protocol):
    """A backend that can run the picture tower too."""

    def add_row(self, x: F32, row: F32) -> F32:
        """x [n, N] + row [N], to every row: a product's bias."""

    def layer_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """c = x - tree(x)*float32(1/H), then (c * rsqrt(ss*float32(1/H) + eps)) * weight, ss that of c: [n, H].

        Both sums have g = 1.
        """

    def gelu(self, x: F32) -> F32:
        """(0.5*x) * (1 + erf(x*float32(sqrt(1/2))))."""

    def patch_attention(
        self, q: F32, k: F32, v: F32, start: int, reach: int | None, sink: F32 | None, reading: SinkReading
    ) -> F32:
        """Attention of patches, without a cause and effect: row i sees all keys, or those with |i - j| <= reach.

        q [r, heads, hd] are rows start..start+r-1 of the sequence; k [n, kv, hd] and v [n, kv, vd] are all of it:
        [r, heads*vd]. As ``attention``, but for the sink [heads]: with "denominator" it is as there; with "key0" it
        is added to the scaled score of key 0 (where key 0 is seen), before the maximum.
        """
