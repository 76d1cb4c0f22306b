"""Rotary tables against numbers worked out one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mimo_vk.rope import GROW, RopeTable


@pytest.mark.parametrize(("theta", "dim"), [(1e7, 64), (1e4, 64), (1e4, 8)])
def test_tables_are_the_rounded_cosine_of_the_float32_angle(theta: float, dim: int) -> None:
    table = RopeTable(theta, dim)
    for start, n in ((0, 3), (GROW - 1, 2), (5000, 1)):
        cos, sin = table.rows(start, n)
        assert cos.shape == sin.shape == (n, dim // 2)
        for row in range(n):
            for i in range(dim // 2):
                exponent = np.float32(np.float32(2 * i) / np.float32(dim))
                inv_freq = np.float32(1) / np.float32(math.pow(theta, float(exponent)))
                angle = float(np.float32(start + row) * inv_freq)
                assert cos[row, i] == np.float32(math.cos(angle)), (start + row, i)
                assert sin[row, i] == np.float32(math.sin(angle)), (start + row, i)


def test_position_zero_does_not_turn() -> None:
    cos, sin = RopeTable(1e4, 8).rows(0, 1)
    assert cos.tolist() == [[1.0] * 4]
    assert sin.tolist() == [[0.0] * 4]


def test_growing_does_not_change_what_was_there() -> None:
    grown, whole = RopeTable(1e7, 64), RopeTable(1e7, 64)
    early = [table.copy() for table in grown.rows(0, 10)]
    grown.rows(3 * GROW, 5)
    for before, after, direct in zip(early, grown.rows(0, 10), whole.rows(0, 10), strict=True):
        assert before.tobytes() == after.tobytes() == direct.tobytes()
