"""The kernels' benchmark: what it counts, and that its matrices hold what real ones do."""

from __future__ import annotations

import numpy as np
import pytest

from cpu_fallback import limits
from cpu_fallback.compiled import CompiledOps
from mimo_vk import bench_kernels
from mimo_vk.bench_kernels import KernelResult, Limits

ONE_THREAD = CompiledOps(1)
SHAPE = (16, 512)
# Codes and scales of 16 x 512 weights: half a byte and 1/32 byte; 2; 1 and a float32 for each 128 x 128 block; 1 and a
# float32 for each row; 4.
BYTES = {"mxfp4": 4096 + 256, "bf16": 16384, "fp8": 8192 + 16, "int8": 8192 + 64, "f32": 32768}


def test_what_is_counted():
    result = KernelResult("k", 8, 0.5, 2e9, 10**9, 1.0, 2.0, 3.0)
    assert (result.gflops, result.gbps) == (4.0, 2.0)
    assert len(result.line()) == len(bench_kernels.HEADER)


@pytest.mark.parametrize("kind", bench_kernels.KINDS)
def test_flops_and_bytes(kind):
    results = list(bench_kernels.linear_results(ONE_THREAD, Limits(1, 0.0), [kind], [1, 3], SHAPE))
    assert [(r.rows, r.flops, r.bytes) for r in results] == [(n, 2.0 * 16 * 512 * n, BYTES[kind]) for n in (1, 3)]
    assert all(min(r.seconds, r.read_gbps, r.copy_gbps, r.peak_gflops) > 0 for r in results)


def test_experts_are_counted_whole():
    gate_up, down = bench_kernels.expert_results(ONE_THREAD, Limits(1, 0.0), hidden=128, inner=64, chosen=3)
    assert (gate_up.flops, down.flops) == (2.0 * 2 * 3 * 64 * 128, 2.0 * 3 * 64 * 128)
    assert gate_up.bytes == 2 * down.bytes == 2 * 3 * 64 * 128 * 17 // 32


def test_fp8_codes_reach_the_largest_and_are_never_nan():
    values = np.array([[4.0, -4.0, 2.0, 1.0, 0.0, 4 / 448 * 2.0**-9, -0.75]], np.float32)
    assert bench_kernels.fp8_codes(values).tolist() == [[0x7E, 0xFE, 0x76, 0x6E, 0, 1, 0xEA]]


def test_the_limits_do_their_work():
    data, out = np.arange(1001), np.zeros(1001, np.int64)
    read = np.zeros(2, np.int64)
    limits.read(2, data, read)
    assert read.tolist() == [np.bitwise_xor.reduce(data[:500]), np.bitwise_xor.reduce(data[500:])]
    limits.copy(2, data, out)
    assert out.tolist() == data.tolist()
    peak = np.zeros(1, np.float32)
    limits.multiply_add(1, 3, peak)
    # p = p/2 + 1/2 from 1/2, three times: 15/16; twelve chains.
    assert peak[0] == limits.CHAINS * 15 / 16
