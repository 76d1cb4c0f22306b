"""The numpy backend against a scalar spelling of the order (bytes), float64 (bounds), and numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cpu_fallback.elementary import exp, reciprocal, rsqrt
from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import MatrixBF16, MatrixFP8, MatrixMXFP4
from mimo_vk.ops import QkvLayout
from tests.attention_oracle import Case, float64_attention, run_in_blocks
from tests.matrices import (
    E2M1_VALUES,
    FP8_VALUES,
    GROUP,
    KINDS,
    dense,
    random_expert,
    random_matrix,
    random_mxfp4,
    random_x,
)
from tests.scalar_order import ordered_dot, ordered_linear, tree

OPS = ReferenceOps()
F = np.float32


def widths(kind: str) -> tuple[int, ...]:
    return (32, 96, 288, 4096 + 32) if kind == "mxfp4" else (1, 5, 33, 96, 131, 4096 + 32)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_is_within_the_bound_of_float64(kind: str) -> None:
    rng = np.random.default_rng(1)
    for k in widths(kind):
        for rows, outputs in ((1, 130), (7, 3)):
            matrix, x = random_matrix(rng, kind, outputs, k), random_x(rng, rows, k)
            exact = x.astype(np.float64) @ dense(matrix).T
            size = np.abs(x.astype(np.float64)) @ np.abs(dense(matrix)).T
            error = np.abs(OPS.linear(matrix, x) - exact)
            assert (error <= (k / 32 + GROUP[kind] + 8) * 2.0**-24 * size).all(), (kind, k, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_follows_the_order_to_the_bit(kind: str) -> None:
    rng = np.random.default_rng(2)
    for k in (32, 96, 1056) if kind == "mxfp4" else (1, 5, 33, 131, 300):
        matrix, x = random_matrix(rng, kind, 3, k), random_x(rng, 2, k)
        assert OPS.linear(matrix, x).tobytes() == ordered_linear(matrix, x, GROUP[kind]).tobytes(), (kind, k)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    rng = np.random.default_rng(3)
    matrix, x = random_matrix(rng, kind, 260, 4160), random_x(rng, 7, 4160)
    whole = OPS.linear(matrix, x)
    for i in range(7):
        assert OPS.linear(matrix, x[i : i + 1]).tobytes() == whole[i : i + 1].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_nan_flow_through_a_product(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    rng = np.random.default_rng(4)
    matrix = random_matrix(rng, kind, 64, 96)
    values = dense(matrix)[:, 40]
    for bad in (np.inf, -np.inf, np.nan):
        x = random_x(rng, 1, 96)
        x[0, 40] = bad
        with np.errstate(invalid="ignore"):
            expected = (bad * values).astype(F)
        assert np.array_equal(OPS.linear(matrix, x)[0], expected, equal_nan=True)
    assert not recwarn.list


def test_every_fp8_code() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(-1, 1)
    matrix = MatrixFP8(codes, np.full((1, 1), 0.5, F), np.zeros(256, np.int32))
    got = OPS.linear(matrix, np.full((1, 1), 3, F))[0]
    assert np.array_equal(got, (FP8_VALUES * 1.5).astype(F), equal_nan=True)


def test_every_mxfp4_code_with_every_scale() -> None:
    """Row (scale, code) holds the code in column 5 and zeros elsewhere. The smallest product is 2^-126."""
    scale, code = (a.reshape(-1) for a in np.meshgrid(np.arange(255), np.arange(16), indexing="ij"))
    codes = np.zeros((len(code), 16), np.uint8)
    codes[:, 2] = code << 4
    matrix = MatrixMXFP4(codes, scale.astype(np.uint8)[:, None])
    x = np.full((1, 32), 4, F)
    got = OPS.linear(matrix, x)[0]
    with np.errstate(over="ignore"):
        expected = (E2M1_VALUES[code] * 4 * 2.0 ** (scale - 127)).astype(F)
    assert np.array_equal(got, expected)


def test_rms_norm_is_ordered_and_near_float64() -> None:
    rng = np.random.default_rng(5)
    for width in (1, 31, 32, 100, 4096):
        x, weight = random_x(rng, 3, width), random_x(rng, 1, width)[0]
        got = OPS.rms_norm(x, weight, 1e-5)
        x64 = x.astype(np.float64)
        exact = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-5) * weight
        assert np.allclose(got, exact, rtol=1e-6, atol=0)
        if width <= 100:
            ss = np.array([ordered_dot(row, row, 1) for row in x])
            root = rsqrt(ss * F(1 / width) + F(1e-5))
            assert got.tobytes() == ((x * root[:, None]) * weight).tobytes()


def test_swiglu_and_add() -> None:
    gate = np.array([[0, 1, -1, 20, -20, -100, np.inf, np.nan]], F)
    up = np.full_like(gate, 2)
    g = gate[:, :6].astype(np.float64)
    got = OPS.swiglu(gate, up)
    assert np.allclose(got[:, :6], 2 * g / (1 + np.exp(-g)), rtol=1e-6, atol=1e-37)
    assert got[0, 6] == np.inf and np.isnan(got[0, 7])
    assert OPS.add(np.array([[1, 2]], F), np.array([[3, 5]], F)).tolist() == [[4, 7]]


def test_embed_is_exact() -> None:
    table = MatrixBF16(np.array([[0x3F80, 0x4000], [0xBF80, 0x0001]], np.uint16))
    assert OPS.embed(table, np.array([1, 0, 1])).tolist() == [[-1, 2.0**-133], [1, 2], [-1, 2.0**-133]]


def test_split_qkv_undoes_the_chunks() -> None:
    """Two chunks of 2 Q heads of 3, 1 K head of 3, 1 V head of 2."""
    row = np.arange(22, dtype=F)
    q, k, v = OPS.split_qkv(np.stack([row, row + 100]), QkvLayout(2, 4, 2, 3, 2), 0.5)
    assert q[0].tolist() == [[0, 1, 2], [3, 4, 5], [11, 12, 13], [14, 15, 16]]
    assert k[0].tolist() == [[6, 7, 8], [17, 18, 19]]
    assert v[1].tolist() == [[54.5, 55], [60, 60.5]]


def test_rope_rotates_pairs_half_apart() -> None:
    x = np.array([[[1, 2, 3, 4, 9]]], F)
    cos, sin = np.array([[0, 1]], F), np.array([[1, 0]], F)
    assert OPS.rope(x, cos, sin).tolist() == [[[-3, 2, 1, 4, 9]]]
    assert x[0, 0, 0] == 1


def test_route_by_hand() -> None:
    """The bias chooses, the score weighs; among equals the lower id; NaN ranks last."""
    logits = np.array([[0, 0, 0, 0], [np.nan, 0, np.nan, -50]], F)
    ids, weights = OPS.route(logits, np.array([0, 0.25, 0, 0.5], F), 3, 2.0)
    assert ids.tolist() == [[3, 1, 0], [1, 3, 0]] and ids.dtype == np.int32
    assert np.allclose(weights[0], 2 / 3, rtol=3e-7) and np.isnan(weights[1]).all()
    scores = np.array([[1, 2, 3]], F)
    ids, weights = OPS.route(scores, np.zeros(3, F), 2, 1.0)
    s = 1 / (1 + np.exp(-scores[0].astype(np.float64)))
    assert ids.tolist() == [[2, 1]] and np.allclose(weights[0], s[[2, 1]] / (s[2] + s[1]), rtol=1e-6)
    OPS.route(np.full((2, 4), np.nan, F), np.zeros(4, F), 4, 1.0)


def test_weighted_sum_adds_in_the_given_order() -> None:
    y = np.array([[[1e8], [1], [-1e8]]], F)
    assert OPS.weighted_sum(y, np.ones((1, 3), F)).tolist() == [[0]]
    assert OPS.weighted_sum(y[:, [0, 2, 1]], np.ones((1, 3), F)).tolist() == [[1]]


def test_expert_pairs_are_the_experts_one_by_one() -> None:
    rng = np.random.default_rng(6)
    experts = [random_expert(rng, 96, 64) for _ in range(4)]
    x = random_x(rng, 3, 96)
    expert_of, row_of = np.array([0, 0, 1, 3, 3, 3], np.int32), np.array([2, 0, 1, 0, 1, 2], np.int32)
    act = OPS.expert_gate_up(experts, expert_of, row_of, x)
    y = OPS.expert_down(experts, expert_of, act)
    for p, (e, row) in enumerate(zip(expert_of, row_of, strict=True)):
        one, expert = x[row : row + 1], experts[e]
        expected = OPS.swiglu(OPS.linear(expert.gate, one), OPS.linear(expert.up, one))
        assert act[p : p + 1].tobytes() == expected.tobytes()
        assert y[p : p + 1].tobytes() == OPS.linear(expert.down, expected).tobytes()
        g, u = (one.astype(np.float64) @ dense(m).T for m in (expert.gate, expert.up))
        exact = g * 0.5 * (1 + np.tanh(g / 2)) * u
        assert np.abs(expected - exact).max() < 1e-5 * np.abs(exact).max()


def test_an_mxfp4_row_that_fills_no_lane_group_reads_only_itself() -> None:
    matrix = random_mxfp4(np.random.default_rng(7), 300, 32)
    single = MatrixMXFP4(matrix.codes[299:], matrix.scales[299:])
    x = random_x(np.random.default_rng(8), 1, 32)
    assert OPS.linear(single, x)[0, 0] == OPS.linear(matrix, x)[0, 299]


CASES = [
    Case(heads=4, kv=2, head_dim=40, v_dim=24, window=None, sink=False),
    Case(heads=4, kv=1, head_dim=32, v_dim=16, window=128, sink=True),
    Case(heads=2, kv=2, head_dim=24, v_dim=8, window=128, sink=False),
    Case(heads=2, kv=1, head_dim=24, v_dim=8, window=None, sink=True),
    Case(heads=2, kv=1, head_dim=24, v_dim=8, window=5, sink=True),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 130, 300])
def test_attention_near_float64_and_equal_in_any_blocks(case: Case, length: int) -> None:
    tensors = case.tensors(np.random.default_rng(length), length)
    whole = run_in_blocks(OPS, case, tensors, length)
    exact = float64_attention(case, tensors)
    assert np.abs(whole - exact).max() < 2e-6 * np.abs(exact).max()
    for block in (1, 3, 64, 200):
        if block < length and not (block == 1 and length not in (129, 130)):
            assert run_in_blocks(OPS, case, tensors, block).tobytes() == whole.tobytes(), block
    if case.window is not None:
        assert run_in_blocks(OPS, case, tensors, 64, spare_rows=37).tobytes() == whole.tobytes()


def test_attention_follows_the_order_to_the_bit() -> None:
    case = Case(heads=2, kv=1, head_dim=40, v_dim=3, window=70, sink=True)
    tensors = case.tensors(np.random.default_rng(9), 75)
    got = run_in_blocks(OPS, case, tensors, 75).reshape(75, 2, 3)
    scale = F(40**-0.5)
    for p in (0, 40, 74):
        for h in range(2):
            keys = range(max(0, p - 69), p + 1)
            s = np.array([ordered_dot(tensors.q[p, h], tensors.k[j, 0], 1) * scale for j in keys], F)
            sink = tensors.sink[h : h + 1]
            m = max(s.max(), sink[0])
            e = exp(s - m)
            lanes, sums = [F(0)] * 32, [[F(0)] * 32 for _ in range(3)]
            for j, weight in zip(keys, e, strict=True):
                lanes[j % 32] = lanes[j % 32] + weight
                for d in range(3):
                    sums[d][j % 32] = sums[d][j % 32] + weight * tensors.v[j, 0, d]
            den = np.array([tree(lanes)], F) + exp(sink - m)
            expected = np.array([tree(lane_sums) for lane_sums in sums], F) * reciprocal(den)
            assert got[p, h].tobytes() == expected.tobytes(), (p, h)


def test_attention_ignores_what_it_may_not_see() -> None:
    """Infinities and NaN in later rows and in overwritten ring slots never reach a row."""
    case = Case(heads=2, kv=1, head_dim=8, v_dim=8, window=40, sink=True)
    tensors = case.tensors(np.random.default_rng(10), 100)
    clean = run_in_blocks(OPS, case, tensors, 100)
    tensors.k[70:], tensors.v[70:] = np.nan, np.inf
    tensors.v[:20] = np.inf
    dirty = run_in_blocks(OPS, case, tensors, 100)
    assert dirty[59:70].tobytes() == clean[59:70].tobytes()
    assert np.isnan(dirty[70:]).all()
