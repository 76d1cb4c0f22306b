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
_BLOCK = 8192  # elements at a time, so that what exp needs in between stays in the CPU's cache
_STEP_SHIFT = 20  # keeps the sign, the exponent and three bits of the fraction
_MARGIN = 1 + 1e-9  # more than the rounding of a sum in another order


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
        largest = float(row[best])
        weights = np.empty_like(row)
        with np.errstate(over="ignore"):  # a tiny temperature takes all others to -infinity
            for at in range(0, len(row), _BLOCK):
                scaled = (row[at : at + _BLOCK].astype(np.float64) - largest) / self.temperature
                weights[at : at + _BLOCK] = exp(scaled.astype(np.float32))
        return weights

    def _candidates(self, weights: F32) -> tuple[Indices, F64]:
        """The ids that may be drawn and their running sums: all by id, or the top-p set best first."""
        sums = np.cumsum(weights, dtype=np.float64)
        if self.top_p == 1:
            return np.arange(len(weights)), sums
        wanted = self.top_p * float(sums[-1])
        for floor in (_floor(weights, wanted), 0.0):
            # What lies above a floor is the head of the full order, so its running sums are the full order's.
            ids = np.flatnonzero(weights >= floor)
            ids = ids[np.argsort(-weights[ids], kind="stable")]
            sums = np.cumsum(weights[ids], dtype=np.float64)
            if sums[-1] >= wanted:
                break
        kept = min(int(np.searchsorted(sums, wanted)) + 1, len(ids))
        return ids[:kept], sums[:kept]

    def _draw(self, ids: Indices, sums: F64) -> int:
        point = min(self._random.random() * sums[-1], np.nextafter(sums[-1], 0))
        return int(ids[np.searchsorted(sums, point, side="right")])  # the first sum above: never an id of weight 0


def _floor(weights: F32, wanted: float) -> float:
    """A weight such that what lies from there up adds to ``wanted`` but for rounding, and little more does.

    Weights are counted into steps of an eighth of an octave by the upper bits of the float, whose order is theirs.
    """
    steps = weights.view(np.int32) >> _STEP_SHIFT
    mass = np.cumsum(np.bincount(steps, weights)[::-1])
    step = len(mass) - 1 - min(int(np.searchsorted(mass, wanted * _MARGIN)), len(mass) - 1)
    return float(np.array(step << _STEP_SHIFT, np.int32).view(np.float32))


def log_softmax(logits: F32, limit: int) -> F64:
    """Log-probabilities in float64 of raw logits [..., V] over the ids below ``limit``: [..., limit]."""
    row = logits[..., :limit].astype(np.float64)
    row -= row.max(axis=-1, keepdims=True)
    return row - np.log(np.exp(row).sum(axis=-1, keepdims=True))
