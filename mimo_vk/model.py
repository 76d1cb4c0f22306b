"""MiMo-V2: the forward pass, top to bottom, in the order of the paper's figures.

A decoder of pre-norm layers. Attention is grouped-query with partial rotary embedding, a literal scale on the
values, and per layer either full or over a sliding window with one learned sink logit a head. The first layer's
feed-forward is a dense SwiGLU MLP; the others route each token to its top-k experts by a sigmoid router whose bias
takes part in the choice but not in the weights.

Everything numeric goes through ``ops`` (see ``mimo_vk/ops.py`` for each formula); ``n`` is the rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mimo_vk.formats import F32
from mimo_vk.kv_cache import NO_ID, KvCache, LayerCache
from mimo_vk.ops import Ids, Index, Ops
from mimo_vk.rope import RopeTable
from mimo_vk.weights import AttentionWeights, DenseMlp, LayerWeights, Router, Weights


class Experts(Protocol):
    """Whoever holds the routed experts: sums w * expert(x) over each row's choices, in router order."""

    def __call__(self, layer: int, x: F32, ids: Index, weights: F32) -> F32:
        """x [n, H], ids and weights [n, k] (best first) to [n, H]."""


@dataclass(frozen=True, eq=False)
class PictureRows:
    """What stands in the place of embeddings: ``rows`` [k, H] at the positions ``at`` [k], which increase."""

    at: Index
    rows: F32

    def within(self, start: int, stop: int) -> PictureRows:
        """Those of the positions from ``start`` to before ``stop``, counted from ``start``."""
        low, high = np.searchsorted(self.at, (start, stop))
        return PictureRows(self.at[low:high] - start, self.rows[low:high])


class Model:
    """The weights bound to a backend. Holds no state of any request: that is the cache, passed in."""

    def __init__(self, weights: Weights, ops: Ops, experts: Experts) -> None:
        self.weights = weights
        self.ops = ops
        self.experts = experts
        config = weights.config
        self._rope = {spec.rope_theta: RopeTable(spec.rope_theta, config.rope_dim) for spec in config.layers}

    def forward(
        self, ids: Ids, cache: KvCache, checkpoint: Callable[[], None], pictures: PictureRows | None = None
    ) -> F32:
        """Read the block ``ids`` [n] after what the cache holds; returns the last layer's hidden rows [n, H].

        ``pictures`` (by positions of the prompt) take the place of the embeddings of their ids, and the cache holds no
        id there. ``checkpoint`` is called before each layer and may raise to stop the work; the cache changes only at
        the end.
        """
        start = cache.begin()
        h = self.ops.embed(self.weights.embed, ids)
        held = ids
        if pictures is not None:
            here = pictures.within(start, start + len(ids))
            h[here.at] = here.rows
            held = ids.copy()
            held[here.at] = NO_ID
        for layer, rows in zip(self.weights.layers, cache.layers, strict=True):
            checkpoint()
            h = self._layer(layer, h, start, cache, rows)
        cache.commit(held.tolist())
        return h

    def logits(self, h: F32) -> F32:
        """Hidden rows [n, H] to raw logits [n, vocab_size]."""
        return self.ops.linear(self.weights.lm_head, self._norm(h, self.weights.norm))

    def _layer(self, layer: LayerWeights, h: F32, start: int, cache: KvCache, rows: LayerCache) -> F32:
        h = self.ops.add(h, self._attention(layer, self._norm(h, layer.input_norm), start, cache, rows))
        return self.ops.add(h, self._feed_forward(layer, self._norm(h, layer.post_attention_norm)))

    def _norm(self, x: F32, weight: F32) -> F32:
        return self.ops.rms_norm(x, weight, self.weights.config.layernorm_epsilon)

    def _attention(self, layer: LayerWeights, x: F32, start: int, cache: KvCache, rows: LayerCache) -> F32:
        ops, spec = self.ops, layer.spec
        attention: AttentionWeights = layer.attention
        qkv = ops.linear(attention.qkv_proj, x)
        q, k, v = ops.split_qkv(qkv, attention.layout, self.weights.config.attention_value_scale)
        cos, sin = self._rope[spec.rope_theta].rows(start, len(x))
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        mixed = ops.attention(q, k, v, rows.keys, rows.values, start, spec.window, attention.sink)
        cache.stage(k, v)
        return ops.linear(attention.o_proj, mixed)

    def _feed_forward(self, layer: LayerWeights, x: F32) -> F32:
        if layer.mlp is not None:
            return self._dense_mlp(layer.mlp, x)
        assert layer.router is not None
        return self._moe(layer.spec.index, layer.router, x)

    def _dense_mlp(self, mlp: DenseMlp, x: F32) -> F32:
        ops = self.ops
        return ops.linear(mlp.down, ops.swiglu(ops.linear(mlp.gate, x), ops.linear(mlp.up, x)))

    def _moe(self, index: int, router: Router, x: F32) -> F32:
        return self._routed(index, router, x, self.ops.linear(router.gate, x))

    def _routed(self, index: int, router: Router, x: F32, scores: F32) -> F32:
        config = self.weights.config
        ids, weights = self.ops.route(scores, router.bias, config.num_experts_per_tok, config.routed_scaling_factor)
        return self.experts(index, x, ids, weights)


def as_ids(ids: list[int]) -> Ids:
    """Token ids as the array that ``forward`` takes."""
    return np.asarray(ids, dtype=np.int64)
