"""The MoE step with a tier: the device computes the experts that it holds while the CPU computes the others.

The results meet in one array and are added in each row's own router order, so who computed what can't show.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mimo_vk.experts import ExpertCache
from mimo_vk.formats import F32, Expert
from mimo_vk.moe import CachedExperts, Pairs
from mimo_vk.ops import Index, Ops
from mimo_vk.vulkan.client import TierGone
from mimo_vk.vulkan.subnormals import meets_subnormals
from mimo_vk.vulkan.tier import Tier


class TieredExperts(CachedExperts):
    """``CachedExperts`` beside a ``Tier``. An expert that the device holds is never read, nor kept in RAM."""

    def __init__(self, ops: Ops, cache: ExpertCache, tier: Tier) -> None:
        super().__init__(ops, cache)
        self._tier = tier
        self._sent: list[tuple[int, int]] = []  # experts that left for the device in this step

    def __call__(self, layer: int, x: F32, ids: Index, weights: F32) -> F32:
        if self._tier.gone:
            return super().__call__(layer, x, ids, weights)
        n, k = ids.shape
        pairs = Pairs(ids)
        self._tier.used(layer, pairs.experts)
        held = self._tier.slots(layer)[pairs.experts] >= 0
        step = DeviceStep(self._tier, layer, ids, x)
        y = np.empty((n * k, x.shape[1]), dtype=np.float32)
        cold = [expert for expert, on_device in zip(pairs.experts, held, strict=True) if not on_device]
        try:
            self._compute_all(layer, cold, pairs, x, y)
        finally:
            missing = step.finish(y)
            self._forget_sent()
        if len(missing):
            again = np.unique(ids.ravel()[missing]).tolist()
            self._compute_all(layer, again, pairs, x, y)
        return self._ops.weighted_sum(y.reshape(n, k, -1), weights)

    def _computed(self, layer: int, batch: Sequence[tuple[int, Expert]]) -> None:
        try:
            for expert, weights in batch:
                if self._tier.offer(layer, expert, weights):
                    self._sent.append((layer, expert))
        except TierGone as error:
            self._tier.drop(error)

    def _forget_sent(self) -> None:
        """What the device holds is not held twice. Their leases are closed by now."""
        for layer, expert in self._sent:
            self._cache.drop(layer, expert)
        self._sent.clear()


class DeviceStep:
    """The pairs of one MoE step that the device computes, in as many batches as it takes; the first begins at once."""

    def __init__(self, tier: Tier, layer: int, ids: Index, x: F32) -> None:
        """ids [n, k]: the experts of each row of x [n, H]."""
        self._tier = tier
        self._layer = layer
        self._ids = ids.ravel()
        self._k = ids.shape[1]
        self._x = x
        self._slots = tier.slots(layer)[self._ids]  # where each pair's expert lies now, -1 for none
        self._missing: list[Index] = [self._beyond()] if tier.client.flushes else []
        rows = tier.client.shape.max_rows
        self._batches = [b for first in range(0, len(x), rows) if len(b := self._pairs(first, first + rows))]
        tier.stats.hits += len(np.unique(self._slots[self._slots >= 0]))
        self._begun = 0
        self._start_next()

    def _beyond(self) -> Index:
        """Take out the pairs of rows with which a device that knows no subnormal floats may meet one: flat indices."""
        beyond = np.flatnonzero(np.repeat(meets_subnormals(self._x), self._k) & (self._slots >= 0))
        self._slots[beyond] = -1
        return beyond.astype(np.int32)

    def _pairs(self, first: int, last: int) -> Index:
        """The flat indices of the pairs of rows first to last that are on the device, in the order of their slots."""
        slots = self._slots[first * self._k : last * self._k]
        flat = np.flatnonzero(slots >= 0)
        return (flat[np.argsort(slots[flat], kind="stable")] + first * self._k).astype(np.int32)

    def _start_next(self) -> None:
        if self._begun < len(self._batches) and not self._tier.gone:
            flat = self._batches[self._begun]
            moved = (
                self._tier.slots(self._layer)[self._ids[flat]] != self._slots[flat]
            )  # displaced since the step began
            self._missing.append(flat[moved])
            flat = self._batches[self._begun] = flat[~moved]
            rows = flat // self._k
            first = int(rows.min()) if len(rows) else 0
            pairs = np.stack([self._slots[flat], rows - first], axis=1).astype(np.uint32)
            try:
                self._tier.client.start_step(self._x[first : first + self._tier.client.shape.max_rows], pairs)
            except TierGone as error:
                self._tier.drop(error)
        self._begun += 1

    def finish(self, y: F32) -> Index:
        """Wait, and put the results into their rows of y [n*k, H]. Returns the flat indices of what the CPU must do.

        Those are the pairs of a device that was lost, and pairs with a result that is not finite: the shaders take
        x and activations times 2^14, which overflows where the CPU's own product need not, and NaN for what they
        can't compute (``subnormals``).
        """
        began = time.perf_counter()
        for index in range(len(self._batches)):
            if index:
                self._start_next()
            self._missing.append(self._take(self._batches[index], y))
        self._tier.stats.wait_seconds += time.perf_counter() - began
        return np.concatenate([np.zeros(0, np.int32), *self._missing])

    def _take(self, flat: Index, y: F32) -> Index:
        if self._tier.gone:
            return flat
        try:
            results = self._tier.client.finish_step(len(flat))
        except TierGone as error:
            self._tier.drop(error)
            return flat
        y[flat] = results
        odd = flat[~np.isfinite(results).all(axis=1)]
        self._tier.stats.recomputed += len(odd)
        return odd
