"""How the words of each stored format become float vectors: LLVM emitters, exact in every bit.

A vector holds one word (32 bits of a stored row, g columns) per lane; decoding gives g float vectors, one per column of
the word, in column order. Decoders are generators: a column's instructions are emitted when it is asked for, so that
few values are alive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from cpu_fallback.vector_ir import (
    BYTES,
    F32,
    FLOATS,
    HALVES,
    I16,
    I64,
    INTS,
    WIDTH,
    Builder,
    Value,
    add,
    broadcast,
    byte_vector,
    indices,
    load,
    shuffle_bytes,
    splat,
    splat_float,
    splat_halves,
    target_has,
)

FORMAT_F32, FORMAT_BF16, FORMAT_INT8, FORMAT_FP8, FORMAT_MXFP4, FORMAT_MXFP4_PORTABLE, FORMAT_FP8_FOLDED = range(7)
STEP = 256  # columns that one step of a kernel works on
LANES = 32
GROUPS = LANES // WIDTH  # vectors that hold one word of each lane
COLUMNS = STEP // LANES  # columns of one lane in a step

E2M1_HALVES = (0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0)  # 0 to 6, the upper 16 bits as a float32
SMALLEST_SCALE = 0x00400000  # 2^-127, what an e8m0 byte of 0 means
FOLDED_X = 2.0**100  # FORMAT_FP8_FOLDED: x comes times this, the scale takes FOLDED_SCALE, and 2^-120 is undone
FOLDED_SCALE = 2.0**20


@dataclass(frozen=True)
class Layout:
    """g columns a word; bytes of codes and of scales in a step (0: words have no scale); columns that share a scale."""

    g: int
    step_bytes: int
    scale_bytes: int = 0
    scale_columns: int = STEP

    @property
    def rounds(self) -> int:
        """Words of one lane in a step."""
        return COLUMNS // self.g


LAYOUTS = {
    FORMAT_F32: Layout(1, 4 * STEP),
    FORMAT_BF16: Layout(2, 2 * STEP),
    FORMAT_INT8: Layout(4, STEP),
    FORMAT_FP8: Layout(4, STEP, 8, 128),
    FORMAT_MXFP4: Layout(8, STEP // 2, 8, 32),
    FORMAT_MXFP4_PORTABLE: Layout(8, STEP // 2, 8, 32),
    FORMAT_FP8_FOLDED: Layout(4, STEP, 8, 128),
}
Decoder = Callable[[Builder, Value], Iterator[Value]]


def low_half(b: Builder, words: Value, mask: int = 0xFFFF0000) -> Value:
    """The low 16 bits of each word as the top of a float."""
    shifted = b.shl(words, splat(16))
    return b.bitcast(shifted if mask == 0xFFFF0000 else b.and_(shifted, splat(mask)), FLOATS)


def high_half(b: Builder, words: Value, mask: int = 0xFFFF0000) -> Value:
    return b.bitcast(b.and_(words, splat(mask)), FLOATS)


def decode_f32(b: Builder, words: Value) -> Iterator[Value]:
    yield b.bitcast(words, FLOATS)


def decode_bf16(b: Builder, words: Value) -> Iterator[Value]:
    yield low_half(b, words)
    yield high_half(b, words)


def decode_int8(b: Builder, words: Value) -> Iterator[Value]:
    for c in range(4):
        top = b.shl(words, splat(24 - 8 * c)) if c < 3 else words
        yield b.sitofp(b.ashr(top, splat(24)), FLOATS)


def decode_fp8_folded(b: Builder, words: Value) -> Iterator[Value]:
    """2^-120 of each value: a code's 7 low bits at the bottom of a float's exponent, subnormal codes included."""
    halves = b.bitcast(words, HALVES)
    even = b.bitcast(b.ashr(b.shl(halves, splat_halves(8)), splat_halves(4)), INTS)
    odd = b.bitcast(b.ashr(halves, splat_halves(4)), INTS)
    for part in (low_half, high_half):
        yield part(b, even, 0x87F00000)
        yield part(b, odd, 0x87F00000)


def decode_fp8(b: Builder, words: Value) -> Iterator[Value]:
    for column in decode_fp8_folded(b, words):
        yield b.fmul(column, splat_float(2.0**120))


def decode_mxfp4_portable(b: Builder, words: Value) -> Iterator[Value]:
    """Codes in the top of both halves of each word, two columns at once; codes 0 and 1 apart, to make no subnormals."""
    pairs = []
    for c in range(4):
        top = b.shl(b.bitcast(words, HALVES), splat_halves(12 - 4 * c))
        size = b.and_(b.lshr(top, splat_halves(6)), splat_halves(0x01C0))  # across a float's exponent and fraction
        small = b.mul(size, splat_halves(0xFC))  # 0 or, for code 1 (0x40), the 0x3F00 of 0.5
        usual = b.add(size, splat_halves(0x3F00))
        value = b.select(b.icmp_unsigned("<", size, splat_halves(0x80)), small, usual)
        signed = b.or_(value, b.and_(top, splat_halves(0x8000)))
        pairs.append(b.bitcast(signed, INTS))
        yield low_half(b, pairs[-1])
    for pair in pairs:
        yield high_half(b, pair)


def lookup(b: Builder, table: Value, codes: Value) -> Value:
    """table[code] for 32 codes of 0..15 at once (AVX2's vpshufb; the table is there twice)."""
    kind = ir.FunctionType(BYTES, [BYTES, BYTES])
    return b.call(b.module.declare_intrinsic("llvm.x86.avx2.pshuf.b", [], kind), [table, codes])


def e2m1_table(shift: int) -> Value:
    """Byte ``shift``/8 of the upper halves of the 16 codes' floats, once per 128 bits."""
    halves = [*E2M1_HALVES, *(0x8000 | h for h in E2M1_HALVES)]
    return byte_vector([h >> shift & 0xFF for h in halves] * 2)


def decode_mxfp4(b: Builder, words: Value) -> Iterator[Value]:
    """Two lookups give the upper two bytes of each float; unpacking pairs them, two columns to a word."""
    if not target_has("avx2"):
        yield from decode_mxfp4_portable(b, words)
        return
    order = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]  # bytes 0 and 1 of four words, then bytes 2 and 3
    raw = b.bitcast(words, BYTES)
    ordered = b.bitcast(shuffle_bytes(b, raw, raw, order + [16 + i for i in order]), INTS)
    even = b.bitcast(b.and_(ordered, splat(0x0F0F0F0F)), BYTES)
    odd = b.bitcast(b.and_(b.lshr(ordered, splat(4)), splat(0x0F0F0F0F)), BYTES)
    tables = e2m1_table(0), e2m1_table(8)
    bytes_of = [[lookup(b, table, codes) for table in tables] for codes in (even, odd)]
    for half in (0, 8):
        unpack = [i for base in (0, 16) for k in range(8) for i in (base + half + k, 32 + base + half + k)]
        pairs = [b.bitcast(shuffle_bytes(b, low, high, unpack), INTS) for low, high in bytes_of]
        for part in (low_half, high_half):
            for pair in pairs:
                yield part(b, pair)


DECODERS: dict[int, Decoder] = {
    FORMAT_F32: decode_f32,
    FORMAT_BF16: decode_bf16,
    FORMAT_INT8: decode_int8,
    FORMAT_FP8: decode_fp8,
    FORMAT_MXFP4: decode_mxfp4,
    FORMAT_MXFP4_PORTABLE: decode_mxfp4_portable,
    FORMAT_FP8_FOLDED: decode_fp8_folded,
}


def block_scales(b: Builder, fmt: int, scales: Value) -> list[Value]:
    """FP8: the scale of each round of a step, in every lane. ``scales`` is the address of the step's."""
    factors = [load(b, add(b, scales, 4 * t), F32) for t in range(LAYOUTS[fmt].rounds)]
    if fmt == FORMAT_FP8_FOLDED:
        factors = [b.fmul(factor, ir.Constant(F32, FOLDED_SCALE)) for factor in factors]
    return [broadcast(b, factor, FLOATS) for factor in factors]


def e8m0(b: Builder, scales: Value, order: Sequence[int]) -> Value:
    """Bytes order[lane] of a vector of e8m0 scales as floats; byte b is 2^(b - 127)."""
    place = [i for source in order for i in (32, 32, 32, source)]
    exponent = b.lshr(b.bitcast(shuffle_bytes(b, scales, byte_vector([0] * 32), place), INTS), splat(1))
    tiny = b.icmp_unsigned("<", exponent, splat(SMALLEST_SCALE))
    return b.bitcast(b.select(tiny, splat(SMALLEST_SCALE), exponent), FLOATS)


def step_scales(b: Builder, scales: Value) -> Callable[[int], Value]:
    """MXFP4: the scales of group q's lanes in a step. The 8 words of a group are two blocks of 32 columns."""
    eight = b.bitcast(broadcast(b, load(b, scales, I64), ir.VectorType(I64, WIDTH // 2)), BYTES)
    both = e8m0(b, eight, [0, 2, 4, 6, 17, 19, 21, 23])  # the even blocks in one half, the odd ones in the other
    return lambda q: b.shuffle_vector(both, both, indices([q] * 4 + [4 + q] * 4))


def group_scales(b: Builder, scales: Value) -> Value:
    """MXFP4: the scales of one group's lanes; ``scales`` is the address of its two bytes."""
    two = b.bitcast(broadcast(b, load(b, scales, I16), HALVES), BYTES)
    return e8m0(b, two, [0] * 4 + [17] * 4)
