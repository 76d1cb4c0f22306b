"""The product of a stored matrix and rows of x in numpy, in the order of addition of ``mimo_vk/ops.py``.

A tile of the matrix (some rows, and a run of their words) is decoded once into ``columns`` [g, R, W]: column c of each
of the W words of a row, as float32. Then each row of x takes g passes over whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import (
    E8M0,
    F32,
    FP8_BLOCK,
    MXFP4_BLOCK,
    U8,
    Matrix,
    MatrixBF16,
    MatrixF32,
    MatrixFP8,
    MatrixInt8,
    MatrixMXFP4,
)

LANES = 32
TILE_ROWS = 128
TILE_WORDS = 512  # a multiple of 32; one column of a tile is 256 KiB of float32
MXFP4_UNIT = np.float32(2.0**126)  # an e2m1 code put into a float32's exponent and fraction is 2^-126 of its value
FP8_UNIT = np.float32(2.0**120)


def tree(lanes: F32) -> F32:
    """[..., 32] to [...]: lane l takes l+16, then l+8, l+4, l+2, l+1."""
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def padded(a: NDArray, length: int) -> NDArray:
    """a [R, m] with zeros up to [R, length], C-contiguous; a itself where nothing is missing."""
    if a.shape[1] == length and a.flags.c_contiguous:
        return a
    out = np.zeros((a.shape[0], length), a.dtype)
    out[:, : a.shape[1]] = a
    return out


def word_count(columns: int, g: int) -> int:
    """Words of g columns that hold a row, rounded up to whole rounds of 32 lanes."""
    return -(-columns // (g * LANES)) * LANES


def decode_f32(data: F32, out: F32) -> None:
    out[0] = data


def decode_bf16(data: NDArray[np.uint16], out: F32) -> None:
    words, bits = data.view(np.int32), out.view(np.int32)
    np.left_shift(words, 16, out=bits[0])
    np.bitwise_and(words, np.int32(-0x10000), out=bits[1])


def decode_int8(codes: NDArray[np.int8], out: F32) -> None:
    words = codes.view(np.int32)
    for c, column in enumerate(out):
        column[...] = (words << (24 - 8 * c)) >> 24


def decode_fp8(codes: U8, out: F32) -> None:
    """Shifts put a code's 7 low bits below a float's exponent of 2^-120, the sign on top. NaN codes give NaN."""
    words = codes.view(np.int32)
    for c, bits in enumerate(out.view(np.int32)):
        np.left_shift(words, 24 - 8 * c, out=bits)
        np.right_shift(bits, 4, out=bits)
        np.bitwise_and(bits, np.int32(-0x78100000), out=bits)
    np.multiply(out, FP8_UNIT, out=out)
    if ((codes & 0x7F) == 0x7F).any():
        out[np.abs(out) > 448] = np.nan


def decode_mxfp4(codes: U8, out: F32) -> None:
    """Shifts put a code's 3 low bits across a float's exponent of 2^-126, the sign on top."""
    words = codes.view(np.int32)
    for c, bits in enumerate(out.view(np.int32)):
        np.left_shift(words, 28 - 4 * c, out=bits)
        np.right_shift(bits, 6, out=bits)
        np.bitwise_and(bits, np.int32(-0x7E400000), out=bits)
    np.multiply(out, MXFP4_UNIT, out=out)


@dataclass(frozen=True)
class Stored:
    """What the five formats have in common: g, the stored columns [N, ...], a decoder, and the scales.

    ``word_scales(rows, first, count)`` gives the scales [R, count] of words first, first + 1, ... of some rows.
    """

    g: int
    data: NDArray
    per_word: int  # elements of data per word
    decode: Callable[[NDArray, F32], None]
    word_scales: Callable[[slice, int, int], F32] | None = None
    row_scales: F32 | None = None


def block_scales(scales: NDArray, words_per_block: int, first: int, count: int) -> F32:
    """scales [R, blocks] for words first to first + count: [R, count]; zeros past the last block."""
    blocks = scales[:, first // words_per_block : (first + count) // words_per_block]
    return padded(np.repeat(blocks, words_per_block, axis=1), count)


def stored(matrix: Matrix) -> Stored:
    match matrix:
        case MatrixF32(data):
            return Stored(1, data, 1, decode_f32)
        case MatrixBF16(data):
            return Stored(2, data, 2, decode_bf16)
        case MatrixInt8(codes, scales):
            return Stored(4, codes, 4, decode_int8, row_scales=scales)
        case MatrixFP8(codes, scales, scale_row):
            words = FP8_BLOCK // 4
            return Stored(4, codes, 4, decode_fp8, lambda r, a, n: block_scales(scales[scale_row[r]], words, a, n))
        case MatrixMXFP4(codes, scales):
            words = MXFP4_BLOCK // 8
            return Stored(8, codes, 4, decode_mxfp4, lambda r, a, n: block_scales(E8M0[scales[r]], words, a, n))


def add_tile(columns: F32, scales: F32 | None, x: F32, lanes: F32, p: F32, q: F32) -> None:
    """lanes [R, 32] takes the words of a tile, columns [g, R, W], times x [g, W]. p and q [R, W] are overwritten."""
    np.multiply(columns[0], x[0], out=p)
    for c in range(1, len(x)):
        np.multiply(columns[c], x[c], out=q)
        np.add(p, q, out=p)
    if scales is not None:
        np.multiply(p, scales, out=p)
    for w in range(0, p.shape[1], LANES):
        np.add(lanes, p[:, w : w + LANES], out=lanes)


@dataclass
class Scratch:
    """Buffers for one tile, made once per product: fresh pages would cost as much as the arithmetic."""

    columns: F32
    p: F32
    q: F32

    @classmethod
    def for_tiles(cls, g: int, rows: int, words: int) -> Scratch:
        size = min(rows, TILE_ROWS) * min(words, TILE_WORDS)
        return cls(np.empty(g * size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32))

    def shaped(self, g: int, rows: int, words: int) -> tuple[F32, F32, F32]:
        size = rows * words
        columns = self.columns[: g * size].reshape(g, rows, words)
        return columns, self.p[:size].reshape(rows, words), self.q[:size].reshape(rows, words)


def rows_product(m: Stored, rows: slice, x: F32, scratch: Scratch) -> F32:
    """Rows of the matrix times x [n, g, W]: [n, R]."""
    data = m.data[rows]
    n, g, words = x.shape
    lanes = np.zeros((n, len(data), LANES), np.float32)
    for first in range(0, words, TILE_WORDS):
        width = min(TILE_WORDS, words - first)
        columns, p, q = scratch.shaped(g, len(data), width)
        tile = padded(data[:, first * m.per_word : (first + width) * m.per_word], width * m.per_word)
        m.decode(tile, columns)
        scales = None if m.word_scales is None else m.word_scales(rows, first, width)
        for i in range(n):
            add_tile(columns, scales, x[i, :, first : first + width], lanes[i], p, q)
    total = tree(lanes)
    return total if m.row_scales is None else total * m.row_scales[rows]


def linear(matrix: Matrix, x: F32) -> F32:
    """x [n, K] times the matrix [N, K]: [n, N]."""
    outputs, inputs = matrix.shape
    assert x.ndim == 2 and x.shape[1] == inputs, (x.shape, matrix.shape)
    m = stored(matrix)
    words = word_count(inputs, m.g)
    by_column = np.ascontiguousarray(padded(x, m.g * words).reshape(-1, words, m.g).transpose(0, 2, 1))
    out = np.empty((x.shape[0], outputs), np.float32)
    scratch = Scratch.for_tiles(m.g, outputs, words)
    for first in range(0, outputs, TILE_ROWS):
        rows = slice(first, first + TILE_ROWS)
        out[:, rows] = rows_product(m, rows, by_column, scratch)
    return out
