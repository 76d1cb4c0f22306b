"""Rows and rings: what is written where, and that an unfinished block leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest

from mimo_vk.kv_cache import LayerCache


def rows_of(start: int, n: int, kv: int, dim: int) -> np.ndarray:
    """[n, kv, dim] whose every number tells its position and head."""
    position = np.arange(start, start + n, dtype=np.float32)[:, None, None]
    return position + np.arange(kv, dtype=np.float32)[None, :, None] / 8 + np.zeros(dim, dtype=np.float32)


def test_full_rows_hold_position_p_in_row_p() -> None:
    layer = LayerCache(num_kv_heads=2, rows=10, head_dim=3, v_head_dim=2)
    layer.write(0, rows_of(0, 4, 2, 3), rows_of(0, 4, 2, 2))
    layer.write(4, rows_of(4, 3, 2, 3), rows_of(4, 3, 2, 2))
    assert layer.keys[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 0]
    assert layer.keys[1, :7, 2].tolist() == [0.125, 1.125, 2.125, 3.125, 4.125, 5.125, 6.125]
    assert layer.values[1, :7, 1].tolist() == [0.125, 1.125, 2.125, 3.125, 4.125, 5.125, 6.125]


@pytest.mark.parametrize(
    ("start", "n", "expected"),
    [
        (0, 3, [0, 1, 2, -1]),
        (2, 4, [4, 5, 2, 3]),
        (0, 9, [8, 5, 6, 7]),  # longer than the ring: only the last four stay
        (7, 1, [-1, -1, -1, 7]),
    ],
)
def test_a_ring_holds_position_p_in_row_p_mod_its_length(start: int, n: int, expected: list[int]) -> None:
    layer = LayerCache(num_kv_heads=1, rows=4, head_dim=1, v_head_dim=1)
    layer.keys[:] = -1
    layer.write(start, rows_of(start, n, 1, 1), rows_of(start, n, 1, 1))
    assert layer.keys[0, :, 0].tolist() == expected
