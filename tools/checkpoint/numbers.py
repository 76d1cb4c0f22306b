"""Random numbers and stored formats whose bytes are the same on every machine.

Only the generator's raw integers are used, and IEEE-754 add, multiply, divide and square root, which round the same
everywhere. numpy's own distributions and libm's functions are not promised to.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
FP8_MAX = 448.0
BLOCK = 128
MXFP4_RMS = 2.926  # of the 16 codes, each as likely


def _generator(seed: int, name: str) -> np.random.PCG64:
    """A stream for each tensor, so that no tensor's bytes depend on what was made before it."""
    return np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


def random_bytes(seed: int, name: str, count: int) -> U8:
    raw = np.asarray(_generator(seed, name).random_raw(-(-count // 8)), "<u8")
    return raw.view(np.uint8)[:count]


def gaussian(seed: int, name: str, shape: tuple[int, ...], std: float) -> F64:
    """Near-normal numbers: sums of four 16-bit integers, scaled to ``std``; the tails end at 3.46 std."""
    count = math.prod(shape)
    raw = np.asarray(_generator(seed, name).random_raw(count), "<u8").view("<u2").reshape(count, 4)
    total = raw[:, 0].astype(np.int64) + raw[:, 1] + raw[:, 2] + raw[:, 3]
    centred = total.astype(np.float64) - 2.0 * 65535.0
    return (centred * (std / (65536.0 * math.sqrt(4.0 / 12.0)))).reshape(shape)


def bf16(x: F64) -> NDArray[np.uint16]:
    """Nearest bfloat16, ties to even, as bits."""
    bits = x.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _fp8_magnitudes() -> F64:
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal)


_FP8_MIDPOINTS = (_fp8_magnitudes()[1:] + _fp8_magnitudes()[:-1]) / 2


def fp8(x: F64) -> U8:
    """Nearest e4m3fn code of numbers up to 448 in size."""
    code = np.searchsorted(_FP8_MIDPOINTS, np.abs(x)).astype(np.uint8)
    return code | (np.signbit(x).astype(np.uint8) * np.uint8(0x80))


def fp8_blocks(x: F64) -> tuple[U8, NDArray[np.float32]]:
    """x [N, K] as codes [N, K] and scales [ceil(N/128), ceil(K/128)]: a cell's largest number becomes code +-448."""
    rows, cols = x.shape
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((-(-rows // BLOCK), -(-cols // BLOCK)), "<f4")
    for i, j in np.ndindex(scales.shape):
        cell = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        scales[i, j] = np.abs(x[cell]).max() / FP8_MAX
        codes[cell] = fp8(x[cell] / np.float64(scales[i, j]))
    return codes, scales


def mxfp4_scales(seed: int, name: str, shape: tuple[int, ...], gain: float) -> U8:
    """Scale bytes that vary by up to 8 times around gain / (sqrt(K) * rms of a code), K the row's columns."""
    target = gain / (math.sqrt(shape[-1] * 32) * MXFP4_RMS)
    base = 127 + math.frexp(target)[1]
    offsets = np.array([-2, -1, -1, 0, 0, 0, 0, 1])
    pick = random_bytes(seed, name, math.prod(shape)) & 7
    return (base + offsets[pick]).astype(np.uint8).reshape(shape)
