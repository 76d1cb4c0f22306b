"""The compiled matrix products return the bytes of the numpy backend: formats, shapes, tails, extremes, threads."""

from __future__ import annotations

import ctypes
import mmap
import re
import tracemalloc

import numba
import numpy as np
import pytest

from cpu_fallback import compiled, vector_kernels
from cpu_fallback.compiled import CompiledOps
from cpu_fallback.reference import ReferenceOps
from cpu_fallback.vector_decode import FORMAT_FP8, FORMAT_FP8_FOLDED
from mimo_vk.formats import F32, Matrix, MatrixBF16, MatrixF32, MatrixFP8, MatrixInt8, MatrixMXFP4
from tests.matrices import KINDS, random_expert, random_matrix, random_mxfp4, random_x

REFERENCE = ReferenceOps()
BACKENDS = {"two threads": CompiledOps(2), "one thread": CompiledOps(1), "portable": CompiledOps(1, portable=True)}


@pytest.fixture(params=BACKENDS)
def ops(request) -> CompiledOps:
    return BACKENDS[request.param]


def assert_same(ops: CompiledOps, matrix: Matrix, x: F32) -> None:
    """Equal bytes; NaN equals NaN, whose bits are nobody's business."""
    ours, expected = ops.linear(matrix, x), REFERENCE.linear(matrix, x)
    assert ours.shape == expected.shape and ours.dtype == np.float32
    different = (ours.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(expected))
    first = np.argwhere(different)[:1]
    assert not different.any(), (matrix.shape, len(x), first, ours[different][:4], expected[different][:4])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [1, 7, 130])
def test_shapes(ops, kind, outputs):
    rng = np.random.default_rng(outputs)
    columns = [32, 96, 256, 4128] + ([] if kind == "mxfp4" else [5, 33, 131])
    for k in columns:
        matrix = random_matrix(rng, kind, outputs, k)
        for n in (1, 2, 3, 7, 8, 17, 64):
            assert_same(ops, matrix, random_x(rng, n, k))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kind):
    rng = np.random.default_rng(3)
    matrix, x = random_matrix(rng, kind, 70, 544), random_x(rng, 70, 544)
    whole = BACKENDS["two threads"].linear(matrix, x)
    for i in (0, 3, 63, 64, 69):
        assert BACKENDS["one thread"].linear(matrix, x[i : i + 1]).tobytes() == whole[i].tobytes()


def test_every_code_and_scale_of_mxfp4(ops):
    """All 16 codes in every column of a word, under every scale byte but NaN's, each product alone in its row."""
    k = 32
    codes = np.zeros((16 * 8 * 255, k // 2), np.uint8)
    scales = np.zeros((len(codes), 1), np.uint8)
    for row, (code, column, scale) in enumerate(np.ndindex(16, 8, 255)):
        codes[row, column // 2] = code << 4 * (column % 2)
        scales[row] = scale
    matrix = MatrixMXFP4(codes, scales)
    for n in (1, 2):
        x = np.full((n, k), 1.2345678, np.float32)
        assert_same(ops, matrix, x)


def test_every_code_of_fp8(ops):
    codes = np.zeros((254 * 4, 4), np.uint8)
    values = [code for code in range(256) if code & 0x7F != 0x7F]
    for row, (i, column) in enumerate(np.ndindex(254, 4)):
        codes[row, column] = values[i]
    for scale in (1.0, 3e-39, 1e-45, 2.0**-126, 1.7e38, -0.5):
        matrix = MatrixFP8(codes, np.full((1, 1), scale, np.float32), np.zeros(len(codes), np.int32))
        for value in (1.2345678, 1e-30, 3e38, 2e-45, 5e7):
            for n in (1, 2):
                assert_same(ops, matrix, np.full((n, 4), value, np.float32))


EXTREMES = {
    "zero": [0.0, -0.0],
    "subnormal": [1e-45, -3e-42, 1e-39],
    "tiny": [2.0**-100, -(2.0**-97), 2.0**-96, 2.0**-120],
    "huge": [3e38, -2e38, 1e37],
    "near the fold's limits": [2.0**27, 2.0**26, -(2.0**-96), 0.0],
    "wide": [1e30, 1e-30, 1.0, -1e30],
    "infinite": [np.inf, 1.0, -1.0, 0.0],
    "both infinities": [np.inf, -np.inf, 1.0],
    "nan": [np.nan, 1.0, 0.0],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(ops, kind, name):
    """A few numbers of that sort among ordinary ones, and rows made of them alone."""
    rng = np.random.default_rng(5)
    matrix = random_matrix(rng, kind, 40, 416)
    for n in (1, 5):
        alone = rng.choice(np.array(EXTREMES[name], np.float32), (n, 416))
        assert_same(ops, matrix, alone)
        few = np.where(rng.random((n, 416)) < 0.01, alone, random_x(rng, n, 416))
        assert_same(ops, matrix, few)


@pytest.mark.parametrize("low", [0, 1, 100, 240])
def test_small_and_large_scales(ops, low):
    rng = np.random.default_rng(low)
    matrix = random_mxfp4(rng, 20, 288, low, min(low + 12, 254))
    for factor in (1e-30, 1.0, 1e30):
        for n in (1, 3):
            assert_same(ops, matrix, random_x(rng, n, 288) * np.float32(factor))


def test_fp8_folds_only_where_nothing_is_lost():
    fits = np.array([[1.0, -2.0]], np.float32)
    assert compiled.fp8_format(fits) == FORMAT_FP8_FOLDED
    for scale in (2.0**100, np.inf, np.nan):
        assert compiled.fp8_format(fits * np.float32(scale)) == FORMAT_FP8


def at_the_end_of_a_page(array: np.ndarray, region: mmap.mmap, end: int) -> np.ndarray:
    """A copy that ends at that offset of the region."""
    copy = np.frombuffer(region, array.dtype, array.size, end - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.fixture
def guarded():
    """A mapping whose last page can't be touched, and the offset where that page begins."""
    size = 1 << 20
    region = mmap.mmap(-1, size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start + size - mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
    yield region, size - mmap.PAGESIZE
    assert protect(start + size - mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 96, 160, 256, 416, 544])
def test_nothing_is_read_past_the_end(ops, guarded, kind, k):
    """Codes, then scales, end where a page begins that can't be read."""
    rng = np.random.default_rng(k)
    region, end = guarded
    matrix = random_matrix(rng, kind, 13, k)
    x = random_x(rng, 3, k)
    for name in ("data", "codes", "scales", "scale_row"):
        if name not in vars(matrix):
            continue
        parts = vars(matrix) | {name: at_the_end_of_a_page(vars(matrix)[name], region, end)}
        for n in (1, 3):
            assert_same(ops, type(matrix)(**parts), x[:n])


def test_rows_at_odd_addresses_and_apart(ops):
    """Rows of a mapped file may start anywhere and lie any distance apart."""
    rng = np.random.default_rng(8)
    x = random_x(rng, 2, 288)
    raw = np.frombuffer(bytearray(rng.bytes(1 << 16)), np.uint8)
    wide = np.lib.stride_tricks.as_strided(raw[3:], (9, 144), (157, 1))
    scales = np.lib.stride_tricks.as_strided(raw[20001:] % 30 + 110, (9, 9), (11, 1))
    bf16 = np.ndarray((9, 288), np.uint16, raw.tobytes(), offset=1) & 0xBFFF
    odd = np.frombuffer(b"\0" + bf16.tobytes(), np.uint8)[1:].view(np.uint16).reshape(9, 288)
    for n in (1, 2):
        assert_same(ops, MatrixMXFP4(wide, scales), x[:n])
        assert_same(ops, MatrixBF16(odd), x[:n])


def test_inputs_that_are_not_plain_arrays(ops):
    rng = np.random.default_rng(9)
    matrix, x = random_matrix(rng, "f32", 6, 64), random_x(rng, 4, 128)
    frozen = x[:, :64].copy()
    frozen.setflags(write=False)
    assert ops.linear(matrix, x[::2, ::2]).tobytes() == REFERENCE.linear(matrix, x[::2, ::2].copy()).tobytes()
    assert ops.linear(matrix, frozen).tobytes() == REFERENCE.linear(matrix, frozen).tobytes()
    assert ops.linear(matrix, frozen[:0]).shape == (0, 6)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_experts(ops, rows):
    """Several experts, some with one pair, some with many, one with none, rows in any order."""
    rng = np.random.default_rng(rows)
    hidden, inner = 352, 64
    experts = [random_expert(rng, hidden, inner) for _ in range(5)]
    x = random_x(rng, rows, hidden)
    expert_of = np.sort(rng.choice([0, 1, 3, 4], 2 * rows + 2)).astype(np.int32)
    row_of = rng.integers(0, rows, len(expert_of)).astype(np.int32)
    act = ops.expert_gate_up(experts, expert_of, row_of, x)
    assert act.tobytes() == REFERENCE.expert_gate_up(experts, expert_of, row_of, x).tobytes()
    assert (
        ops.expert_down(experts, expert_of, act).tobytes() == REFERENCE.expert_down(experts, expert_of, act).tobytes()
    )


def test_an_expert_that_is_gone_is_forgotten():
    """A slot of the cache is used again by another expert, at the same addresses."""
    rng = np.random.default_rng(10)
    ops = CompiledOps(1)
    x, first = random_x(rng, 1, 64), np.zeros(1, np.int32)
    expert = random_expert(rng, 64, 64)
    slot = expert.down
    before = ops.expert_down([expert], first, x)
    assert len(ops.entries) == 1
    slot.codes[...] = ~slot.codes
    again = type(expert)(expert.gate, expert.up, MatrixMXFP4(slot.codes, slot.scales))
    after = ops.expert_down([again], first, x)
    assert after.tobytes() == REFERENCE.expert_down([again], first, x).tobytes() != before.tobytes()
    del expert
    assert len(ops.entries) == 1


def test_every_number_of_rows_costs_no_memory_of_its_own():
    """Of 1 to 300 rows each, indices kept for every number of them would take 361,200 bytes."""
    ops, matrix = CompiledOps(1), MatrixF32(np.ones((1, 1), np.float32))
    ops.linear(matrix, np.ones((1, 1), np.float32))
    tracemalloc.start()
    try:
        for n in range(1, 301):
            assert ops.linear(matrix, np.ones((n, 1), np.float32)).tolist() == [[1]] * n
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


def kernel_assembly() -> dict[str, str]:
    """Each kernel's instructions, compiled afresh (what comes from the cache can't be shown)."""
    function = numba.njit("void(int64[::1])")(vector_kernels.fill_addresses.py_func)
    text = function.inspect_asm(function.signatures[0])
    return dict(re.findall(r"^(mimo_\w+):$(.*?)^\.Lfunc_end", text, re.MULTILINE | re.DOTALL))


def test_no_kernel_fuses_or_calls():
    """No fused multiply-add on any processor; separate multiplications and additions in every product."""
    kernels = kernel_assembly()
    assert len(kernels) == sum(address != 0 for address in vector_kernels.kernel_addresses())
    for name, text in kernels.items():
        assert not re.search(r"\b(vfn?m(add|sub)|fn?m(add|sub|la|ls))\w*\s", text), name
        if "decode" not in name:
            assert re.search(r"\b(v?mulps|fmul)\b", text) and re.search(r"\b(v?addps|fadd)\b", text), name


def test_other_matrices_are_refused():
    matrix = MatrixF32(np.zeros((4, 8), np.float32))
    with pytest.raises(AssertionError):
        BACKENDS["one thread"].linear(matrix, np.zeros((1, 7), np.float32))
    apart = MatrixInt8(np.zeros((4, 16), np.int8)[:, ::2], np.ones(4, np.float32))
    with pytest.raises(AssertionError):
        BACKENDS["one thread"].linear(apart, np.zeros((1, 8), np.float32))
