"""Choosing a token: against a slow, plain reading of the definition, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_fallback.elementary import exp
from mimo_vk.errors import MimoError, UsageError
from mimo_vk.sampling import Sampler, log_softmax


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def draws(sampler: Sampler, logits: np.ndarray, count: int, limit: int | None = None) -> list[int]:
    return [sampler.pick(logits, len(logits) if limit is None else limit) for _ in range(count)]


def plain_pick(logits: np.ndarray, temperature: float, top_p: float, u: float) -> int:
    """The definition, one id at a time."""
    best = float(logits.max())
    scaled = np.array([(float(x) - best) / temperature for x in logits], np.float32)
    weights = [float(w) for w in exp(scaled)]
    total = 0.0
    for weight in weights:
        total += weight
    order = list(range(len(weights)))
    if top_p < 1:
        order.sort(key=lambda i: (-weights[i], i))
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i]
        if top_p < 1 and mass >= top_p * total:
            break
    point, running = u * mass, 0.0
    for i in kept:
        running += weights[i]
        if running > point:
            return i
    return kept[-1]


def test_greedy_takes_the_lowest_id_among_equals_below_the_limit() -> None:
    logits = row(1, 5, 5, 2, 9, 9)
    assert Sampler().pick(logits, 6) == 4
    assert Sampler().pick(logits, 4) == 1
    assert Sampler().pick(row(-math.inf, -3, -3), 3) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_without_meaning_are_an_error_that_names_the_token(temperature: float, bad: float) -> None:
    with pytest.raises(MimoError, match="token 2 has"):
        Sampler(temperature, seed=1).pick(row(1, 2, bad, 0), 4)
    assert Sampler(temperature, 0.0, seed=1).pick(row(1, 2, bad, 0), 2) == 1  # beyond the limit nothing is looked at


def test_nothing_finite_is_an_error() -> None:
    with pytest.raises(MimoError):
        Sampler().pick(row(-math.inf, -math.inf), 2)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((t, 1.0), "temperature") for t in (-0.1, math.nan, math.inf)]
    + [((1.0, p), "top_p") for p in (-0.1, 1.1, math.nan)],
)
def test_values_that_can_not_be_used_are_named(arguments: tuple[float, float], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        Sampler(*arguments)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 0.9999999, 1.0]),
    st.integers(0, 2**32),
)
def test_a_draw_is_the_definition(values: list[int], temperature: float, top_p: float, seed: int) -> None:
    """Few distinct values, so that ties are common."""
    logits = (np.array(values, np.float32) / 4).astype(np.float32)
    sampler, random = Sampler(temperature, top_p, seed), np.random.Generator(np.random.PCG64(seed))
    for _ in range(5):
        assert sampler.pick(logits, len(logits)) == plain_pick(logits, temperature, top_p, random.random())


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = np.array([0.5, 0.2, 0.2, 0.1])
    logits = np.log(probabilities).astype(np.float32)
    counts = np.bincount(draws(Sampler(1.0, 1.0, 7), logits, 20000), minlength=4) / 20000
    assert np.abs(counts - probabilities).max() < 5 * math.sqrt(0.25 / 20000)
    counts = np.bincount(draws(Sampler(2.0, 1.0, 7), logits, 20000), minlength=4) / 20000
    flatter = np.sqrt(probabilities) / np.sqrt(probabilities).sum()
    assert np.abs(counts - flatter).max() < 5 * math.sqrt(0.25 / 20000)


def test_top_p_keeps_the_smallest_set_and_the_lower_id_of_equals() -> None:
    logits = np.log(np.array([0.2, 0.5, 0.2, 0.1])).astype(np.float32)
    assert set(draws(Sampler(1.0, 0.4, 3), logits, 200)) == {1}
    assert set(draws(Sampler(1.0, 0.6, 3), logits, 500)) == {0, 1}
    assert set(draws(Sampler(1.0, 0.8, 3), logits, 500)) == {0, 1, 2}
    assert set(draws(Sampler(1.0, 0.0, 3), logits, 50)) == {1}


def test_ids_from_the_limit_on_are_never_drawn() -> None:
    logits = np.zeros(64, np.float32)
    logits[40:] = 50
    assert max(draws(Sampler(1.0, 0.99, 5), logits, 400, limit=40)) < 40


def test_a_seed_repeats_and_seeds_differ() -> None:
    logits = np.random.default_rng(0).normal(size=500).astype(np.float32)
    first = draws(Sampler(1.0, 0.9, 11), logits, 50)
    assert draws(Sampler(1.0, 0.9, 11), logits, 50) == first
    assert draws(Sampler(1.0, 0.9, 12), logits, 50) != first
    assert draws(Sampler(1.0, 0.9, -1), logits, 5) == draws(Sampler(1.0, 0.9, 2**64 - 1), logits, 5)


def test_a_tiny_temperature_is_the_best_id() -> None:
    assert set(draws(Sampler(5e-324, 1.0, 1), row(3, 1, 3.0000002, 2), 20)) == {2}


def test_log_softmax_against_plain_float64() -> None:
    logits = np.random.default_rng(1).normal(scale=30, size=(3, 50)).astype(np.float32)
    for found, values in zip(log_softmax(logits, 40), logits, strict=True):
        top = max(float(x) for x in values[:40])
        total = math.fsum(math.exp(float(x) - top) for x in values[:40])
        expected = [float(x) - top - math.log(total) for x in values[:40]]
        assert np.abs(found - np.array(expected)).max() < 1e-12
    assert log_softmax(logits, 40).dtype == np.float64
