"""The order of addition of ``mimo_vk/ops.py`` one float32 operation at a time, to be read against its words."""

from __future__ import annotations

import numpy as np

from mimo_vk.formats import F32, Matrix, MatrixFP8, MatrixInt8, MatrixMXFP4
from tests.matrices import scales, unscaled

F = np.float32


def tree(lanes: list[np.float32]) -> np.float32:
    """Lane l takes lane l+16, then l+8, l+4, l+2, l+1."""
    lanes = list(lanes)
    for distance in (16, 8, 4, 2, 1):
        for lane in range(distance):
            lanes[lane] = lanes[lane] + lanes[lane + distance]
    return lanes[0]


def ordered_dot(values: F32, x: F32, g: int, word_scale: F32 | None = None) -> np.float32:
    """values . x [K] in words of g; word_scale [K] is the scale of each element's block, where words have one."""
    lanes = [F(0)] * 32
    for word in range(-(-len(x) // g)):
        first = word * g
        p = F(values[first]) * F(x[first])
        for column in range(first + 1, min(first + g, len(x))):
            p = p + F(values[column]) * F(x[column])
        if word_scale is not None:
            p = p * F(word_scale[first])
        lanes[word % 32] = lanes[word % 32] + p
    return tree(lanes)


def ordered_linear(matrix: Matrix, x: F32, g: int) -> F32:
    """x [n, K] times the matrix: [n, N]."""
    values, factors = unscaled(matrix).astype(F), scales(matrix).astype(F)
    out = np.empty((len(x), len(values)), F)
    for i, row in enumerate(x):
        for j in range(len(values)):
            if isinstance(matrix, MatrixFP8 | MatrixMXFP4):
                out[i, j] = ordered_dot(values[j], row, g, factors[j])
            elif isinstance(matrix, MatrixInt8):
                out[i, j] = ordered_dot(values[j], row, g) * factors[j, 0]
            else:
                out[i, j] = ordered_dot(values[j], row, g)
    return out
