"""The device's row by row operations have the bytes of the numpy backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32, MatrixBF16
from mimo_vk.kv_cache import LayerCache
from mimo_vk.ops import QkvLayout
from mimo_vk.vulkan.device import Device
from mimo_vk.vulkan.kernels import ADD, EMBED, KV_APPEND, RMS_NORM, ROUTE, SPLIT_ROPE, SWIGLU, WEIGHTED_SUM
from tests.matrices import random_x
from tests.vulkan_dense import UNTOUCHED, Runner, bits, packed, padded_rows, row_width
from tests.vulkan_device import assert_same_bits, software_device

pytestmark = pytest.mark.bits

OPS = ReferenceOps()
F = np.float32
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 90, -90], F)
BIG = 1 << 19  # words of the largest tensor


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device(software_device())
    yield device
    device.close()


def wild(rng: np.random.Generator, *shape: int) -> F32:
    """Normal numbers with some special values among them."""
    x = random_x(rng, 1, int(np.prod(shape))).reshape(shape)
    x.reshape(-1)[rng.integers(0, x.size, 24)] = np.repeat(SPECIAL, 2)
    return x


def rows_of(out: F32, rows: int, width: int, stride: int) -> F32:
    """The rows that were written; beside and after them nothing was."""
    found = out[: rows * stride].reshape(rows, stride)
    assert (found[:, width:] == UNTOUCHED).all() and (out[rows * stride :] == UNTOUCHED).all()
    return found[:, :width]


def test_rms_norm(device: Device) -> None:
    runner = Runner(device, RMS_NORM, {"X": BIG, "Slab": 8192, "Y": BIG}, ["Y"], (3, 1, 1))
    rng = np.random.default_rng(1)
    for rows, width in ((1, 1), (1, 31), (7, 100), (3, 64), (1, 4096), (40, 1056)):
        weight, stride = random_x(rng, 1, width)[0], row_width(width)
        slab = np.concatenate([random_x(rng, 1, 5)[0], weight])
        for x in (random_x(rng, rows + 2, width), wild(rng, rows + 2, width), np.full((rows + 2, width), 1e-30, F)):
            for eps, first in ((1e-5, 0), (1e-6, 2)):
                push = {"width": width, "stride": stride, "w_at": 5, "eps_bits": bits(eps)}
                push["inverse_width_bits"] = bits(F(1 / width))
                (out,) = runner.run(rows, 9, first, push, X=padded_rows(x, stride), Slab=slab)
                expected = OPS.rms_norm(x[first : first + rows], weight, eps)
                assert_same_bits(rows_of(out, rows, width, stride), expected)


def test_add(device: Device) -> None:
    runner = Runner(device, ADD, {"A": BIG, "B": BIG, "Y": BIG}, ["Y"])
    rng = np.random.default_rng(2)
    for rows, width in ((1, 33), (5, 2048), (64, 4096)):
        a, b, stride = wild(rng, rows, width), wild(rng, rows, width), row_width(width)
        push = {"width": width, "stride": stride}
        (out,) = runner.run(rows, 0, 0, push, A=padded_rows(a, stride), B=padded_rows(b, stride))
        assert_same_bits(rows_of(out, rows, width, stride), OPS.add(a, b))


def test_swiglu_of_two_windows(device: Device) -> None:
    runner = Runner(device, SWIGLU, {"Gate": BIG, "Up": BIG, "Y": BIG}, ["Y"])
    rng = np.random.default_rng(3)
    for rows, width in ((1, 33), (5, 2048), (7, 16384)):
        both, stride = wild(rng, rows, 2 * width), row_width(2 * width)
        push = {"width": width, "in_stride": stride, "gate_at": 0, "up_at": width, "y_stride": row_width(width)}
        (out,) = runner.run(rows, 0, 0, push, Gate=padded_rows(both, stride), Up=padded_rows(both, stride))
        found = rows_of(out, rows, width, row_width(width))
        assert_same_bits(found, OPS.swiglu(both[:, :width].copy(), both[:, width:].copy()))


def test_weighted_sum(device: Device) -> None:
    runner = Runner(device, WEIGHTED_SUM, {"Y": BIG, "Weights": 512, "Total": BIG}, ["Total"])
    rng = np.random.default_rng(4)
    for rows, choices, width in ((1, 1, 5), (3, 3, 33), (5, 8, 4096)):
        y, weights, stride = wild(rng, rows, choices, width), random_x(rng, rows, choices), row_width(width)
        y[0, :, 0] = -0.0  # times weights of both signs, or of one: the sum is +0
        weights[-1] = np.abs(weights[-1])
        push = {"width": width, "stride": stride, "choices": choices}
        laid_out = padded_rows(y.reshape(-1, width), stride)
        (out,) = runner.run(rows, 0, 0, push, Y=laid_out, Weights=weights)
        assert_same_bits(rows_of(out, rows, width, stride), OPS.weighted_sum(y, weights))


def test_embed_from_a_table_in_two_parts(device: Device) -> None:
    runner = Runner(device, EMBED, {"Ids": 64, "Table": BIG, "Y": BIG}, ["Y"])
    rng = np.random.default_rng(5)
    for width, ids in ((36, [49, 0, 7, 7, 31, 20]), (4096, [3, 20])):
        table = MatrixBF16(rng.integers(0, 1 << 16, (50, width), dtype=np.uint16))
        stride, rows = row_width(width), len(ids)
        expected = OPS.embed(table, np.array(ids))
        for first_id, count in ((0, 20), (20, 30)):
            words = packed(table.data[first_id : first_id + count])
            push = {"width": width, "stride": stride, "items": words.shape[1] // 4, "w_at": 4}
            push |= {"first_id": first_id, "count": count}
            slab = np.concatenate([np.zeros(4, np.uint32), words.ravel()])
            (out,) = runner.run(rows, 0, 1, push, Ids=np.array([0, *ids], np.uint32), Table=slab)
            found = out[: rows * stride].reshape(rows, stride)
            for row, token in enumerate(ids):
                if first_id <= token < first_id + count:
                    assert np.array_equal(found[row, :width].view(np.uint32), expected[row].view(np.uint32))
                else:
                    assert (found[row] == UNTOUCHED).all()


LAYOUTS = [
    (QkvLayout(4, 8, 4, 24, 20), 10, 3),
    (QkvLayout(1, 4, 2, 33, 7), 32, 5),
    (QkvLayout(4, 64, 8, 192, 128), 64, 2),  # the release's
]


@pytest.mark.parametrize(("layout", "rope_dim", "rows"), LAYOUTS)
def test_split_and_rope(device: Device, layout: QkvLayout, rope_dim: int, rows: int) -> None:
    rng = np.random.default_rng(6)
    sizes = [layout.num_heads * layout.head_dim, layout.num_kv_heads * layout.head_dim]
    sizes.append(layout.num_kv_heads * layout.v_head_dim)
    width, count = sum(sizes), rows + 1
    words = {"Qkv": count * row_width(width), "Tables": count * rope_dim}
    words |= dict(zip("QKV", (count * size for size in sizes), strict=True))
    runner = Runner(device, SPLIT_ROPE, words, ["Q", "K", "V"])
    qkv = wild(rng, rows, width)
    angles = rng.uniform(0, 300, (rows, rope_dim // 2)).astype(F)
    cos, sin = np.cos(angles), np.sin(angles)
    push = {
        "stride": row_width(width), "chunks": layout.chunks, "heads": layout.num_heads,
        "kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim, "v_dim": layout.v_head_dim,
        "turned": rope_dim // 2, "value_scale_bits": bits(0.707),
    }  # fmt: skip
    inputs = {"Qkv": padded_rows(qkv, row_width(width)), "Tables": np.stack([cos, sin], axis=1)}
    found = runner.run(rows, 0, 0, push, **inputs)
    q, k, v = OPS.split_qkv(qkv, layout, 0.707)
    expected = OPS.rope(q, cos, sin), OPS.rope(k, cos, sin), v
    for out, rows_expected, size in zip(found, expected, sizes, strict=True):
        assert_same_bits(rows_of(out, rows, size, size), rows_expected.reshape(rows, size))


@pytest.mark.parametrize(("cache_rows", "start", "rows"), [(16, 0, 1), (16, 5, 11), (5, 3, 4), (5, 7, 12), (1, 4, 3)])
def test_append(device: Device, cache_rows: int, start: int, rows: int) -> None:
    """Into a cache with room, into a ring past its end, and blocks longer than the ring."""
    rng = np.random.default_rng(7)
    kv, head_dim, v_dim = 2, 33, 20
    k, v = wild(rng, rows, kv, head_dim), wild(rng, rows, kv, v_dim)
    cache = LayerCache(kv, cache_rows, head_dim, v_dim)
    cache.keys[:], cache.values[:] = UNTOUCHED, UNTOUCHED
    cache.write(start, k, v)
    words = {"K": k.size, "V": v.size, "Keys": cache.keys.size + 9, "Values": cache.values.size + 9}
    runner = Runner(device, KV_APPEND, words, ["Keys", "Values"])
    push = {"kv_heads": kv, "head_dim": head_dim, "v_dim": v_dim, "cache_rows": cache_rows}
    keys, values = runner.run(rows, start, 0, {**push, "keys_at": 4, "values_at": 9}, K=k, V=v)
    for out, at, expected in ((keys, 4, cache.keys), (values, 9, cache.values)):
        assert_same_bits(out[at : at + expected.size], expected.ravel())
        assert (out[:at] == UNTOUCHED).all() and (out[at + expected.size :] == UNTOUCHED).all()


def logits_for(rng: np.random.Generator, rows: int, experts: int) -> list[F32]:
    """Ordinary ones, many equal ones, some special values, nothing but NaN."""
    ordinary = 2 * random_x(rng, rows, experts)
    return [ordinary, np.round(ordinary), wild(rng, rows, experts), np.full((rows, experts), np.nan, F)]


@pytest.fixture(scope="module")
def route(device: Device) -> Callable[[F32, F32, int, float], tuple[np.ndarray, F32]]:
    words = {"Logits": 1 << 15, "Slab": 1100, "Ids": 1024, "Weights": 1024}
    runner = Runner(device, ROUTE, words, ["Ids", "Weights"], (3, 1, 1))

    def run(logits: F32, bias: F32, top_k: int, scaling: float) -> tuple[np.ndarray, F32]:
        rows, experts = logits.shape
        stride = row_width(experts)
        push = {"experts": experts, "stride": stride, "chosen": top_k, "bias_at": 3, "scaling_bits": bits(scaling)}
        slab = np.concatenate([np.zeros(3, F), bias])
        ids, weights = runner.run(rows, 0, 0, push, Logits=padded_rows(logits, stride), Slab=slab)
        assert (ids[rows * top_k :] == UNTOUCHED).all() and (weights[rows * top_k :] == UNTOUCHED).all()
        return ids[: rows * top_k].view(np.int32).reshape(rows, top_k), weights[: rows * top_k].reshape(rows, top_k)

    return run


@pytest.mark.parametrize(("experts", "top_k"), [(4, 4), (16, 3), (256, 8), (1024, 2)])
def test_route(route: Callable[..., tuple[np.ndarray, F32]], experts: int, top_k: int) -> None:
    rng = np.random.default_rng(8)
    bias = rng.normal(0, 0.1, experts).astype(F)
    for logits in logits_for(rng, 20, experts):
        for b in (bias, np.zeros_like(bias)):
            ids, weights = route(logits, b, top_k, 2.5)
            expected_ids, expected_weights = OPS.route(logits, b, top_k, 2.5)
            assert np.array_equal(ids, expected_ids)
            assert_same_bits(weights, expected_weights)
