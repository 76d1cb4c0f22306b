"""The device's attention has the bytes of the numpy backend, over full rows and over rings, in blocks of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32
from mimo_vk.vulkan.device import Device
from mimo_vk.vulkan.kernels import ATTENTION
from tests.attention_oracle import Case, Tensors, run_in_blocks
from tests.vulkan_dense import KEYS_AT, SINKS_AT, UNTOUCHED, VALUES_AT, Runner, attention_push, behind
from tests.vulkan_device import assert_same_bits, software_device

pytestmark = pytest.mark.bits

OPS = ReferenceOps()


@dataclass
class DeviceAttention(ReferenceOps):
    """The numpy backend with the device's attention."""

    runner: Runner

    def attention(
        self, q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None
    ) -> F32:
        rows, width = len(q), q.shape[1] * v.shape[2]
        push = attention_push(ATTENTION, q, v, keys.shape[1], sink, window=window or 0)
        kept = {"Keys": behind(KEYS_AT, keys), "Values": behind(VALUES_AT, values), "Slab": behind(SINKS_AT, sink)}
        (out,) = self.runner.run(rows, start, 0, push, Q=q, K=k, V=v, **kept)
        stride = push["out_stride"]
        found = out[: rows * stride].reshape(rows, stride)
        assert (found[:, width:] == UNTOUCHED).all() and (out[rows * stride :] == UNTOUCHED).all()
        return found[:, :width].copy()


@pytest.fixture(scope="module", params=[1, 2], ids=["a head", "two heads"])
def ops(request: pytest.FixtureRequest) -> Iterator[DeviceAttention]:
    device = Device(software_device())
    words = dict.fromkeys(ATTENTION.bindings[1:], 1 << 19)
    yield DeviceAttention(Runner(device, ATTENTION, words, ["Out"], (5, 2, 1), {"HEADS": request.param, "STEPS": 6}))
    device.close()


CASES = [
    Case(heads=4, kv=2, head_dim=40, v_dim=24, window=None, sink=True),
    Case(heads=3, kv=1, head_dim=64, v_dim=8, window=128, sink=False),
    Case(heads=3, kv=3, head_dim=33, v_dim=7, window=5, sink=True),
    Case(heads=2, kv=1, head_dim=7, v_dim=133, window=40, sink=False),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 30, 131])
def test_blocks(ops: DeviceAttention, case: Case, length: int) -> None:
    """Cache rows that nobody wrote, or that a ring lost, hold NaN."""
    tensors = case.tensors(np.random.default_rng(length), length)
    expected = run_in_blocks(OPS, case, tensors, length)
    for block, spare in ((length, 0), (9, 3)):
        assert_same_bits(run_in_blocks(ops, case, tensors, block, spare), expected)


def last_row(ops: ReferenceOps, case: Case, tensors: Tensors, rows: int) -> F32:
    """The last row alone, over a cache of ``rows`` that holds the others."""
    last = len(tensors.q) - 1
    keys = np.full((case.kv, rows, case.head_dim), np.nan, np.float32)
    values = np.full((case.kv, rows, case.v_dim), np.nan, np.float32)
    positions = np.arange(max(0, last - rows + 1), last)
    keys[:, positions % rows] = tensors.k[positions].transpose(1, 0, 2)
    values[:, positions % rows] = tensors.v[positions].transpose(1, 0, 2)
    q, k, v = (np.ascontiguousarray(a[last:]) for a in (tensors.q, tensors.k, tensors.v))
    return ops.attention(q, k, v, keys, values, last, case.window, tensors.sink if case.sink else None)


@pytest.mark.parametrize("window", [None, 128])
def test_one_row_at_the_release_dimensions(ops: DeviceAttention, window: int | None) -> None:
    """64 query heads of 192, values of 128; far into a long context."""
    case = Case(
        heads=64, kv=4 if window is None else 8, head_dim=192, v_dim=128, window=window, sink=window is not None
    )
    tensors = case.tensors(np.random.default_rng(1), 301)
    rows = window or 320
    assert_same_bits(last_row(ops, case, tensors, rows), last_row(OPS, case, tensors, rows))


def test_infinities_and_nan(ops: DeviceAttention) -> None:
    case = Case(heads=4, kv=2, head_dim=32, v_dim=16, window=40, sink=True)
    tensors = case.tensors(np.random.default_rng(5), 100)
    tensors.k[70, 0, 3], tensors.v[20, 1, 2], tensors.v[30, 1, 3] = np.inf, np.nan, -np.inf
    tensors.sink[1] = np.inf
    tensors.q[90] = 1e30
    tensors.v[50, :, :2] = 1e-42
    expected = run_in_blocks(OPS, case, tensors, 100)
    assert np.isnan(expected).any() and np.isfinite(expected).any()
    assert_same_bits(run_in_blocks(ops, case, tensors, 23), expected)
