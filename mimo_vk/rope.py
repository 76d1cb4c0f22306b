"""Rotary tables, made on the host so that every backend turns by the same bits."""

from __future__ import annotations

import math

import numpy as np

from mimo_vk.formats import F32

GROW = 256  # positions added at a time


class RopeTable:
    """cos and sin of position*inv_freq for one theta, float32 [positions, rope_dim/2], grown as they are asked for.

    inv_freq_i = float32(1) / float32(theta ** (float32(2i)/float32(rope_dim))); the angle is a float32 product; its
    cosine and sine are taken in float64 by the C library (numpy's float32 functions differ between CPUs) and rounded.
    """

    def __init__(self, theta: float, rope_dim: int) -> None:
        exponents = [np.float32(2 * i) / np.float32(rope_dim) for i in range(rope_dim // 2)]
        powers = np.array([math.pow(theta, float(e)) for e in exponents], dtype=np.float32)
        self._inv_freq = np.float32(1) / powers
        self._cos = np.empty((0, rope_dim // 2), dtype=np.float32)
        self._sin = np.empty_like(self._cos)

    def rows(self, start: int, n: int) -> tuple[F32, F32]:
        """The tables of positions start..start+n-1, each [n, rope_dim/2]."""
        if start + n > len(self._cos):
            self._grow(-(-(start + n) // GROW) * GROW)
        return self._cos[start : start + n], self._sin[start : start + n]

    def _grow(self, length: int) -> None:
        positions = np.arange(len(self._cos), length, dtype=np.float32)
        angles = positions[:, None] * self._inv_freq
        flat = angles.ravel().tolist()
        for name, function in (("_cos", math.cos), ("_sin", math.sin)):
            new = np.array([function(a) for a in flat], dtype=np.float64).astype(np.float32).reshape(angles.shape)
            setattr(self, name, np.concatenate([getattr(self, name), new]))
