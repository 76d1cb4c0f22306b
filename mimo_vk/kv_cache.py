"""The KV cache: full rows for full-attention layers, a ring of the window's length for sliding-window layers.

A block's keys and values are staged layer by layer and written together when the whole block has been
computed. A block that fails half way (an unreadable expert, a cancelled request) therefore leaves the cache as it was,
and attention reads a ring's older rows before the block overwrites them.
"""

from __future__ import annotations

import numpy as np

from mimo_vk.config import Config
from mimo_vk.formats import F32


class LayerCache:
    """One layer's keys [kv, rows, head_dim] and values [kv, rows, v_head_dim], float32; position p in row p mod rows."""

    def __init__(self, num_kv_heads: int, rows: int, head_dim: int, v_head_dim: int) -> None:
        # Untouched pages of zeros cost no memory: a long context is paid for as it fills.
        self.keys: F32 = np.zeros((num_kv_heads, rows, head_dim), dtype=np.float32)
        self.values: F32 = np.zeros((num_kv_heads, rows, v_head_dim), dtype=np.float32)

    def write(self, start: int, k: F32, v: F32) -> None:
        """Store k [n, kv, head_dim] and v [n, kv, v_head_dim] of positions start..start+n-1; of a long block the last rows."""
        rows = self.keys.shape[1]
        skip = max(0, len(k) - rows)
        at = np.arange(start + skip, start + len(k)) % rows
        self.keys[:, at] = k[skip:].transpose(1, 0, 2)
        self.values[:, at] = v[skip:].transpose(1, 0, 2)


class KvCache:
    """All layers' caches for up to ``capacity`` positions; ``length`` of them are filled."""

    def __init__(self, config: Config, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers = [
            LayerCache(spec.num_kv_heads, spec.window or capacity, spec.head_dim, spec.v_head_dim) for spec in config.layers
        ]
        self._staged: list[tuple[F32, F32]] = []

    def begin(self) -> int:
        """Start a block: what an unfinished one staged is forgotten. Returns the position of the block's first row."""
        self._staged.clear()
        return self.length

    def stage(self, k: F32, v: F32) -> None:
        """Keep the next layer's keys and values of the block until ``commit``."""
        self._staged.append((k, v))

    def commit(self) -> None:
        """Write the staged block of every layer and move on by its rows."""
        assert len(self._staged) == len(self.layers), "a block is committed when every layer has staged its rows"
        count = len(self._staged[0][0])
        assert self.length + count <= self.capacity, "the engine checks the context before it feeds"
        for layer, (k, v) in zip(self.layers, self._staged, strict=True):
            layer.write(self.length, k, v)
        self._staged.clear()
        self.length += count

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self._staged.clear()
        self.length = 0
