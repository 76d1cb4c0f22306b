"""How the words of each stored format become float vectors: LLVM emitters, exact in every bit.

A vector holds one word (32 bits of a stored row, g columns) per lane; decoding gives g float vectors, one per
column of the word, in column order. What each one does is in ``mimo_vk/formats.py``'s terms; the tricks are beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from cpu_fallback.vector_ir import (
    BYTES,
    F32,
    FLOATS,
    HALVES,
    I64,
    INTS,
    WIDTH,
    Builder,
    Value,
    add,
    broadcast,
    byte_vector,
    load,
    splat,
    splat_float,
    splat_halves,
    target_has,
)

FORMAT_F32, FORMAT_BF16, FORMAT_INT8, FORMAT_FP8, FORMAT_MXFP4, FORMAT_MXFP4_PORTABLE = range(6)
STEP = 256  # columns that one step of a kernel works on
LANES = 32
GROUPS = LANES // WIDTH  # vectors that hold one word of each lane

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_HALVES = (0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0)  # the upper 16 bits of each as a float32
SMALLEST_SCALE = 0x00400000  # 2^-127, what an e8m0 byte of 0 means


@dataclass(frozen=True)
class Layout:
    """g columns a word; bytes of codes and of scales in one step (0: a word's partial has no scale); columns of a scale."""

    g: int
    step_bytes: int
    scale_bytes: int = 0
    scale_columns: int = STEP

    @property
    def rounds(self) -> int:
        """Words of one lane in a step."""
        return STEP // (LANES * self.g)


LAYOUTS = {
    FORMAT_F32: Layout(1, 4 * STEP),
    FORMAT_BF16: Layout(2, 2 * STEP),
    FORMAT_INT8: Layout(4, STEP),
    FORMAT_FP8: Layout(4, STEP, 8, 128),
    FORMAT_MXFP4: Layout(8, STEP // 2, 8, 32),
    FORMAT_MXFP4_PORTABLE: Layout(8, STEP // 2, 8, 32),
}


def decode_f32(b: Builder, words: Value) -> list[Value]:
    return [b.bitcast(words, FLOATS)]


def decode_bf16(b: Builder, words: Value) -> list[Value]:
    low = b.shl(words, splat(16))
    high = b.and_(words, splat(0xFFFF0000))
    return [b.bitcast(low, FLOATS), b.bitcast(high, FLOATS)]


def decode_int8(b: Builder, words: Value) -> list[Value]:
    tops = [b.shl(words, splat(24 - 8 * c)) if c < 3 else words for c in range(4)]
    return [b.sitofp(b.ashr(top, splat(24)), FLOATS) for top in tops]


def sign_extended(b: Builder, words: Value, left: int, right: int) -> Value:
    """Both 16-bit halves of each word shifted left, then right with the sign."""
    halves = b.bitcast(words, HALVES)
    if left:
        halves = b.shl(halves, splat_halves(left))
    return b.bitcast(b.ashr(halves, splat_halves(right)), INTS)


def two_columns(b: Builder, halves: Value, mask: int, unit: float) -> tuple[Value, Value]:
    """The low and the high half of each word as the top of a float, times ``unit``, which is exact."""
    low = b.and_(b.shl(halves, splat(16)), splat(mask))
    high = b.and_(halves, splat(mask))
    scale = splat_float(unit)
    return b.fmul(b.bitcast(low, FLOATS), scale), b.fmul(b.bitcast(high, FLOATS), scale)


def decode_fp8(b: Builder, words: Value) -> list[Value]:
    """A code's 7 low bits at the bottom of a float's exponent are 2^-120 of its value, subnormal codes included."""
    even = sign_extended(b, words, 8, 4)
    odd = sign_extended(b, words, 0, 4)
    first, third = two_columns(b, even, 0x87F00000, 2.0**120)
    second, fourth = two_columns(b, odd, 0x87F00000, 2.0**120)
    return [first, second, third, fourth]


def decode_mxfp4_portable(b: Builder, words: Value) -> list[Value]:
    """A code's 3 low bits at the bottom of a float's exponent are 2^-126 of its value (subnormal for codes 0 and 1)."""
    pairs = [two_columns(b, sign_extended(b, words, 12 - 4 * c, 6), 0x81C00000, 2.0**126) for c in range(4)]
    return [low for low, _ in pairs] + [high for _, high in pairs]


def lookup(b: Builder, table: Value, codes: Value) -> Value:
    """table[code] for 32 codes of 0..15 at once (AVX2's vpshufb; the table is there twice)."""
    kind = ir.FunctionType(BYTES, [BYTES, BYTES])
    return b.call(b.module.declare_intrinsic("llvm.x86.avx2.pshuf.b", [], kind), [table, codes])


def decode_mxfp4(b: Builder, words: Value) -> list[Value]:
    """Two lookups give the upper two bytes of each float; unpacking pairs them, two columns to a word."""
    if not target_has("avx2"):
        return decode_mxfp4_portable(b, words)
    by_lane = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    undefined = ir.Constant(BYTES, ir.Undefined)
    order = ir.Constant(INTS_32, by_lane + [16 + i for i in by_lane])
    ordered = b.bitcast(b.shuffle_vector(b.bitcast(words, BYTES), undefined, order), INTS)
    even = b.bitcast(b.and_(ordered, splat(0x0F0F0F0F)), BYTES)
    odd = b.bitcast(b.and_(b.lshr(ordered, splat(4)), splat(0x0F0F0F0F)), BYTES)
    columns: list[Value] = [None] * 8
    for first, codes in ((0, even), (1, odd)):
        high, low = lookup(b, HIGH_TABLE, codes), lookup(b, LOW_TABLE, codes)
        for half, start in ((0, first), (1, first + 4)):
            pair = b.bitcast(b.shuffle_vector(low, high, UNPACK[half]), INTS)
            columns[start], columns[start + 2] = decode_bf16(b, pair)
    return columns


def table(shift: int) -> Value:
    """Byte ``shift``/8 of the upper halves of the 16 codes' floats, once per 128 bits."""
    halves = [*E2M1_HALVES, *(0x8000 | h for h in E2M1_HALVES)]
    return byte_vector([h >> shift & 0xFF for h in halves] * 2)


INTS_32 = ir.VectorType(ir.IntType(32), 32)
HIGH_TABLE, LOW_TABLE = table(8), table(0)
UNPACK = [
    ir.Constant(INTS_32, [i for base in (0, 16) for k in range(8) for i in (base + 8 * h + k, 32 + base + 8 * h + k)])
    for h in (0, 1)
]

DECODERS: dict[int, Callable[[Builder, Value], list[Value]]] = {
    FORMAT_F32: decode_f32,
    FORMAT_BF16: decode_bf16,
    FORMAT_INT8: decode_int8,
    FORMAT_FP8: decode_fp8,
    FORMAT_MXFP4: decode_mxfp4,
    FORMAT_MXFP4_PORTABLE: decode_mxfp4_portable,
}


def scale_vector(b: Builder, fmt: int, scales: Value, t: int, group: int) -> Value | None:
    """The scale of each lane's word t in a step (``scales``: the address of the step's scales), or None."""
    if fmt == FORMAT_FP8:  # a round of 32 words of 4 columns is one block
        return broadcast(b, load(b, add(b, scales, 4 * t), F32), FLOATS)
    if LAYOUTS[fmt].scale_bytes == 0:
        return None
    eight = b.bitcast(broadcast(b, load(b, scales, I64), ir.VectorType(I64, WIDTH // 2)), BYTES)
    order = [i for lane in range(WIDTH) for i in (32, 32, 32, 4 * lane // 16 * 16 + 2 * group + lane // 4)]
    zeros = byte_vector([0] * (4 * WIDTH))
    top = b.bitcast(b.shuffle_vector(eight, zeros, ir.Constant(INTS_32, order)), INTS)
    exponent = b.lshr(top, splat(1))
    tiny = b.icmp_unsigned("<", exponent, splat(SMALLEST_SCALE))
    return b.bitcast(b.select(tiny, splat(SMALLEST_SCALE), exponent), FLOATS)
