"""The stored number formats, stated once in numpy: MXFP4, FP8 e4m3, BF16, int8, float32.

A matrix is [N, K]: N outputs (rows), K inputs (columns). Its arrays are C-contiguous along a row and are
never modified; they may be views of mapped files. How a product with one is added up is the contract
in ``mimo_vk/ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

FP8_BLOCK = 128  # columns that share one FP8 scale
MXFP4_BLOCK = 32  # columns that share one MXFP4 scale


@dataclass(frozen=True, eq=False)
class MatrixF32:
    """float32 weights, [N, K]."""

    data: F32

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixBF16:
    """bfloat16 weights as their 16 bits, uint16 [N, K]."""

    data: NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixInt8:
    """int8 codes [N, K] with one float32 scale per row, [N]."""

    codes: NDArray[np.int8]
    scales: F32

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixFP8:
    """FP8 e4m3fn codes [N, K], float32 scales [S, ceil(K/128)], and the scale row of each row, int32 [N].

    The scale rows are listed because the fused qkv restarts its grid at each chunk.
    """

    codes: U8
    scales: F32
    scale_row: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixMXFP4:
    """MXFP4: packed e2m1 codes [N, K/2] (column 2k in the low nibble of byte k) and e8m0 scales [N, K/32]."""

    codes: U8
    scales: U8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2


DenseMatrix = MatrixF32 | MatrixBF16 | MatrixInt8 | MatrixFP8
Matrix = DenseMatrix | MatrixMXFP4


@dataclass(frozen=True, eq=False)
class Expert:
    """One routed expert: gate and up are [I, H], down is [H, I], all MXFP4."""

    gate: MatrixMXFP4
    up: MatrixMXFP4
    down: MatrixMXFP4


def _e4m3fn_values() -> F32:
    """The 256 values: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float64)
    magnitude = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    values = np.where(code & 128, -magnitude, magnitude)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


def _e2m1_values() -> F32:
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([magnitude, -magnitude])


def _e8m0_values() -> F32:
    """2^(b-127); b = 0 is the subnormal 2^-127, 255 is NaN."""
    values = np.ldexp(np.float32(1), np.arange(-127, 129)).astype(np.float32)
    values[255] = np.nan
    return values


def _frozen(values: F32) -> F32:
    values.flags.writeable = False
    return values


with np.errstate(over="ignore"):
    E4M3FN: F32 = _frozen(_e4m3fn_values())
    E2M1: F32 = _frozen(_e2m1_values())
    E8M0: F32 = _frozen(_e8m0_values())


def bf16_to_float32(bits: NDArray[np.uint16]) -> F32:
    """Exact: bfloat16 is the upper half of a float32."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def float32_to_bf16(values: F32) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; what is too large becomes infinite, a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > 0x7F800000, quiet, rounded).astype(np.uint16)


def quantize_int8(values: F32) -> MatrixInt8:
    """One scale per row, absmax/127 in float32; codes are value/scale rounded half to even; a zero row has scale 0.

    values [N, K] are finite.
    """
    absmax = np.abs(values).max(axis=1) if values.shape[1] else np.zeros(values.shape[0], np.float32)
    scales = (absmax / np.float32(127)).astype(np.float32)
    divisor = np.where(scales == 0, np.float32(np.inf), scales)[:, None]
    codes = values / divisor
    np.rint(codes, out=codes)
    np.clip(codes, -127, 127, out=codes)  # matters only where a subnormal scale is coarse
    return MatrixInt8(codes.astype(np.int8), scales)


def _decode_fp8(matrix: MatrixFP8) -> F32:
    columns = matrix.codes.shape[1]
    values = np.take(E4M3FN, matrix.codes)
    with np.errstate(over="ignore", invalid="ignore"):  # 0 times an infinite scale is NaN
        for block, start in enumerate(range(0, columns, FP8_BLOCK)):
            values[:, start : start + FP8_BLOCK] *= matrix.scales[matrix.scale_row, block][:, None]
    return values


def _decode_mxfp4(matrix: MatrixMXFP4) -> F32:
    rows, columns = matrix.shape
    values = np.empty((rows, columns), np.float32)
    values[:, 0::2] = E2M1[matrix.codes & 15]
    values[:, 1::2] = E2M1[matrix.codes >> 4]
    with np.errstate(over="ignore"):  # 2^127 times 2 and more is infinite, as in any float32
        values.reshape(rows, -1, MXFP4_BLOCK)[...] *= E8M0[matrix.scales][:, :, None]
    return values


def dequantize(matrix: Matrix) -> F32:
    """The stored weights as float32 [N, K]: each code times its scale, rounded once (exact but for FP8 and int8)."""
    match matrix:
        case MatrixF32(data):
            return data.astype(np.float32)
        case MatrixBF16(bits):
            return bf16_to_float32(bits)
        case MatrixInt8(codes, scales):
            return codes.astype(np.float32) * scales[:, None]
        case MatrixFP8():
            return _decode_fp8(matrix)
        case MatrixMXFP4():
            return _decode_mxfp4(matrix)
