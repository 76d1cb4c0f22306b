"""Every code of every stored format, against formulas written out in scalars."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mimo_vk.formats import (
    E2M1,
    E4M3FN,
    E8M0,
    MatrixBF16,
    MatrixF32,
    MatrixFP8,
    MatrixInt8,
    MatrixMXFP4,
    bf16_to_float32,
    dequantize,
    float32_to_bf16,
    quantize_int8,
)


def e4m3fn(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(1 + mantissa / 8, exponent - 7)


def e2m1(code: int) -> float:
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else math.ldexp(1 + mantissa / 2, exponent - 1))


def as_float32(value: float) -> float:
    """Python's float rounded to float32, infinite where too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def same(a: float, b: float) -> bool:
    """Equal in value and sign, NaN equal to NaN."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def test_all_256_fp8_codes():
    wrong = [code for code in range(256) if not same(float(E4M3FN[code]), e4m3fn(code))]
    assert wrong == []
    assert [float(E4M3FN[c]) for c in (0x7E, 0xFE, 0x01, 0x07, 0x08)] == [448.0, -448.0, 2**-9, 7 * 2**-9, 2**-6]


def test_all_e2m1_codes():
    assert [float(v) for v in E2M1[:8]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [code for code in range(16) if not same(float(E2M1[code]), e2m1(code))] == []


def test_all_256_scales():
    expected = [math.ldexp(1.0, b - 127) for b in range(255)] + [math.nan]
    assert [b for b in range(256) if not same(float(E8M0[b]), expected[b])] == []


def test_the_tables_are_constants():
    for table in (E4M3FN, E2M1, E8M0):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


def test_all_mxfp4_pairs():
    """Row b holds the 16 codes twice under scale byte b: column c has code c % 16."""
    packed = np.array([(2 * k % 16) | ((2 * k + 1) % 16) << 4 for k in range(16)], np.uint8)
    matrix = MatrixMXFP4(np.tile(packed, (256, 1)), np.arange(256, dtype=np.uint8)[:, None])
    decoded = dequantize(matrix)
    assert decoded.shape == (256, 32)
    assert decoded.dtype == np.float32
    for b in range(256):
        scale = math.nan if b == 255 else math.ldexp(1.0, b - 127)
        for column in range(32):
            expected = as_float32(e2m1(column % 16) * scale)
            assert same(float(decoded[b, column]), expected), (b, column, decoded[b, column], expected)


def test_mxfp4_scales_hold_for_32_columns_each():
    codes = np.full((2, 48), 0x22, np.uint8)  # 1.0 everywhere
    scales = np.array([[127, 128, 126], [130, 127, 124]], np.uint8)
    expected = np.repeat(np.array([[1, 2, 0.5], [8, 1, 0.125]], np.float32), 32, axis=1)
    np.testing.assert_array_equal(dequantize(MatrixMXFP4(codes, scales)), expected)


def test_the_low_nibble_comes_first():
    codes = np.zeros((1, 16), np.uint8)
    codes[0, :3] = [0x21, 0xF0, 0x05]  # columns 0..5: 0.5 1 | 0 -6 | 3 0
    decoded = dequantize(MatrixMXFP4(codes, np.array([[127]], np.uint8)))
    assert decoded[0, :6].tolist() == [0.5, 1.0, 0.0, -6.0, 3.0, 0.0]


def test_fp8_block_scales_by_scale_row():
    """Columns share a scale by 128, rows by the list of scale rows; the product is rounded once."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (5, 300), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.1, (3, 3)).astype(np.float32)
    scale_row = np.array([0, 0, 2, 1, 2], np.int32)
    decoded = dequantize(MatrixFP8(codes, scales, scale_row))
    for n in range(5):
        for k in range(300):
            expected = as_float32(e4m3fn(int(codes[n, k])) * float(scales[scale_row[n], k // 128]))
            assert float(decoded[n, k]) == expected, (n, k)


def test_bf16_widening_is_exact_for_all_codes():
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    wide = bf16_to_float32(bits)
    assert (wide.view(np.uint32) == bits.astype(np.uint32) * 65536).all()
    finite = np.isfinite(wide)
    assert (float32_to_bf16(wide)[finite] == bits[finite]).all()
    np.testing.assert_array_equal(dequantize(MatrixBF16(bits.reshape(256, 256))).reshape(-1), wide)


def test_bf16_narrowing_rounds_half_to_even():
    """1 + 2^-8 lies half way between 1 and 1 + 2^-7; 1 + 3*2^-8 between 1 + 2^-7 and 1 + 2^-6."""
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, 0.0, -0.0], np.float32)
    assert [hex(v) for v in float32_to_bf16(values)] == [
        "0x3f80", "0x3f82", "0x3f81", "0xbf80", "0x7f80", "0x0", "0x8000",
    ]  # fmt: skip


def test_bf16_narrowing_keeps_nan_and_infinity():
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32)
    narrow = bf16_to_float32(float32_to_bf16(bits.view(np.float32)))
    assert np.isnan(narrow[:2]).all()
    assert narrow[2:].tolist() == [math.inf, -math.inf]


def test_bf16_narrowing_picks_the_nearest():
    values = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
    narrow = float32_to_bf16(values)
    error = np.abs(bf16_to_float32(narrow).astype(np.float64) - values)
    for neighbour in (narrow + np.uint16(1), narrow - np.uint16(1)):
        assert (error <= np.abs(bf16_to_float32(neighbour.astype(np.uint16)).astype(np.float64) - values)).all()


def test_int8_by_hand():
    """Row 0: absmax 254, scale 2, and 1/2 rounds to 0, 3/2 to 2, -5/2 to -2. Row 1 is zero."""
    matrix = quantize_int8(np.array([[254, 1, 3, -5, -254], [0, 0, -0.0, 0, 0]], np.float32))
    assert matrix.codes.tolist() == [[127, 0, 2, -2, -127], [0, 0, 0, 0, 0]]
    assert matrix.scales.tolist() == [2.0, 0.0]
    assert matrix.codes.dtype == np.int8
    assert dequantize(matrix).tolist() == [[254, 0, 4, -4, -254], [0, 0, 0, 0, 0]]


def test_int8_scale_is_the_float32_quotient_and_codes_are_nearest():
    values = np.random.default_rng(2).standard_normal((50, 97)).astype(np.float32)
    matrix = quantize_int8(values)
    for row in range(50):
        absmax = max(abs(float(v)) for v in values[row])
        assert float(matrix.scales[row]) == as_float32(absmax / 127)
        error = np.abs(dequantize(matrix)[row].astype(np.float64) - values[row])
        assert error.max() <= float(matrix.scales[row]) * (0.5 + 1e-5)


def test_int8_of_subnormals_stays_in_range():
    tiny = np.array([[180, -180, 90, 0], [3, 0, 0, 0]], np.float32) * np.float32(2.0**-149)
    matrix = quantize_int8(tiny)
    assert matrix.codes[0].tolist() == [127, -127, 90, 0]  # the scale, 180/127 of the least number, rounds to it
    assert matrix.codes[1].tolist() == [0, 0, 0, 0]  # 3/127 of it rounds to 0
    assert matrix.scales[1] == 0


def test_float32_passes_and_shapes_are_told():
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (dequantize(MatrixF32(data)) == data).all()
    assert MatrixInt8(np.zeros((4, 5), np.int8), np.zeros(4, np.float32)).shape == (4, 5)
    assert MatrixMXFP4(np.zeros((4, 16), np.uint8), np.zeros((4, 1), np.uint8)).shape == (4, 32)
