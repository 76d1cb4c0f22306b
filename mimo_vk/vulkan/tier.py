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
        most = max(experts.values())
        self._scores = np.zeros((max(experts) + 1, most))  # by layer and expert
        self._slot_of = np.full(self._scores.shape, -1, np.int32)
        self._owner = np.zeros((self.limit, 2), np.int32)  # layer and expert of each slot
        self._coldest: tuple[int, float] | None = None  # a slot, and the score that made it the coldest
        self.resident = 0  # experts on the device: slots in use
        self._weight = 1.0  # of a use now; it grows instead of all counts shrinking
        self._last_layer = -1

    @property
    def gone(self) -> bool:
        """Whether the device is lost, or closed."""
        return bool(self.client.gone)

    def used(self, layer: int, experts: Sequence[int]) -> None:
        """Count a layer's experts of a forward pass. Layers come in increasing order; a smaller one starts a pass."""
        if layer <= self._last_layer:
            self._left = self._rate
            self._weight *= 2.0 ** (1 / HALF_LIFE)
            if self._weight > LARGEST_WEIGHT:
                self._rescale()
        self._last_layer = layer
        self._scores[layer, experts] += self._weight

    def slots(self, layer: int) -> Index:
        """Each expert's slot on the device, -1 for none. A view: uploads change it."""
        return self._slot_of[layer]

    def offer(self, layer: int, expert: int, weights: Expert) -> bool:
        """Take an expert that was just computed, if it is hot enough and there is time; whether it was taken.

        Errors: TierGone.
        """
        if self.gone or self._left <= 0 or self._slot_of[layer][expert] >= 0 or not self.client.can_upload:
            return False
        slot = self._slot_for(self._scores[layer, expert])
        if slot is None:
            return False
        self.client.upload(weights, slot)
        if slot < self.resident:
            self._slot_of[tuple(self._owner[slot])] = -1
        self.resident = max(self.resident, slot + 1)
        self._owner[slot] = layer, expert
        self._slot_of[layer, expert] = slot
        self._coldest = None
        self._left -= 1
        self.stats.uploads += 1
        return True

    def count(self, stats: Stats) -> None:
        """Write the tier's counters into the engine's."""
        stats.tier_slots, stats.tier_resident = (0, 0) if self.gone else (self.limit, self.resident)
        stats.tier_hits, stats.tier_uploads = self.stats.hits, self.stats.uploads
        stats.parts["device"] = self.stats.wait_seconds

    def _slot_for(self, score: float) -> int | None:
        """A free slot, or the coldest expert's if it is cold enough."""
        if self.resident == self.client.slots < self.limit and self.client.grow() == self.resident:
            log.warning("the device has room for %d experts of the %d asked for", self.client.slots, self.limit)
            self.limit = self.client.slots
        if self.resident < self.client.slots:
            return self.resident
        slot, coldest = self._find_coldest()
        return slot if score > coldest + HOTTER_BY * self._weight else None

    def _find_coldest(self) -> tuple[int, float]:
        """The slot with the lowest score. Scores only grow, so it stays the coldest until its own score changes."""
        if self._coldest is None or self._scores[tuple(self._owner[self._coldest[0]])] != self._coldest[1]:
            scores = self._scores[self._owner[: self.resident, 0], self._owner[: self.resident, 1]]
            slot = int(scores.argmin())
            self._coldest = slot, float(scores[slot])
        return self._coldest

    def _rescale(self) -> None:
        self._scores /= self._weight
        self._weight = 1.0
        self._coldest = None

    def drop(self, error: TierGone) -> None:
        """The device is lost: hold nothing from now on, and say so once."""
        self.resident = 0
        self._slot_of.fill(-1)
        self.client.drop(error)

    def close(self) -> None:
        """End the device process."""
        self.client.close()
