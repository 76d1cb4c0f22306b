"""Random matrices in every stored format, and their float64 values by code that the package doesn't share."""

from __future__ import annotations

import numpy as np

from mimo_vk.formats import F32, Expert, Matrix, MatrixBF16, MatrixF32, MatrixFP8, MatrixInt8, MatrixMXFP4

KINDS = ("f32", "bf16", "int8", "fp8", "mxfp4")
GROUP = {"f32": 1, "bf16": 2, "int8": 4, "fp8": 4, "mxfp4": 8}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_x(rng: np.random.Generator, rows: int, columns: int) -> F32:
    return rng.standard_normal((rows, columns)).astype(np.float32)


def random_mxfp4(rng: np.random.Generator, n: int, k: int, low: int = 118, high: int = 134) -> MatrixMXFP4:
    """Scale bytes low..high, both included."""
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return MatrixMXFP4(codes, rng.integers(low, high + 1, (n, k // 32), dtype=np.uint8))


def random_fp8(rng: np.random.Generator, n: int, k: int) -> MatrixFP8:
    """All codes but the two NaN; scale rows in no order, as a chunked grid's may be."""
    codes = rng.integers(0, 0x7F, (n, k), dtype=np.uint8)
    codes |= rng.integers(0, 2, (n, k), dtype=np.uint8) * np.uint8(0x80)
    scale_rows = -(-n // 128) + 1
    scales = rng.uniform(0.001, 0.1, (scale_rows, -(-k // 128))).astype(np.float32)
    return MatrixFP8(codes, scales, rng.integers(0, scale_rows, n).astype(np.int32))


def random_matrix(rng: np.random.Generator, kind: str, n: int, k: int) -> Matrix:
    if kind == "mxfp4":
        return random_mxfp4(rng, n, k)
    if kind == "fp8":
        return random_fp8(rng, n, k)
    if kind == "int8":
        codes = rng.integers(-127, 128, (n, k), dtype=np.int8)
        return MatrixInt8(codes, rng.uniform(0.001, 0.1, n).astype(np.float32))
    values = rng.standard_normal((n, k)).astype(np.float32)
    if kind == "bf16":
        return MatrixBF16((values.view(np.uint32) >> 16).astype(np.uint16))
    return MatrixF32(values)


def random_expert(rng: np.random.Generator, hidden: int, inner: int) -> Expert:
    gate, up = random_mxfp4(rng, inner, hidden), random_mxfp4(rng, inner, hidden)
    return Expert(gate, up, random_mxfp4(rng, hidden, inner))


def fp8_value(code: int) -> float:
    """e4m3fn: bias 7, subnormals in units of 2^-9, no infinities."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    magnitude = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


FP8_VALUES = np.array([fp8_value(code) for code in range(256)])
E2M1_VALUES = np.array(E2M1 + [-v for v in E2M1])


def unscaled(matrix: Matrix) -> np.ndarray:
    """The stored numbers without their scales, float64 [N, K]."""
    match matrix:
        case MatrixF32(data):
            return data.astype(np.float64)
        case MatrixBF16(data):
            return (data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case MatrixInt8(codes, _):
            return codes.astype(np.float64)
        case MatrixFP8(codes, _, _):
            return FP8_VALUES[codes]
        case MatrixMXFP4(codes, _):
            nibbles = np.stack([codes & 15, codes >> 4], axis=2)
            return E2M1_VALUES[nibbles.reshape(len(codes), -1)]


def scales(matrix: Matrix) -> np.ndarray:
    """The factor of every element, float64 [N, K]."""
    n, k = matrix.shape
    column = np.arange(k)
    match matrix:
        case MatrixInt8(_, row_scales):
            return np.repeat(row_scales.astype(np.float64)[:, None], k, axis=1)
        case MatrixFP8(_, grid, scale_row):
            return grid.astype(np.float64)[scale_row][:, column // 128]
        case MatrixMXFP4(_, exponents):
            return (2.0 ** (exponents.astype(np.float64) - 127))[:, column // 32]
        case _:
            return np.ones((n, k))


def dense(matrix: Matrix) -> np.ndarray:
    """The whole matrix, float64 [N, K]."""
    return unscaled(matrix) * scales(matrix)
