"""The KV cache: full rows for full-attention layers, a ring of the window's length for sliding-window layers.

A block's keys and values are staged layer by layer and written together when the whole block has been
computed. A block that fails half way (an unreadable expert, a cancelled request) therefore leaves the cache as it was,
and attention reads a ring's older rows before the block overwrites them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mimo_vk.config import Config
from mimo_vk.errors import MimoError
from mimo_vk.formats import F32

NO_ID = -1  # in the place of a picture's ids: no prompt of ids alone goes on from its rows


class RowsLost(MimoError):
    """Rows of the live state are gone with the device that held them: ``forget``, and read its ids again."""


class LayerCache:
    """One layer's float32 keys [kv, rows, head_dim] and values [kv, rows, v_head_dim]; position p in row p mod rows."""

    def __init__(self, num_kv_heads: int, rows: int, head_dim: int, v_head_dim: int) -> None:
        # Untouched pages of zeros cost no memory: a long context is paid for as it fills.
        self.keys: F32 = np.zeros((num_kv_heads, rows, head_dim), dtype=np.float32)
        self.values: F32 = np.zeros((num_kv_heads, rows, v_head_dim), dtype=np.float32)

    def write(self, start: int, k: F32, v: F32) -> None:
        """Store k [n, kv, head_dim], v [n, kv, v_head_dim] from position ``start``; of a long block the last rows."""
        rows = self.keys.shape[1]
        skip = max(0, len(k) - rows)
        at = np.arange(start + skip, start + len(k)) % rows
        self.keys[:, at] = k[skip:].transpose(1, 0, 2)
        self.values[:, at] = v[skip:].transpose(1, 0, 2)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state to come back to: its ids, the logits [1, V] after the last one, a copy of every window layer's ring.

    The full layers' rows stay in the cache, so a snapshot is good only while the cache still holds its ids' rows.
    """

    ids: list[int]
    logits: F32
    rings: dict[int, tuple[F32, F32]]


class KvCache:
    """All layers' caches for up to ``capacity`` positions; ``length`` of them are the live state.

    ``row_ids`` names the token whose keys each full row holds; rows beyond the live state keep what was last written,
    which is what makes a snapshot worth resuming.
    """

    def __init__(self, config: Config, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.row_ids: list[int] = []
        self._windows = [spec.index for spec in config.layers if spec.window]
        self.layers = [
            LayerCache(spec.num_kv_heads, spec.window or capacity, spec.head_dim, spec.v_head_dim)
            for spec in config.layers
        ]
        self._staged: list[tuple[F32, F32]] = []

    def begin(self) -> int:
        """Start a block: what an unfinished one staged is forgotten. Returns the position of the block's first row."""
        self._staged.clear()
        return self.length

    def stage(self, k: F32, v: F32) -> None:
        """Keep the next layer's keys and values of the block until ``commit``."""
        self._staged.append((k, v))

    def commit(self, ids: list[int]) -> None:
        """Write the staged block ``ids`` of every layer and move on by its rows.

        Where other ids stood there, the rows beyond were read after those, and belong to no state any more.
        """
        assert len(self._staged) == len(self.layers), "a block is committed when every layer has staged its rows"
        assert self.length + len(ids) <= self.capacity, "the session checks the context before it feeds"
        for layer, (k, v) in zip(self.layers, self._staged, strict=True):
            layer.write(self.length, k, v)
        self._staged.clear()
        end = self.length + len(ids)
        if self.row_ids[self.length : end] != ids:
            del self.row_ids[self.length :]
        self.row_ids[self.length : end] = ids
        self.length = end

    @property
    def ids(self) -> list[int]:
        """The token ids of the live state."""
        return self.row_ids[: self.length]

    def rewind(self) -> None:
        """Go back to the empty state. Memory and rows stay, for snapshots whose ids they hold."""
        self._staged.clear()
        self.length = 0

    def forget(self) -> None:
        """Go back to the empty state, and to rows that no snapshot can resume from."""
        self.rewind()
        self.row_ids.clear()

    def snapshot(self, logits: F32) -> Snapshot:
        """The live state, with the logits [1, V] at its end."""
        rings = {i: (self.layers[i].keys.copy(), self.layers[i].values.copy()) for i in self._windows}
        return Snapshot(self.ids, logits, rings)

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether the full rows of the snapshot's ids are still here."""
        return self.row_ids[: len(snapshot.ids)] == snapshot.ids

    def restore(self, snapshot: Snapshot) -> None:
        """Make the snapshot the live state again."""
        assert self.holds(snapshot)
        self._staged.clear()
        for i, (keys, values) in snapshot.rings.items():
            self.layers[i].keys[:] = keys
            self.layers[i].values[:] = values
        self.length = len(snapshot.ids)
