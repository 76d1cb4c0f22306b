"""The pictures that the two towers are compared on: no torch here, the tests read this too.

Noise, not photographs: every patch differs from every other one, and the two instants of a patch differ, so that no
mix-up of rows, channels or instants can hide. Wide, tall and square, with fewer and more patches than one window
holds. ``settings`` are keys of vision_config that replace the checkpoint's: other orders of block types and another
window over the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tools.checkpoint.numbers import random_bytes

PATCH_NUMBERS = 3 * 2 * 16 * 16  # channel, instant, y, x
SEED = 6


@dataclass(frozen=True)
class Case:
    """``grid``: rows and columns of patches, twice those of the merge units."""

    name: str
    grid: tuple[int, int]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] // 4

    def pixels(self) -> NDArray[np.float32]:
        """[patches, 1536], evenly spread over -2..2 like what the processor makes of a picture: the same everywhere."""
        patches = self.grid[0] * self.grid[1]
        raw = random_bytes(SEED, f"pixels {self.name}", patches * PATCH_NUMBERS)
        return ((raw.astype(np.float32) - np.float32(127.5)) / np.float32(64)).reshape(patches, PATCH_NUMBERS)


CASES = (
    Case("wide", (12, 40)),  # 6 x 20 merge units, 480 patches, a window of 129
    Case("tall", (40, 12)),
    Case("square", (18, 18)),
    Case("unit", (2, 2)),  # one merge unit: every patch inside the window
    Case("columns", (10, 16), {"vit_window_attn_types": [-1, 1, 1, -1], "visual_token_window_size": 21}),
    Case("leaving", (16, 10), {"vit_window_attn_types": [-1, 1, 0, -1], "visual_token_window_size": 5}),
)
SINKS: tuple[Literal["key0", "denominator"], ...] = ("key0", "denominator")
