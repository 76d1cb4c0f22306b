"""Who lives on the device: the policy alone, over a device process that only keeps a list."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from mimo_vk.stats import Stats
from mimo_vk.vulkan.client import TierGone
from mimo_vk.vulkan.tier import HALF_LIFE, Tier

LAYERS = {1: 32, 2: 32}


class FakeClient:
    """Slots that exist at once up to ``slots``, and grow by ``step``; what was uploaded where."""

    def __init__(self, slots: int, limit: int | None = None, step: int = 0) -> None:
        self.slots, self.max_slots, self.step = slots, limit or slots, step
        self.held: dict[int, Any] = {}
        self.can_upload = True
        self.gone = ""
        self.dropped: list[TierGone] = []
        self.fails = False
        self.flushes = False

    def grow(self) -> int:
        self.slots = min(self.max_slots, self.slots + self.step)
        return self.slots

    def upload(self, expert: Any, slot: int) -> None:
        if self.fails:
            raise TierGone("it was unplugged")
        assert slot < self.slots
        self.held[slot] = expert

    def drop(self, error: TierGone) -> None:
        self.gone = str(error)
        self.dropped.append(error)


def forward(tier: Tier, by_layer: dict[int, list[int]]) -> None:
    """A forward pass that used these experts; the CPU offers those that aren't on the device."""
    for layer, experts in by_layer.items():
        tier.used(layer, experts)
        for expert in experts:
            if tier.slots(layer)[expert] < 0:
                tier.offer(layer, expert, (layer, expert))  # type: ignore[arg-type]


def held(tier: Tier) -> set[tuple[int, int]]:
    return {(layer, int(e)) for layer in LAYERS for e in np.flatnonzero(tier.slots(layer) >= 0)}


def make(client: FakeClient, rate: int = 100) -> Tier:
    return Tier(client, LAYERS, rate)  # type: ignore[arg-type]


def test_it_fills_as_experts_pass_by() -> None:
    client = FakeClient(6)
    tier = make(client)
    forward(tier, {1: [3, 4], 2: [5]})
    assert held(tier) == {(1, 3), (1, 4), (2, 5)}
    forward(tier, {1: [4, 7], 2: [5]})
    assert held(tier) == {(1, 3), (1, 4), (1, 7), (2, 5)}
    assert {slot: client.held[slot] for slot in range(4)} == {0: (1, 3), 1: (1, 4), 2: (2, 5), 3: (1, 7)}
    assert (tier.resident, tier.stats.uploads) == (4, 4)


def test_at_most_the_rate_in_a_pass() -> None:
    tier = make(FakeClient(20), rate=3)
    forward(tier, {1: [1, 2], 2: [1, 2]})
    assert held(tier) == {(1, 1), (1, 2), (2, 1)}
    forward(tier, {1: [1, 2], 2: [1, 2]})
    assert held(tier) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    tier = make(FakeClient(20), rate=0)
    forward(tier, {1: [1, 2]})
    assert held(tier) == set()


def test_a_hotter_expert_displaces_the_coldest() -> None:
    tier = make(FakeClient(2))
    for _ in range(5):
        forward(tier, {1: [0]})
    forward(tier, {1: [1]})
    assert held(tier) == {(1, 0), (1, 1)}
    forward(tier, {1: [9]})  # used once, as the coldest was: not hotter
    assert held(tier) == {(1, 0), (1, 1)}
    forward(tier, {1: [9]})
    forward(tier, {1: [9]})
    assert held(tier) == {(1, 0), (1, 9)}


def test_yesterdays_favourites_leave() -> None:
    tier = make(FakeClient(1))
    for _ in range(100):
        forward(tier, {1: [0]})
    for i in range(4 * HALF_LIFE):  # by then those uses count for a sixteenth
        forward(tier, {1: [20] if i % 20 == 0 else []})
        assert i > HALF_LIFE or held(tier) == {(1, 0)}
    assert held(tier) == {(1, 20)}


def test_counts_stay_finite_for_ever() -> None:
    tier = make(FakeClient(1))
    for _ in range(400 * HALF_LIFE):
        tier.used(1, [0])
    tier.used(1, [5])
    assert np.isfinite(tier._scores).all() and tier._scores[1, 0] > tier._scores[1, 5] > 0


def test_a_long_prompt_does_not_empty_it() -> None:
    tier = make(FakeClient(8))
    favourites = {1: [0, 1, 2, 3], 2: [4, 5, 6, 7]}
    for _ in range(50):
        forward(tier, favourites)
    for _ in range(40):  # blocks of a prompt whose rows between them chose every expert
        forward(tier, {1: list(range(32)), 2: list(range(32))})
    assert held(tier) == {(layer, e) for layer, ids in favourites.items() for e in ids}


def test_nothing_is_taken_while_uploads_are_under_way() -> None:
    client = FakeClient(4)
    client.can_upload = False
    tier = make(client)
    forward(tier, {1: [1]})
    assert held(tier) == set()


def test_it_grows_and_keeps_what_fitted(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(2, limit=100, step=2)
    tier = make(client)
    forward(tier, {1: [0, 1, 2]})
    assert (client.slots, tier.resident) == (4, 3)
    client.step = 0  # no memory is left
    with caplog.at_level(logging.WARNING):
        forward(tier, {1: [3, 4, 5]})
        forward(tier, {1: [6, 7]})
    assert (tier.resident, tier.limit) == (4, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "the device has room for 4 experts of the 100 asked for"
    ]


def test_a_lost_device_holds_nothing() -> None:
    client = FakeClient(4)
    tier = make(client)
    forward(tier, {1: [0, 1]})
    client.fails = True
    with pytest.raises(TierGone) as raised:
        forward(tier, {1: [2]})
    tier.drop(raised.value)
    assert tier.gone and held(tier) == set() and tier.resident == 0 and client.dropped == [raised.value]
    assert not tier.offer(1, 3, None)  # type: ignore[arg-type]


def test_what_the_counters_say_to_a_person() -> None:
    """20 + 100 + 80 uses; a tier of 30 slots, 12 of them filled; and the same once the device is lost."""
    stats = Stats(prefill_tokens=4, prefill_seconds=2.0, decode_tokens=10, decode_seconds=4.0, bytes_read=1_234_000_000)
    stats.expert_hits, stats.expert_misses, stats.parts = 100, 80, {"dense": 2.5, "device": 3.0}
    assert stats.lines()[2:] == [
        "experts: 55.6% in RAM, 44.4% on disk of 180 used; read 1.23 GB",
        "time 6.00 s: device 3.00 s, dense 2.50 s",
    ]
    stats.tier_slots, stats.tier_resident, stats.tier_hits, stats.tier_uploads = 30, 12, 20, 15
    assert stats.lines() == [
        "prompt: 4 tokens in 2.00 s (2.0/s), 0 tokens reused",
        "answer: 10 tokens in 4.00 s (2.5/s)",
        "experts: 10.0% on the device, 50.0% in RAM, 40.0% on disk of 200 used; read 1.23 GB",
        "device: holds 12 of 30 experts, 15 sent",
        "time 6.00 s: device 3.00 s, dense 2.50 s",
    ]
    stats.tier_slots = 0
    assert stats.lines()[3] == "device: lost, the experts run on the CPU"
    assert Stats().lines()[2] == "experts: none of 0 used; read 0.00 GB"


def test_the_tier_s_counters_in_the_engine_s() -> None:
    client = FakeClient(6)
    tier, stats = make(client), Stats()
    forward(tier, {1: [3, 4], 2: [5]})
    tier.stats.hits, tier.stats.wait_seconds = 7, 0.25
    tier.count(stats)
    assert (stats.tier_slots, stats.tier_resident, stats.tier_uploads, stats.tier_hits) == (6, 3, 3, 7)
    assert stats.parts == {"device": 0.25}
    tier.drop(TierGone("it was unplugged"))
    tier.count(stats)
    assert (stats.tier_slots, stats.tier_resident, stats.tier_uploads, stats.tier_hits) == (0, 0, 3, 7)
