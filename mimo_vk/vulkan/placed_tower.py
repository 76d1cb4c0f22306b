"""The picture tower on the device, as long as there is one and a picture fits; what is left of it stays VisionTower's.

What the device doesn't give, because it is lost by then, the CPU computes again from the last block on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mimo_vk.formats import F32
from mimo_vk.ops import SinkReading, VisionOps
from mimo_vk.vision import Angles, Steps, VisionTower
from mimo_vk.vision_weights import VisionBlock, VisionWeights
from mimo_vk.vulkan.client import TierGone
from mimo_vk.vulkan.dense_device import DenseDevice


class PlacedTower(VisionTower):
    """``VisionTower`` beside a ``DenseDevice`` that holds its weights."""

    def __init__(self, weights: VisionWeights, ops: VisionOps, sink: SinkReading, device: DenseDevice) -> None:
        super().__init__(weights, ops, sink)
        assert device.tower is not None and (device.tower.config, device.tower.sink) == (weights.config, sink)
        self._device = device
        self._most = device.tower.patches
        self._index = {id(block): i for i, block in enumerate(weights.blocks)}

    def _embed(self, pixels: F32, steps: Steps) -> F32:
        def there() -> F32:
            out = np.empty((len(pixels), self.weights.config.hidden_size), np.float32)
            for rows in steps.slices(len(out)):
                out[rows] = self._run(["embed"], pixels[rows], rows.start, len(out), out.shape[1])
            return out

        found = self._tried(there, len(pixels), steps)
        return super()._embed(pixels, steps) if found is None else found

    def _block(self, block: VisionBlock, x: F32, angles: Angles, steps: Steps) -> None:
        index, turns = self._index[id(block)], np.concatenate(angles, axis=1)

        def there() -> F32:
            out = np.empty_like(x)
            for rows in steps.slices(len(x)):
                self._run(["keys", index], x[rows], rows.start, len(x), 0, turns[rows])
            for rows in steps.slices(len(x)):
                out[rows] = self._run(["block", index], x[rows], rows.start, len(x), x.shape[1], turns[rows])
            return out

        found = self._tried(there, len(x), steps)
        if found is None:
            super()._block(block, x, angles, steps)
        else:
            x[:] = found

    def _merge(self, x: F32, steps: Steps) -> F32:
        config = self.weights.config

        def there() -> F32:
            joined = x.reshape(-1, config.merge_unit * config.hidden_size)
            out = np.empty((len(joined), config.out_hidden_size), np.float32)
            for rows in steps.slices(len(out)):
                out[rows] = self._run(["merge"], joined[rows], rows.start, len(x), out.shape[1])
            return out

        found = self._tried(there, len(x), steps)
        return super()._merge(x, steps) if found is None else found

    def _tried(self, there: Callable[[], F32], patches: int, steps: Steps) -> F32 | None:
        """What the device gives; None where it isn't used, or is lost: then its steps are not done."""
        if self._device.gone or patches > self._most:
            return None
        done = steps.done
        try:
            return there()
        except TierGone as error:
            self._device.lost(error)
            steps.done = done
            return None

    def _run(
        self, step: list[Any], values: F32, start: int, patches: int, columns: int, turns: F32 | None = None
    ) -> F32:
        """A step over some rows; what it gives has ``columns`` columns. Errors: TierGone."""
        client, arena, rows = self._device.client, self._device.arena, len(values)
        if client.pending("tower"):  # of a picture that was given up: its rows must not come over this one's
            client.ask("tower", [], 0, 0, 0)  # an interrupt may have lost its answer, but not this one's
            client.answer("tower")
        arena.patches[:rows, : values.shape[1]] = values
        if turns is not None:
            arena.turns[:rows] = turns
        client.ask("tower", step, rows, start, patches)
        client.answer("tower")
        return arena.patches[:rows, :columns]
