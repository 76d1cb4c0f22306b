"""The picture tower: patches to the rows that stand in the prompt for a picture, top to bottom.

A vision transformer of pre-norm blocks over the patches of one picture. Attention is grouped-query with two-dimensional
rotary angles: full in some blocks, in the others over a window of the sequence, which runs along the rows of merge
units (2x2 patches) or, in a run of blocks, along their columns. Each window block's heads have a sink logit. At the
end the patches of a unit are joined and become one row.

Everything numeric goes through ``ops``; ``n`` is the number of patches. Work that goes row by row is done some rows at
a time, so that a large picture needs little memory beside its keys and values, and can be stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from mimo_vk.formats import F32
from mimo_vk.ops import Index, SinkReading, VisionOps
from mimo_vk.rope import RopeTable
from mimo_vk.vision_config import COLUMNS, FULL, VisionConfig
from mimo_vk.vision_weights import BiasedMatrix, VisionBlock, VisionWeights

ROWS = 256  # patches that go through a product together
Angles = tuple[F32, F32]  # cos and sin, each [n, head_dim/2]


class PatchRows(Protocol):
    """A picture as the processor cuts it (see ``mimo_vk.image.Patches``)."""

    @property
    def pixels(self) -> F32:
        """[n, numbers in a patch], unit by unit."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""


class Steps:
    """Calls ``checkpoint`` between pieces of work and tells how many of them are done."""

    def __init__(
        self, total: int, on_progress: Callable[[int, int], None] | None, checkpoint: Callable[[], None] | None
    ) -> None:
        self.done, self.total, self.on_progress, self.checkpoint = 0, total, on_progress, checkpoint

    def slices(self, n: int) -> Iterator[slice]:
        """n rows, ROWS at a time."""
        for first in range(0, n, ROWS):
            if self.checkpoint is not None:
                self.checkpoint()
            yield slice(first, min(first + ROWS, n))
            self.done += min(ROWS, n - first)
            if self.on_progress is not None:
                self.on_progress(self.done, self.total)


class VisionTower:
    """The weights bound to a backend and to a reading of the sinks. Holds no state of any picture."""

    def __init__(self, weights: VisionWeights, ops: VisionOps, sink: SinkReading) -> None:
        self.weights, self.ops, self.sink = weights, ops, sink
        self._rope = RopeTable(weights.config.rope_theta, weights.config.head_dim // 2)

    def forward(
        self,
        patches: PatchRows,
        on_progress: Callable[[int, int], None] | None = None,
        checkpoint: Callable[[], None] | None = None,
    ) -> F32:
        """The picture's rows [units, out_hidden_size], in the order of its patches' units.

        ``on_progress`` is told the pieces of work that are done and how many there are; ``checkpoint`` is called before
        each and may raise to stop the work.
        """
        config, grid = self.weights.config, patches.grid
        n = grid[0] * grid[1]
        assert patches.pixels.shape == (n, config.patch_values), (patches.pixels.shape, grid)
        assert n and grid[0] % config.merge_size == grid[1] % config.merge_size == 0, grid
        pieces = n * (2 * len(config.block_types) + 1) + n // config.merge_unit
        steps = Steps(pieces, on_progress, checkpoint)
        by_rows, to_columns = self.angles(grid), column_order(grid, config)
        by_columns = by_rows[0][to_columns], by_rows[1][to_columns]
        x = self._embed(patches.pixels, steps)
        turned = False
        for block in self.weights.blocks:
            if turned != (block.kind == COLUMNS):
                x = x[np.argsort(to_columns)] if turned else x[to_columns]
                turned = not turned
            self._block(block, x, by_columns if turned else by_rows, steps)
        return self._merge(x[np.argsort(to_columns)] if turned else x, steps)

    def angles(self, grid: tuple[int, int]) -> Angles:
        """Each patch's row, then its column, times theta^(-2j/(head_dim/2)), in the patches' order."""
        row, column = positions(grid, self.weights.config.merge_size)
        cos, sin = self._rope.rows(0, max(grid))
        return np.concatenate([cos[row], cos[column]], axis=1), np.concatenate([sin[row], sin[column]], axis=1)

    def _embed(self, pixels: F32, steps: Steps) -> F32:
        x = np.empty((len(pixels), self.weights.config.hidden_size), np.float32)
        for rows in steps.slices(len(x)):
            x[rows] = self.ops.linear(self.weights.patch_embed, pixels[rows])
        return x

    def _block(self, block: VisionBlock, x: F32, angles: Angles, steps: Steps) -> None:
        """x += attention(norm1 x); x += mlp(norm2 x), in place."""
        ops, config = self.ops, self.weights.config
        q, k, v = self._project(block, x, angles, steps)
        reach = None if block.kind == FULL else config.reach
        for rows in steps.slices(len(x)):
            mixed = ops.patch_attention(q[rows], k, v, rows.start, reach, block.sinks, self.sink)
            here = ops.add(x[rows], self._linear(block.proj, mixed))
            x[rows] = ops.add(here, self._mlp(block, ops.rms_norm(here, block.norm2, config.norm_eps)))

    def _project(self, block: VisionBlock, x: F32, angles: Angles, steps: Steps) -> tuple[F32, F32, F32]:
        """Turned queries [n, heads, hd] and keys [n, kv, hd], and values [n, kv, hd]."""
        ops, config = self.ops, self.weights.config
        q = np.empty((len(x), config.num_heads, config.head_dim), np.float32)
        k = np.empty((len(x), config.num_kv_heads, config.head_dim), np.float32)
        v = np.empty_like(k)
        for rows in steps.slices(len(x)):
            qkv = self._linear(block.qkv, ops.rms_norm(x[rows], block.norm1, config.norm_eps))
            some_q, some_k, v[rows] = ops.split_qkv(qkv, config.layout, 1.0)
            cos, sin = angles[0][rows], angles[1][rows]
            q[rows], k[rows] = ops.rope(some_q, cos, sin), ops.rope(some_k, cos, sin)
        return q, k, v

    def _mlp(self, block: VisionBlock, y: F32) -> F32:
        return self._linear(block.down, self.ops.swiglu(self._linear(block.gate, y), self._linear(block.up, y)))

    def _merge(self, x: F32, steps: Steps) -> F32:
        """LayerNorm each patch, join each unit's, Linear, GELU, Linear."""
        ops, weights, config = self.ops, self.weights, self.weights.config
        out = np.empty((len(x) // config.merge_unit, config.out_hidden_size), np.float32)
        joined = x.reshape(len(out), -1)
        for rows in steps.slices(len(out)):
            patches = joined[rows].reshape(-1, config.hidden_size)
            y = ops.layer_norm(patches, weights.merger_norm, config.norm_eps).reshape(-1, joined.shape[1])
            out[rows] = ops.linear(weights.merger_down, ops.gelu(ops.linear(weights.merger_up, y)))
        return out

    def _linear(self, part: BiasedMatrix, x: F32) -> F32:
        return self.ops.add_row(self.ops.linear(part.matrix, x), part.bias)


def positions(grid: tuple[int, int], merge: int) -> tuple[Index, Index]:
    """Row and column of each patch of the picture, unit by unit, in a unit row by row: int32 [n] each."""
    shape = grid[0] // merge, merge, grid[1] // merge, merge
    row = np.arange(grid[0], dtype=np.int32).reshape(shape[0], merge, 1, 1)
    column = np.arange(grid[1], dtype=np.int32).reshape(1, 1, shape[2], merge)

    def by_unit(a: Index) -> Index:
        return np.broadcast_to(a, shape).transpose(0, 2, 1, 3).reshape(-1)

    return by_unit(row), by_unit(column)


def column_order(grid: tuple[int, int], config: VisionConfig) -> Index:
    """Which patch stands where when the units go column by column; a unit's patches keep their order: int32 [n]."""
    unit = config.merge_unit
    units = np.arange(grid[0] * grid[1] // unit, dtype=np.int32)
    turned = units.reshape(grid[0] // config.merge_size, grid[1] // config.merge_size).T.reshape(-1, 1)
    return (turned * unit + np.arange(unit)).reshape(-1).astype(np.int32)
