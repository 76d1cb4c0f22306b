"""The compiled operations return the bytes of the numpy backend, on one thread and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpu_fallback import compiled_rows
from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32, MatrixBF16
from mimo_vk.ops import QkvLayout
from tests.attention_oracle import Case, run_in_blocks
from tests.matrices import random_x

OPS = ReferenceOps()
F = np.float32
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 90, -90], F)


def wild(rng: np.random.Generator, *shape: int) -> F32:
    """Normal numbers with some special values among them."""
    x = rng.standard_normal(shape).astype(F)
    x.reshape(-1)[rng.integers(0, x.size, 24)] = np.repeat(SPECIAL, 2)
    return x


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bytes; any NaN equals any other."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype == np.float32:
        assert np.array_equal(np.isnan(got), np.isnan(expected))
        got, expected = np.nan_to_num(got, nan=1), np.nan_to_num(expected, nan=1)
    bad = np.flatnonzero(got.reshape(-1).view(np.int32) != expected.reshape(-1).view(np.int32))
    assert not len(bad), (bad[0], got.reshape(-1)[bad[0]], expected.reshape(-1)[bad[0]])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (1, 31), (7, 100), (3, 64), (1, 4096), (40, 1056)])
def test_rms_norm(shape: tuple[int, int], threads: int) -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(shape[1]).astype(F)
    weight.setflags(write=False)
    for eps in (1e-5, 1e-6):
        x = random_x(rng, *shape)
        assert_same(compiled_rows.rms_norm(x, weight, eps, threads), OPS.rms_norm(x, weight, eps))
    x = wild(rng, *shape) if shape[1] >= 31 else np.array([[np.inf]], F)
    assert_same(compiled_rows.rms_norm(x, weight, 1e-5, threads), OPS.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("threads", [1, 2])
def test_swiglu_add_and_weighted_sum(threads: int) -> None:
    rng = np.random.default_rng(2)
    for shape in ((1, 33), (5, 2048), (64, 1024)):
        a, b = wild(rng, *shape), wild(rng, *shape)
        assert_same(compiled_rows.swiglu(a, b, threads), OPS.swiglu(a, b))
        assert_same(compiled_rows.add(a, b), OPS.add(a, b))
        y = wild(rng, shape[0], 8, shape[1])
        weights = random_x(rng, shape[0], 8)
        assert_same(compiled_rows.weighted_sum(y, weights, threads), OPS.weighted_sum(y, weights))


def test_embed_split_and_rope() -> None:
    rng = np.random.default_rng(3)
    table = MatrixBF16(rng.integers(0, 1 << 16, (50, 36), dtype=np.uint16))
    table.data.setflags(write=False)
    ids = np.array([49, 0, 7, 7])
    assert compiled_rows.embed(table, ids).tobytes() == OPS.embed(table, ids).tobytes()
    layout = QkvLayout(4, 8, 4, 24, 20)
    qkv = wild(rng, 3, 8 * 24 + 4 * 24 + 4 * 20)
    q, k, v = compiled_rows.split_qkv(qkv, layout, 0.707)
    for got, expected in zip((q, k, v), OPS.split_qkv(qkv, layout, 0.707), strict=True):
        assert_same(got, expected)
    angles = rng.uniform(0, 300, (3, 5)).astype(F)
    cos, sin = np.cos(angles), np.sin(angles)
    for x in (q, k):
        assert_same(compiled_rows.rope(x, cos, sin), OPS.rope(x, cos, sin))


@pytest.mark.parametrize("experts, top_k", [(4, 4), (16, 3), (256, 8)])
def test_route(experts: int, top_k: int) -> None:
    rng = np.random.default_rng(4)
    bias = rng.normal(0, 0.1, experts).astype(F)
    ties = np.round(random_x(rng, 50, experts))
    for logits in (2 * random_x(rng, 50, experts), ties, wild(rng, 50, experts), np.full((2, experts), np.nan, F)):
        for b in (bias, np.zeros_like(bias)):
            ids, weights = compiled_rows.route(logits, b, top_k, 2.5)
            expected_ids, expected_weights = OPS.route(logits, b, top_k, 2.5)
            assert_same(ids, expected_ids)
            assert_same(weights, expected_weights)


class Compiled(ReferenceOps):
    """The numpy backend with the compiled attention."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def attention(
        self, q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None
    ) -> F32:
        return compiled_rows.attention(q, k, v, keys, values, start, window, sink, self.threads)


CASES = [
    Case(heads=4, kv=2, head_dim=40, v_dim=24, window=None, sink=True),
    Case(heads=24, kv=1, head_dim=32, v_dim=20, window=128, sink=True),
    Case(heads=16, kv=1, head_dim=64, v_dim=32, window=None, sink=False),
    Case(heads=8, kv=4, head_dim=64, v_dim=8, window=128, sink=False),
    Case(heads=3, kv=3, head_dim=33, v_dim=7, window=5, sink=True),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 130, 300])
def test_attention(case: Case, length: int) -> None:
    tensors = case.tensors(np.random.default_rng(length), length)
    expected = run_in_blocks(OPS, case, tensors, length)
    for threads in (1, 2):
        for block in (1, 3, 64, 200, 300):
            got = run_in_blocks(Compiled(threads), case, tensors, block, spare_rows=block % 5)
            assert_same(got, expected)


def test_attention_with_infinities_and_nan() -> None:
    case = Case(heads=4, kv=2, head_dim=32, v_dim=16, window=40, sink=True)
    tensors = case.tensors(np.random.default_rng(5), 100)
    tensors.k[70, 0, 3], tensors.v[20, 1, 2], tensors.v[30, 1, 3] = np.inf, np.nan, -np.inf
    tensors.sink[1] = np.inf
    tensors.q[90] = 1e30
    expected = run_in_blocks(OPS, case, tensors, 100)
    assert np.isnan(expected).any() and np.isfinite(expected).any()
    assert_same(run_in_blocks(Compiled(2), case, tensors, 7), expected)


def test_attention_at_the_released_dimensions() -> None:
    case = Case(heads=32, kv=2, head_dim=192, v_dim=128, window=None, sink=False)
    tensors = case.tensors(np.random.default_rng(6), 70)
    assert_same(run_in_blocks(Compiled(2), case, tensors, 64), run_in_blocks(OPS, case, tensors, 70))


ASSEMBLY = """
import numpy as np
from cpu_fallback import attention_kernels, compiled_attention, compiled_rows, compiled_vision

x = np.ones((2, 64), np.float32)
compiled_rows.rms_norm(x, x[0], 1e-5)
compiled_rows.swiglu(x, x)
compiled_rows.rope(x[None], x[:1, :16].copy(), x[:1, :16].copy())
compiled_rows.weighted_sum(x[None], x[:1, :2].copy())
block, cache = np.ones((1, 2, 64), np.float32), np.ones((2, 1, 64), np.float32)
compiled_rows.attention(block, block, block, cache, cache, 0, None, None)
compiled_vision.layer_norm(x, x[0], 1e-5)
compiled_vision.gelu(x)
patches = np.ones((3, 2, 64), np.float32)
compiled_vision.patch_attention(patches, patches, patches, 0, 1, x[0, :2].copy(), "key0")
functions = [compiled_rows.norm_rows, compiled_rows.swiglu_range, compiled_rows.rope_rows, compiled_rows.sum_rows]
functions += [compiled_attention.attend_part, attention_kernels.score_kernels(2)[1]]
functions += [compiled_vision.layer_norm_rows, compiled_vision.gelu_range, compiled_vision.attend_patches]
for function in functions:
    (code,) = function.inspect_asm().values()
    print(code, "END OF FUNCTION")
"""


def test_no_product_is_fused(tmp_path: Path, project_root: Path) -> None:
    """No fused multiply-add in the machine code, whether x86's or ARM's.

    Code from the disk cache can't be read, so a new process compiles into an empty one.
    """
    env = {**os.environ, "PYTHONPATH": str(project_root), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ASSEMBLY]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    functions = done.stdout.split("END OF FUNCTION")[:-1]
    assert len(functions) == 9
    for code in functions:
        assert re.search(r"\b(v?mul[sp]s|fmul)\b", code)
        assert not re.search(r"\b(vfn?m(add|sub)\w*|fn?m(add|sub)|fml[as])\b", code)
