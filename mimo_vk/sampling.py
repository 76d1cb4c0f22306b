"""Logits to a token: greedy, or temperature and top-p with a seed that gives the same ids on every machine.

The exponential is the project's own and every sum runs in order, so nothing depends on the CPU; the random numbers are
numpy's PCG64, one a token.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cpu_fallback.elementary import exp
from mimo_vk.errors import MimoError, UsageError
from mimo_vk.formats import F32

F64 = NDArray[np.float64]
Indices = NDArray[np.int64]

_SEEDS = 2**64
_UNDERFLOW = -64.0  # exp is zero from here down
_FLOORS = (1e-2, 1e-4, 1e-7, 0.0)  # of the largest probability: where the search for the top-p set begins


class Sampler:
    """How to choose. temperature 0 is greedy; top_p keeps the smallest set of best ids that reaches that share.

    seed: any integer; None draws from the system's entropy. UsageError names a value that can't be used.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise UsageError(f"temperature: expected a number from 0 up, found {temperature}")
        if not 0 <= top_p <= 1:  # also refuses NaN
            raise UsageError(f"top_p: expected a number from 0 to 1, found {top_p}")
        self.temperature = temperature
        self.top_p = top_p
        self._random = np.random.Generator(np.random.PCG64(None if seed is None else seed % _SEEDS))

    def pick(self, logits: F32, limit: int) -> int:
        """One of the ids below ``limit`` by logits [V]; among equals the lower id goes first. MimoError for NaN."""
        assert 0 < limit <= logits.shape[-1] and logits.ndim == 1
        row = logits[:limit]
        best = int(np.argmax(row))  # the lowest id of the largest; a NaN counts as the largest
        if not math.isfinite(row[best]):
            raise MimoError(f"the logits can't be sampled from: token {best} has {row[best]}")
        if self.temperature == 0:
            return best
        return self._draw(*self._candidates(self._weights(row, best)))

    def _weights(self, row: F32, best: int) -> F32:
        """Probabilities up to a factor: exp((logit - largest)/temperature), so the best has 1."""
        with np.errstate(over="ignore"):  # a tiny temperature takes all others to -infinity
            scaled = ((row.astype(np.float64) - float(row[best])) / self.temperature).astype(np.float32)
        weights = np.zeros_like(scaled)
        alive = np.flatnonzero(scaled >= _UNDERFLOW)
        weights[alive] = exp(scaled[alive])
        return weights

    def _candidates(self, weights: F32) -> tuple[Indices, F64]:
        """The ids that may be drawn and their running sums: all by id, or the top-p set best first."""
        total = float(np.cumsum(weights, dtype=np.float64)[-1])
        if self.top_p == 1:
            ids = np.flatnonzero(weights)
            return ids, np.cumsum(weights[ids], dtype=np.float64)
        for floor in _FLOORS:  # what lies above a floor is the head of the full order, so its sums are the same
            ids = np.flatnonzero(weights > floor)
            ids = ids[np.argsort(-weights[ids], kind="stable")]
            sums = np.cumsum(weights[ids], dtype=np.float64)
            if sums[-1] >= self.top_p * total:
                break
        kept = min(int(np.searchsorted(sums, self.top_p * total)) + 1, len(ids))
        return ids[:kept], sums[:kept]

    def _draw(self, ids: Indices, sums: F64) -> int:
        point = self._random.random() * sums[-1]
        return int(ids[min(int(np.searchsorted(sums, point, side="right")), len(ids) - 1)])


def log_softmax(logits: F32, limit: int) -> F64:
    """Log-probabilities in float64 of raw logits [..., V] over the ids below ``limit``: [..., limit]."""
    row = logits[..., :limit].astype(np.float64)
    row -= row.max(axis=-1, keepdims=True)
    return row - np.log(np.exp(row).sum(axis=-1, keepdims=True))
