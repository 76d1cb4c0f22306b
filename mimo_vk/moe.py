"""The MoE step on the CPU: lease the experts that a block chose, compute them as they arrive, add in router order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mimo_vk.experts import ExpertCache
from mimo_vk.formats import F32, Expert
from mimo_vk.ops import Index, Ops


class CachedExperts:
    """Routed experts behind the RAM cache. A block that chose more experts than the cache holds works in groups."""

    def __init__(self, ops: Ops, cache: ExpertCache) -> None:
        self._ops = ops
        self._cache = cache

    def __call__(self, layer: int, x: F32, ids: Index, weights: F32) -> F32:
        """x [n, H], ids and weights [n, k] to the weighted sums [n, H]."""
        n, k = ids.shape
        pairs = Pairs(ids)
        y = np.empty((n * k, x.shape[1]), dtype=np.float32)
        self._compute_all(layer, pairs.experts, pairs, x, y)
        return self._ops.weighted_sum(y.reshape(n, k, -1), weights)

    def _compute_all(self, layer: int, experts: list[int], pairs: Pairs, x: F32, y: F32) -> None:
        """Fill the rows of y [n*k, H] of every pair that chose one of ``experts``."""
        for group in self._groups(layer, experts) if experts else ():
            with self._cache.lease(layer, group) as arriving:
                for batch in arriving:
                    self._compute(batch, pairs, x, y)
                    self._computed(layer, batch)

    def _computed(self, layer: int, batch: Sequence[tuple[int, Expert]]) -> None:
        """Called with experts that were just computed, while they are still leased."""

    def _groups(self, layer: int, experts: list[int]) -> list[list[int]]:
        """The experts in groups that fit the cache; those it holds come first, before a miss can push them out."""
        cap = self._cache.cap
        if len(experts) <= cap:
            return [experts]
        held = self._cache.resident(layer)
        ordered = sorted(experts, key=lambda expert: expert not in held)
        return [ordered[i : i + cap] for i in range(0, len(ordered), cap)]

    def _compute(self, batch: Sequence[tuple[int, Expert]], pairs: Pairs, x: F32, y: F32) -> None:
        at = [pairs.of(expert) for expert, _ in batch]
        flat = np.concatenate(at)
        expert_of = np.repeat(np.arange(len(batch), dtype=np.int32), [len(rows) for rows in at])
        experts = [expert for _, expert in batch]
        row_of = (flat // pairs.k).astype(np.int32)
        act = self._ops.expert_gate_up(experts, expert_of, row_of, x)
        y[flat] = self._ops.expert_down(experts, expert_of, act)


class Pairs:
    """The (row, choice) pairs of a block, flat index row*k + choice, grouped by expert."""

    def __init__(self, ids: Index) -> None:
        self.k = ids.shape[1]
        flat = ids.ravel()
        self._order: Index = np.argsort(flat, kind="stable").astype(np.int32)
        experts, starts = np.unique(flat[self._order], return_index=True)
        self.experts: list[int] = experts.tolist()
        bounds = [*starts.tolist(), len(flat)]
        self._range = {expert: (bounds[i], bounds[i + 1]) for i, expert in enumerate(self.experts)}

    def of(self, expert: int) -> Index:
        """The flat indices of the pairs that chose ``expert``, rows increasing."""
        first, last = self._range[expert]
        return self._order[first:last]
