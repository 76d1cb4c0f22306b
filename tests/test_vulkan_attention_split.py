"""Attention in three dispatches, 8 groups for each of its groups, has the bytes of the numpy backend too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32
from mimo_vk.vulkan.device import Device
from mimo_vk.vulkan.kernels import ATTENTION_JOIN, ATTENTION_MAX, ATTENTION_PART, Kernel
from tests.attention_oracle import Case, run_in_blocks
from tests.vulkan_dense import KEYS_AT, SINKS_AT, UNTOUCHED, VALUES_AT, Runner, attention_push, behind
from tests.vulkan_device import assert_same_bits, software_device

pytestmark = pytest.mark.bits

OPS = ReferenceOps()
PARTS = 8


@dataclass
class SplitAttention(ReferenceOps):
    """The numpy backend with the device's attention in three steps."""

    find_maxima: Runner
    add_parts: Runner
    join: Runner

    def attention(
        self, q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None
    ) -> F32:
        rows, heads, v_dim = len(q), q.shape[1], v.shape[2]
        kernels = ATTENTION_MAX, ATTENTION_PART, ATTENTION_JOIN
        pushes = [attention_push(kernel, q, v, keys.shape[1], sink, window=window or 0) for kernel in kernels]
        kept, slab = {"Keys": behind(KEYS_AT, keys)}, behind(SINKS_AT, sink)
        (maxima,) = self.find_maxima.run(rows, start, 0, pushes[0], Q=q, K=k, **kept)
        maxima = written(maxima, rows * heads * PARTS)
        kept["Values"] = behind(VALUES_AT, values)
        (sums,) = self.add_parts.run(rows, start, 0, pushes[1], Q=q, K=k, V=v, Slab=slab, Maxima=maxima, **kept)
        sums = written(sums, rows * heads * PARTS * (v_dim + 1))
        (out,) = self.join.run(rows, start, 0, pushes[2], Slab=slab, Maxima=maxima, Sums=sums)
        stride = pushes[2]["out_stride"]
        found = written(out, rows * stride).reshape(rows, stride)
        return found[:, : heads * v_dim].copy()


def written(out: F32, words: int) -> F32:
    """The words that were to be written; nothing lies beyond."""
    assert (out[words:] == UNTOUCHED).all()
    return out[:words]


@pytest.fixture(scope="module", params=[1, 2], ids=["a head", "two heads"])
def ops(request: pytest.FixtureRequest) -> Iterator[SplitAttention]:
    device = Device(software_device())
    constants = {"HEADS": request.param, "STEPS": 2}

    def runner(kernel: Kernel, output: str, groups: tuple[int, int, int], constants: dict[str, int] | None) -> Runner:
        return Runner(device, kernel, dict.fromkeys(kernel.bindings[1:], 1 << 17), [output], groups, constants)

    yield SplitAttention(
        runner(ATTENTION_MAX, "Maxima", (2, 3, 8), constants),
        runner(ATTENTION_PART, "Sums", (2, 3, 5), constants),
        runner(ATTENTION_JOIN, "Out", (3, 2, 1), None),
    )
    device.close()


CASES = [
    Case(heads=3, kv=1, head_dim=64, v_dim=8, window=None, sink=True),
    Case(heads=2, kv=2, head_dim=33, v_dim=131, window=40, sink=False),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 70])
def test_blocks(ops: SplitAttention, case: Case, length: int) -> None:
    tensors = case.tensors(np.random.default_rng(length), length)
    assert_same_bits(run_in_blocks(ops, case, tensors, 9, 2), run_in_blocks(OPS, case, tensors, length))


def test_several_chunks(ops: SplitAttention) -> None:
    """More positions than 8 chunks hold, in a cache: the last row alone, and with NaN in a key."""
    case = Case(heads=3, kv=1, head_dim=40, v_dim=12, window=None, sink=True)
    tensors = case.tensors(np.random.default_rng(3), 1301)
    keys, values = (np.ascontiguousarray(a[:1300].transpose(1, 0, 2)) for a in (tensors.k, tensors.v))
    q, k, v = tensors.q[1300:], tensors.k[1300:], tensors.v[1300:]
    for spoilt in (False, True):
        if spoilt:
            keys[0, 700, 3] = np.nan
        expected = OPS.attention(q, k, v, keys, values, 1300, None, tensors.sink)
        assert np.isnan(expected).all() == spoilt
        assert_same_bits(ops.attention(q, k, v, keys, values, 1300, None, tensors.sink), expected)
