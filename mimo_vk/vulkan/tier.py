"""Which experts live on the device: they come as they pass by; the coldest goes when a hotter one wants its slot.

A forward pass counts each expert that it used once, however many rows chose it, so that a long prompt, which uses
nearly all of them, says little; and counts halve every HALF_LIFE passes, so that yesterday's favourites leave.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mimo_vk.formats import Expert
from mimo_vk.ops import Index
from mimo_vk.stats import Stats
from mimo_vk.vulkan.client import DeviceClient, TierGone

HALF_LIFE = 256  # forward passes
HOTTER_BY = 1.0  # uses: what an expert must be ahead of the coldest to displace it
LARGEST_WEIGHT = 1e100

log = logging.getLogger("mimo_vk")


@dataclass
class TierStats:
    """Counters since the start."""

    hits: int = 0  # experts that a forward pass used on the device
    uploads: int = 0
    wait_seconds: float = 0.0  # the CPU had nothing to do but wait for the device
    recomputed: int = 0  # experts whose result was not finite on the device, computed again on the CPU


class Tier:
    """The residents of one device process. After ``gone`` it holds nothing and wants nothing."""

    def __init__(self, client: DeviceClient, experts: dict[int, int], rate: int) -> None:
        """``experts``: how many each MoE layer has. ``rate``: uploads per forward pass at most."""
        self.client = client
        self.stats = TierStats()
        self.limit = client.max_slots
        self._rate = rate
        self._left = rate  # of this forward pass
        self._slot_of = {layer: np.full(count, -1, np.int32) for layer, count in experts.items()}
        self._score = {layer: np.zeros(count) for layer, count in experts.items()}
        self._owner: list[tuple[int, int]] = []  # layer and expert of each slot in use
        self._weight = 1.0  # of a use now; it grows instead of all counts shrinking
        self._last_layer = -1
        self.gone = False

    @property
    def resident(self) -> int:
        """Experts on the device."""
        return len(self._owner)

    def used(self, layer: int, experts: Sequence[int]) -> None:
        """Count a layer's experts of a forward pass. Layers come in increasing order; a smaller one starts a pass."""
        if layer <= self._last_layer:
            self._left = self._rate
            self._weight *= 2.0 ** (1 / HALF_LIFE)
            if self._weight > LARGEST_WEIGHT:
                self._rescale()
        self._last_layer = layer
        self._score[layer][list(experts)] += self._weight

    def slots(self, layer: int) -> Index:
        """Each expert's slot on the device, -1 for none. A view: uploads change it."""
        return self._slot_of[layer]

    def offer(self, layer: int, expert: int, weights: Expert) -> bool:
        """Take an expert that was just computed, if it is hot enough and there is time; whether it was taken.

        Errors: TierGone.
        """
        if self.gone or self._left <= 0 or self._slot_of[layer][expert] >= 0 or not self.client.can_upload:
            return False
        slot = self._slot_for(self._score[layer][expert])
        if slot is None:
            return False
        self.client.upload(weights, slot)
        if slot < len(self._owner):
            old_layer, old_expert = self._owner[slot]
            self._slot_of[old_layer][old_expert] = -1
            self._owner[slot] = (layer, expert)
        else:
            self._owner.append((layer, expert))
        self._slot_of[layer][expert] = slot
        self._left -= 1
        self.stats.uploads += 1
        return True

    def count(self, stats: Stats) -> None:
        """Write the tier's counters into the engine's."""
        stats.tier_slots, stats.tier_resident = 0 if self.gone else self.limit, self.resident
        stats.tier_hits, stats.tier_uploads = self.stats.hits, self.stats.uploads
        stats.parts["device"] = self.stats.wait_seconds

    def _slot_for(self, score: float) -> int | None:
        """A free slot, or the coldest expert's if it is cold enough."""
        if len(self._owner) == self.client.slots < self.limit and self.client.grow() == len(self._owner):
            log.warning("the device has room for %d experts of the %d asked for", self.client.slots, self.limit)
            self.limit = self.client.slots
        if len(self._owner) < self.client.slots:
            return len(self._owner)
        coldest = min(range(len(self._owner)), key=lambda slot: self._score_in(slot))
        return coldest if score > self._score_in(coldest) + HOTTER_BY * self._weight else None

    def _score_in(self, slot: int) -> float:
        layer, expert = self._owner[slot]
        return float(self._score[layer][expert])

    def _rescale(self) -> None:
        for scores in self._score.values():
            scores /= self._weight
        self._weight = 1.0

    def drop(self, error: TierGone) -> None:
        """The device is lost: hold nothing from now on, and say so once."""
        if not self.gone:
            self.gone = True
            log.warning("the device is no longer used: %s; going on on the CPU", error)
        self._owner.clear()
        for slots in self._slot_of.values():
            slots.fill(-1)
        self.client.close()

    def close(self) -> None:
        """End the device process."""
        self.gone = True
        self.client.close()
