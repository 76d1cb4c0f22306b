"""The picture tower's operations: numpy against definitions in float64, and the compiled twins against its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cpu_fallback import compiled_vision
from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32
from mimo_vk.ops import SinkReading
from tests.matrices import random_x
from tests.scalar_order import ordered_dot
from tests.test_compiled_rows import assert_same, wild

OPS = ReferenceOps()
F = np.float32
READINGS: tuple[SinkReading, SinkReading] = ("key0", "denominator")


@dataclass(frozen=True)
class Case:
    heads: int
    kv: int
    head_dim: int
    v_dim: int
    reach: int | None
    sink: bool


@dataclass
class Tensors:
    q: F32
    k: F32
    v: F32
    sink: F32 | None


CASES = [
    Case(4, 2, 64, 64, None, False),
    Case(4, 2, 64, 64, 5, True),
    Case(32, 8, 64, 64, 64, True),
    Case(3, 3, 33, 7, 3, True),
    Case(24, 1, 32, 20, 0, True),
    Case(6, 2, 40, 24, 1, True),
    Case(8, 4, 64, 8, None, True),
    Case(20, 1, 64, 16, 40, False),
]


def tensors(case: Case, n: int, seed: int = 1) -> Tensors:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> F32:
        return rng.standard_normal(shape).astype(F)

    sink = 2 * normal(case.heads) if case.sink else None
    q, k = 2 * normal(n, case.heads, case.head_dim), normal(n, case.kv, case.head_dim)
    return Tensors(q, k, normal(n, case.kv, case.v_dim), sink)


def wild_tensors(case: Case) -> Tensors:
    """100 rows with infinities, NaN and numbers whose products overflow among them."""
    t = tensors(case, 100, seed=5)
    assert t.sink is not None
    t.k[70, 0, 3], t.v[20, 1, 2], t.v[30, 1, 3] = np.inf, np.nan, -np.inf
    t.sink[1] = np.inf
    t.q[90] = 1e30
    return t


def float64_attention(case: Case, t: Tensors, reading: SinkReading) -> np.ndarray:
    """[n, heads*v_dim] straight from the definition."""
    n, out = len(t.q), []
    for h in range(case.heads):
        kv = h // (case.heads // case.kv)
        s = t.q[:, h].astype(np.float64) @ t.k[:, kv].astype(np.float64).T / np.sqrt(case.head_dim)
        if t.sink is not None and reading == "key0":
            s[:, 0] += t.sink[h]
        apart = np.abs(np.arange(n)[:, None] - np.arange(n))
        e = np.where(apart <= (n if case.reach is None else case.reach), np.exp(s), 0)
        total = e.sum(axis=1, keepdims=True)
        if t.sink is not None and reading == "denominator":
            total = total + np.exp(np.float64(t.sink[h]))
        out.append(e / total @ t.v[:, kv].astype(np.float64))
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("case", CASES)
def test_attention_is_near_float64(case: Case, reading: SinkReading) -> None:
    t = tensors(case, 70)
    got = OPS.patch_attention(t.q, t.k, t.v, 0, case.reach, t.sink, reading)
    assert np.abs(got - float64_attention(case, t, reading)).max() < 4e-6


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 2, 33, 150])
def test_compiled_attention_has_the_same_bytes(case: Case, n: int) -> None:
    t = tensors(case, n, seed=n)
    for reading in READINGS:
        expected = OPS.patch_attention(t.q, t.k, t.v, 0, case.reach, t.sink, reading)
        for threads in (1, 2):
            got = compiled_vision.patch_attention(t.q, t.k, t.v, 0, case.reach, t.sink, reading, threads)
            assert_same(got, expected)
        for start in range(0, n, 64):
            q = t.q[start : start + 64]
            got = compiled_vision.patch_attention(q, t.k, t.v, start, case.reach, t.sink, reading, 2)
            assert_same(got, expected[start : start + 64])
            assert_same(OPS.patch_attention(q, t.k, t.v, start, case.reach, t.sink, reading), got)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("reach", [None, 9])
def test_attention_with_infinities_and_nan(reach: int | None, reading: SinkReading) -> None:
    case = Case(4, 2, 32, 16, reach, True)
    t = wild_tensors(case)
    expected = OPS.patch_attention(t.q, t.k, t.v, 0, reach, t.sink, reading)
    assert np.isnan(expected).any() and np.isfinite(expected).any()
    assert_same(compiled_vision.patch_attention(t.q, t.k, t.v, 0, reach, t.sink, reading, 2), expected)


def test_the_sink_reaches_only_rows_that_see_key_0() -> None:
    """With equal scores a row of m keys gives key 0 the weight e^s/(m - 1 + e^s), or all of them 1/(m + e^s)."""
    n, reach, sink = 6, 2, np.array([np.log(3)], F)
    q = k = np.zeros((n, 1, 32), F)
    v = np.zeros((n, 1, 8), F)
    v[0] = 1
    seen = [3, 4, 5]
    got = OPS.patch_attention(q, k, v, 0, reach, sink, "key0")[:, 0]
    assert np.allclose(got, [3 / (m - 1 + 3) for m in seen] + [0, 0, 0], rtol=1e-6)
    got = OPS.patch_attention(q, k, v, 0, reach, sink, "denominator")[:, 0]
    assert np.allclose(got, [1 / (m + 3) for m in seen] + [0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("width", [1, 31, 32, 100, 1280])
def test_layer_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = 3 * random_x(rng, 5, width) + F(2), random_x(rng, 1, width)[0]
    got = OPS.layer_norm(x, weight, 1e-2)
    centred = x.astype(np.float64) - x.astype(np.float64).mean(axis=1, keepdims=True)
    exact = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-2) * weight
    assert np.allclose(got, exact, rtol=1e-5, atol=3e-6)
    assert_same(compiled_vision.layer_norm(x, weight, 1e-2), got)
    mean = np.array([ordered_dot(row, np.ones_like(row), 1) * F(1 / width) for row in x])
    assert_same(got, OPS.rms_norm(x - mean[:, None], weight, 1e-2))
    bad = wild(rng, 5, width) if width >= 31 else np.array([[np.inf]], F)
    assert_same(compiled_vision.layer_norm(bad, weight, 1e-2), OPS.layer_norm(bad, weight, 1e-2))


@pytest.mark.parametrize("threads", [1, 2])
def test_gelu_and_add_row(threads: int) -> None:
    rng = np.random.default_rng(3)
    for shape in ((1, 33), (5, 2048), (64, 1024)):
        x = wild(rng, *shape)
        assert_same(compiled_vision.gelu(x, threads), OPS.gelu(x))
        row = wild(rng, shape[1])
        assert_same(compiled_vision.add_row(x, row), OPS.add_row(x, row))
    assert OPS.add_row(np.array([[1, 2], [3, 4]], F), np.array([10, 20], F)).tolist() == [[11, 22], [13, 24]]
