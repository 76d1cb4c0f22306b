"""The KV cache of a model with layers on the device: their rows live there, everyone else's in this process.

The device has room for one state's rows. A cache that begins a block while another one's are there takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mimo_vk.config import Config
from mimo_vk.formats import F32
from mimo_vk.kv_cache import KvCache, RowsLost, Snapshot
from mimo_vk.vulkan.dense_device import DenseDevice, SavedRings

UNKNOWN_ID = -2  # in the place of a row's id while its keys are being overwritten: no token and no picture


@dataclass(frozen=True, eq=False)
class DeviceSnapshot(Snapshot):
    """A snapshot whose device layers' rings were saved on the device (None: there was no room, or no device)."""

    on_device: bool
    saved: SavedRings | None


class DeviceKvCache(KvCache):
    """``KvCache`` where the rows of some layers are the device's, as long as there is one."""

    def __init__(self, config: Config, capacity: int, device: DenseDevice) -> None:
        super().__init__(config, capacity)
        self._device = device
        self._all_windows = self._windows
        self.on_device = False  # whether the live state has rows there
        self._overwritten: list[int] | None = None  # the ids that stood where the block writes on the device

    def begin(self) -> int:
        """As ``KvCache.begin``. Errors: RowsLost where the device no longer holds this state's rows."""
        usable = not self._device.gone
        if self.on_device != usable or (usable and self._device.holder is not self):
            if self.length:
                raise RowsLost
            self.forget()
            self.on_device = usable
            self._windows = [i for i in self._all_windows if not usable or i not in self._device.layers]
            if usable:
                self._device.take(self)
        self._overwritten = None
        return super().begin()

    def stage_on_device(self, layer: int, rows: int) -> None:
        """The next layer's rows of the block are written on the device at once, ``rows`` of them from ``length`` on."""
        here = slice(self.length, self.length + rows)
        if self._overwritten is None:
            self._overwritten = self.row_ids[here]
        self.row_ids[here] = [UNKNOWN_ID] * rows
        cache = self.layers[layer]
        self.stage(*(np.empty((0, a.shape[0], a.shape[2]), np.float32) for a in (cache.keys, cache.values)))

    def commit(self, ids: list[int]) -> None:
        """As ``KvCache.commit``."""
        if self._overwritten is not None:
            self.row_ids[self.length : self.length + len(ids)] = self._overwritten
            self._overwritten = None
        super().commit(ids)

    def snapshot(self, logits: F32) -> DeviceSnapshot:
        """As ``KvCache.snapshot``."""
        saved = self._device.save(self.length) if self._held() else None
        base = super().snapshot(logits)
        return DeviceSnapshot(base.ids, base.logits, base.rings, self.on_device, saved)

    def holds(self, snapshot: Snapshot) -> bool:
        """As ``KvCache.holds``: also whether the device still has what it saved."""
        assert isinstance(snapshot, DeviceSnapshot)
        if snapshot.on_device != self.on_device or not super().holds(snapshot):
            return False
        return not self.on_device or (self._held() and snapshot.saved is not None and snapshot.saved.valid)

    def restore(self, snapshot: Snapshot) -> None:
        """As ``KvCache.restore``. A device that is lost meanwhile is noticed by the next block."""
        assert isinstance(snapshot, DeviceSnapshot)
        super().restore(snapshot)
        if snapshot.saved is not None:
            self._device.restore(snapshot.saved)

    def _held(self) -> bool:
        """Whether the device has this state's rows."""
        return self.on_device and not self._device.gone and self._device.holder is self
