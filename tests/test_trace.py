"""The cache and the tier on what the shipped model's tokens really used: tests/data/demo_trace.npz."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk.experts import ExpertCache
from mimo_vk.vulkan.tier import Tier
from tests.expert_disk import LAYERS, contiguous
from tests.test_vulkan_tier import FakeClient
from tools.trace_experts import PATH, Trace, replay, table

SLOTS = 48  # of the 160 experts


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.load()


def test_the_file_is_small_and_whole(trace):
    assert PATH.stat().st_size < 300_000
    assert trace.rows.sum() == len(trace.experts)
    assert (np.diff(np.sort(trace.experts, axis=2), axis=2) > 0).all(), "an expert twice for one token"
    assert trace.experts.max() == trace.count - 1, "some expert is never used"


def test_as_many_experts_as_the_release_has_are_stored_and_tabled(tmp_path: Path):
    chosen = np.array([[[0, 1, 2, 3, 4, 5, 6, 255]]] * 2, np.uint8)
    Trace(chosen, np.array([1, 1], np.uint16), np.array([1], np.uint8), 256).save(tmp_path / "trace.npz")
    read = Trace.load(tmp_path / "trace.npz")
    assert (read.count, read.experts.tolist()) == (256, chosen.tolist())
    assert [line.split("|")[0].strip() for line in table(read).splitlines()[1:]] == [
        f"{cap} of 256" for cap in (8, 32, 64, 96, 128, 160, 192, 224, 256)
    ]
    assert "| 50.0%" in table(read)  # missed by the first of two tokens, found by the second


def test_the_cache_does_as_its_policy_says(trace, tmp_path: Path):
    """Two layers of the trace on real files: as many hits and misses as the policy replayed by itself has."""
    part = Trace(trace.experts[:, :2], trace.rows, np.array(LAYERS, np.uint8), trace.count)
    cap, hits, misses = 12, 0, 0
    with ExpertCache(contiguous(tmp_path, part.count).table, cap) as cache:
        for n, by_layer in part.passes():
            before = cache.stats.hits, cache.stats.misses
            for layer, experts in by_layer.items():
                held = cache.resident(layer)
                ordered = sorted(experts, key=lambda e: e not in held) if len(experts) > cap else experts
                for i in range(0, len(ordered), cap):
                    with cache.lease(layer, ordered[i : i + cap]) as arriving:
                        assert sum(len(batch) for batch in arriving) == len(ordered[i : i + cap])
            if n == 1:
                hits, misses = hits + cache.stats.hits - before[0], misses + cache.stats.misses - before[1]
    assert (hits, misses) == replay(part, cap)


def test_a_larger_cache_is_never_worse_and_a_whole_one_always_hits(trace):
    rates = []
    for cap in (4, 8, 16, 24, 32):
        hits, misses = replay(trace, cap)
        rates.append(hits / (hits + misses))
    assert rates == sorted(rates)
    assert rates[-1] > 0.999
    assert all(rate > cap / trace.count for rate, cap in zip(rates[:-1], (4, 8, 16, 24), strict=True)), rates


def on_the_device(trace: Trace, tier: Tier) -> tuple[int, Counter[tuple[int, int]]]:
    """Replay the passes through the tier: how many uses while generating it served, and how often each was used."""
    served, used = 0, Counter[tuple[int, int]]()
    for n, by_layer in trace.passes():
        for layer, experts in by_layer.items():
            slots = tier.slots(layer).copy()
            if n == 1:
                served += sum(int(slots[e]) >= 0 for e in experts)
                used.update((layer, e) for e in experts)
            tier.used(layer, experts)
            for expert in experts:
                if slots[expert] < 0:
                    weights: Any = (layer, expert)
                    tier.offer(layer, expert, weights)
    return served, used


def test_the_tier_holds_nearly_the_best_experts(trace):
    """It serves at least nine tenths of what the set that is best in hindsight would have, with few uploads."""
    tier = Tier(FakeClient(SLOTS), {int(layer): trace.count for layer in trace.layers}, rate=4)  # type: ignore[arg-type]
    served, used = on_the_device(trace, tier)
    best = sum(count for _, count in used.most_common(SLOTS))
    total = used.total()
    assert best > 1.2 * total * SLOTS / (trace.count * len(trace.layers)), "hot and cold experts exist"
    assert served > 0.9 * best, (served, best, total)
    assert tier.stats.uploads < 0.2 * served
