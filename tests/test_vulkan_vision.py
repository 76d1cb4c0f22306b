"""The picture tower on the device: each of its kernels, and whole towers, with the bytes of the numpy backend."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32
from mimo_vk.vulkan.device import Device
from mimo_vk.vulkan.kernels import ADD_ROW, GELU, LAYER_NORM, PATCH_ATTENTION
from tests.matrices import random_x
from tests.test_vision_ops import READINGS, Case, Tensors, tensors, wild_tensors
from tests.test_vulkan_rows import BIG, rows_of, wild
from tests.vulkan_dense import (
    KEYS_AT,
    SINKS_AT,
    VALUES_AT,
    Runner,
    attention_push,
    behind,
    bits,
    padded_rows,
    row_width,
)
from tests.vulkan_device import assert_same_bits, software_device

pytestmark = pytest.mark.bits

OPS = ReferenceOps()
F = np.float32
EVERYWHERE = 2**32 - 1


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device(software_device())
    yield device
    device.close()


@pytest.mark.parametrize(("rows", "width"), [(1, 33), (5, 2048), (64, 1280)])
def test_add_row_and_gelu(device: Device, rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x, row, stride = wild(rng, rows, width), wild(rng, width), row_width(width)
    x.reshape(-1)[:30] = 2.0 ** np.arange(-75, -45)  # around 2^-60, where erf's formula changes
    runner = Runner(device, ADD_ROW, {"X": BIG, "Slab": 4096, "Y": BIG}, ["Y"])
    slab = np.concatenate([random_x(rng, 1, 5)[0], row])
    push = {"width": width, "stride": stride}
    (out,) = runner.run(rows, 0, 0, {**push, "row_at": 5}, X=padded_rows(x, stride), Slab=slab)
    assert_same_bits(rows_of(out, rows, width, stride), OPS.add_row(x, row))
    runner = Runner(device, GELU, {"X": BIG, "Y": BIG}, ["Y"])
    (out,) = runner.run(rows, 0, 0, push, X=padded_rows(x, stride))
    assert_same_bits(rows_of(out, rows, width, stride), OPS.gelu(x))


def test_layer_norm(device: Device) -> None:
    """Of each patch, which then stand side by side in their unit's row."""
    runner = Runner(device, LAYER_NORM, {"X": BIG, "Slab": 8192, "Y": BIG}, ["Y"], (3, 1, 1))
    rng = np.random.default_rng(1)
    for rows, unit, width in ((1, 1, 1), (1, 4, 31), (7, 4, 100), (3, 1, 64), (5, 4, 1280), (2, 9, 33)):
        weight, x_stride, y_stride = random_x(rng, 1, width)[0], row_width(width), row_width(unit * width)
        slab = np.concatenate([random_x(rng, 1, 5)[0], weight])
        for x in (3 * random_x(rng, rows * unit, width) + F(2), wild(rng, rows * unit, width)):
            push = {"width": width, "unit": unit, "x_stride": x_stride, "y_stride": y_stride, "w_at": 5}
            push |= {"eps_bits": bits(1e-6), "inverse_width_bits": bits(F(1 / width))}
            (out,) = runner.run(rows, 0, 0, push, X=padded_rows(x, x_stride), Slab=slab)
            expected = OPS.layer_norm(x, weight, 1e-6).reshape(rows, unit * width)
            assert_same_bits(rows_of(out, rows, unit * width, y_stride), expected)


@pytest.fixture(scope="module", params=[1, 2], ids=["a head", "two heads"])
def attention(request: pytest.FixtureRequest, device: Device) -> Runner:
    words = dict.fromkeys(PATCH_ATTENTION.bindings[1:], 1 << 20)
    return Runner(device, PATCH_ATTENTION, words, ["Out"], (5, 2, 1), {"HEADS": request.param, "STEPS": 2})


def attended(runner: Runner, case: Case, t: Tensors, piece: int, reading: str) -> F32:
    """All rows, ``piece`` at a time, over a cache with room for more patches, which hold NaN."""
    n, room = len(t.q), len(t.q) + 3
    keys = np.full((case.kv, room, case.head_dim), np.nan, F)
    values = np.full((case.kv, room, case.v_dim), np.nan, F)
    keys[:, :n], values[:, :n] = t.k.transpose(1, 0, 2), t.v.transpose(1, 0, 2)
    reach, key0 = EVERYWHERE if case.reach is None else case.reach, t.sink is not None and reading == "key0"
    in_sum = t.sink if reading == "denominator" else None
    push = attention_push(PATCH_ATTENTION, t.q, t.v, room, in_sum, reach=reach, key0=int(key0))
    inputs = {"Keys": behind(KEYS_AT, keys), "Values": behind(VALUES_AT, values), "Slab": behind(SINKS_AT, t.sink)}
    found, runner.patches = list[F32](), n
    for start in range(0, n, piece):
        q = t.q[start : start + piece]
        (out,) = runner.run(len(q), start, 0, push, Q=q, **inputs)
        found.append(rows_of(out, len(q), case.heads * case.v_dim, push["out_stride"]))
    return np.concatenate(found)


CASES = [
    Case(4, 2, 64, 64, None, False),
    Case(4, 2, 64, 64, 5, True),
    Case(8, 2, 64, 64, 64, True),
    Case(3, 3, 33, 7, 3, True),
    Case(6, 1, 32, 20, 0, True),
    Case(6, 2, 40, 24, 1, True),
    Case(2, 1, 7, 133, None, True),
    Case(3, 1, 64, 16, 40, False),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 33, 150])
def test_attention(attention: Runner, case: Case, n: int) -> None:
    t = tensors(case, n, seed=n)
    for reading in READINGS:
        expected = OPS.patch_attention(t.q, t.k, t.v, 0, case.reach, t.sink, reading)
        for piece in (n, 64):
            assert_same_bits(attended(attention, case, t, piece, reading), expected)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("reach", [None, 9])
def test_attention_with_infinities_and_nan(attention: Runner, reach: int | None, reading: str) -> None:
    case = Case(4, 2, 32, 16, reach, True)
    t = wild_tensors(case)
    expected = OPS.patch_attention(t.q, t.k, t.v, 0, reach, t.sink, reading)  # type: ignore[arg-type]
    assert np.isnan(expected).any() and np.isfinite(expected).any()
    assert_same_bits(attended(attention, case, t, 40, reading), expected)
