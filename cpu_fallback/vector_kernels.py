"""The kernels of the matrix products, emitted as LLVM functions, and the numba intrinsics that call them.

All work on steps of 256 columns and on rows given by address. ``direct`` decodes in registers, for one row of x;
``decode`` writes decoded rows to a small scratch and ``tile`` multiplies two of them with up to four rows of x. Both
keep the order of ``mimo_vk/ops.py``: lane sums live in memory as [..., 32] float32 and are finished by ``tree``.

x is permuted once per call into [step][row][word of the lane][column of the word][lane], zero padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from cpu_fallback.jit import jit
from cpu_fallback.vector_decode import (
    DECODERS,
    GROUPS,
    LANES,
    LAYOUTS,
    STEP,
    scale_vector,
)
from cpu_fallback.vector_ir import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    WIDTH,
    Builder,
    Value,
    add,
    const,
    function,
    indices,
    load,
    loop,
    store,
)

LANE_BYTES = 4 * LANES  # 32 float32 sums, or one column of a round of words
GROUP_BYTES = 4 * WIDTH
STEP_BYTES = 4 * STEP  # a step of x, or of a decoded row
SCRATCH_ROW = STEP_BYTES + 2 * LANE_BYTES  # a decoded step, then the scales of its words (two rounds at most)
TILE_WEIGHTS = 2  # decoded rows that one tile multiplies
TILE_ROWS = (1, 2, 4)  # rows of x in a tile


def pointer_at(b: Builder, table: Value, index: Value) -> Value:
    return load(b, b.add(table, b.mul(index, const(8))), I64)


def chain(b: Builder, p: Value | None, weight: Value, x: Value) -> Value:
    product = b.fmul(weight, x)
    return product if p is None else b.fadd(p, product)


def direct_step(b: Builder, fmt: int, words: Value, scales: Value, x: Value, acc: Value) -> None:
    """256 columns of one stored row times one row of x, added to the row's 32 lane sums at ``acc``."""
    layout = LAYOUTS[fmt]
    for group in range(GROUPS):
        total = load(b, add(b, acc, group * GROUP_BYTES), FLOATS)
        for t in range(layout.rounds):
            word = load(b, add(b, words, t * LANE_BYTES + group * GROUP_BYTES), INTS)
            p = None
            for c, weight in enumerate(DECODERS[fmt](b, word)):
                offset = (t * layout.g + c) * LANE_BYTES + group * GROUP_BYTES
                p = chain(b, p, weight, load(b, add(b, x, offset), FLOATS))
            scale = scale_vector(b, fmt, scales, t, group)
            total = b.fadd(total, p if scale is None else b.fmul(p, scale))
        store(b, total, add(b, acc, group * GROUP_BYTES))


def emit_direct(fmt: int) -> Callable[[Builder, Sequence[Value]], None]:
    layout = LAYOUTS[fmt]

    def emit(b: Builder, args: Sequence[Value]) -> None:
        words, scales, rows, first, steps, x, x_step, acc = args
        with loop(b, steps) as s:
            step = b.add(first, s)
            x_here = b.add(x, b.mul(step, x_step))
            word_offset = b.mul(step, const(layout.step_bytes))
            scale_offset = b.mul(step, const(layout.scale_bytes))
            with loop(b, rows) as r:
                w = b.add(pointer_at(b, words, r), word_offset)
                sc = b.add(pointer_at(b, scales, r), scale_offset)
                direct_step(b, fmt, w, sc, x_here, b.add(acc, b.mul(r, const(LANE_BYTES))))

    return emit


def emit_decode(fmt: int) -> Callable[[Builder, Sequence[Value]], None]:
    layout = LAYOUTS[fmt]

    def emit(b: Builder, args: Sequence[Value]) -> None:
        words, scales, rows, step, scratch = args
        word_offset = b.mul(step, const(layout.step_bytes))
        scale_offset = b.mul(step, const(layout.scale_bytes))
        with loop(b, rows) as r:
            w = b.add(pointer_at(b, words, r), word_offset)
            sc = b.add(pointer_at(b, scales, r), scale_offset)
            out = b.add(scratch, b.mul(r, const(SCRATCH_ROW)))
            for t in range(layout.rounds):
                for group in range(GROUPS):
                    word = load(b, add(b, w, t * LANE_BYTES + group * GROUP_BYTES), INTS)
                    for c, weight in enumerate(DECODERS[fmt](b, word)):
                        offset = (t * layout.g + c) * LANE_BYTES + group * GROUP_BYTES
                        store(b, weight, add(b, out, offset))
                    scale = scale_vector(b, fmt, sc, t, group)
                    if scale is not None:
                        store(b, scale, add(b, out, STEP_BYTES + t * LANE_BYTES + group * GROUP_BYTES))

    return emit


def tile_round(b: Builder, g: int, weights: Sequence[Value], xs: Sequence[Value], t: int) -> dict[Any, Value]:
    """The partials of word t of one vector of lanes, for every pair of a decoded row and a row of x."""
    p: dict[Any, Value] = {}
    if g > 2:  # column by column: the partials of all pairs in registers
        for c in range(g):
            offset = (t * g + c) * LANE_BYTES
            ws = [load(b, add(b, w, offset), FLOATS) for w in weights]
            for m, x in enumerate(xs):
                column = load(b, add(b, x, offset), FLOATS)
                for r, w in enumerate(ws):
                    p[r, m] = chain(b, p.get((r, m)), w, column)
        return p
    ws2 = [[load(b, add(b, w, (t * g + c) * LANE_BYTES), FLOATS) for c in range(g)] for w in weights]
    for m, x in enumerate(xs):
        columns = [load(b, add(b, x, (t * g + c) * LANE_BYTES), FLOATS) for c in range(g)]
        for r, w2 in enumerate(ws2):
            for w, column in zip(w2, columns, strict=True):
                p[r, m] = chain(b, p.get((r, m)), w, column)
    return p


def emit_tile(g: int, scaled: bool, count: int) -> Callable[[Builder, Sequence[Value]], None]:
    """Two decoded rows at ``scratch`` times ``count`` rows of x, added to the lane sums [2][...][32] at ``acc``."""

    def emit(b: Builder, args: Sequence[Value]) -> None:
        scratch, x_step, x_offsets, acc, acc_row = args
        starts = [b.add(x_step, pointer_at(b, x_offsets, const(m))) for m in range(count)]
        with loop(b, const(GROUPS)) as group:
            lane = b.mul(group, const(GROUP_BYTES))
            weights = [b.add(lane, add(b, scratch, r * SCRATCH_ROW)) for r in range(TILE_WEIGHTS)]
            xs = [b.add(start, lane) for start in starts]
            rows = [b.add(lane, acc), b.add(lane, b.add(acc, acc_row))]
            places = {(r, m): add(b, rows[r], m * LANE_BYTES) for r in range(TILE_WEIGHTS) for m in range(count)}
            totals = {key: load(b, place, FLOATS) for key, place in places.items()}
            for t in range(STEP // (LANES * g)):
                p = tile_round(b, g, weights, xs, t)
                for r, weight in enumerate(weights):
                    scale = load(b, add(b, weight, STEP_BYTES + t * LANE_BYTES), FLOATS) if scaled else None
                    for m in range(count):
                        part = p[r, m] if scale is None else b.fmul(p[r, m], scale)
                        totals[r, m] = b.fadd(totals[r, m], part)
            for key, place in places.items():
                store(b, totals[key], place)

    return emit


KINDS = {0: (1, False), 1: (2, False), 2: (4, False), 3: (4, True), 4: (8, True)}  # words of g columns, scaled or not
KIND_OF = [0, 1, 2, 3, 4, 4]  # by format


FORMATS = len(LAYOUTS)
DIRECT, DECODE, TILE = 0, FORMATS, 2 * FORMATS  # where each family begins in the table of addresses
KERNELS = TILE + len(KINDS) * (max(TILE_ROWS) + 1)


def emit_all(module: Any) -> dict[int, Value]:
    """Every kernel as a function of the module, by its place in the table of addresses.

    ``direct`` (by format) of words, scales, rows, first, steps, x, x_step, acc: steps first..first+steps of ``rows`` stored
    rows times one row of x. words and scales are addresses of tables of row addresses, x that of the permuted row's first
    step, its steps x_step bytes apart; acc [rows][32] lane sums.

    ``decode`` (by format) of words, scales, rows, step, scratch: one step of ``rows`` stored rows as floats and scales, to
    scratch [rows][SCRATCH_ROW bytes].

    ``tile`` (by kind and rows of x) of scratch, x_step, x_offsets, acc, acc_row: one step of two decoded rows times some
    rows of x. x_step is the address of the step of x, x_offsets that of a table of the rows' offsets in it; acc_row the
    bytes between the lane sums of the two decoded rows.
    """
    kernels = {}
    for f in LAYOUTS:
        kernels[DIRECT + f] = function(module, f"mimo_direct_{f}", 8, emit_direct(f))
        kernels[DECODE + f] = function(module, f"mimo_decode_{f}", 5, emit_decode(f))
    for kind, (g, scaled) in KINDS.items():
        for m in TILE_ROWS:
            place = TILE + kind * (max(TILE_ROWS) + 1) + m
            kernels[place] = function(module, f"mimo_tile_{kind}_{m}", 5, emit_tile(g, scaled, m))
    return kernels


@intrinsic
def store_addresses(typingctx, table):  # type: ignore[no-untyped-def]
    """The kernels' addresses to the int64 [KERNELS] table at this address.

    So they are compiled once, with the one function that asks for them, and not again into every caller.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        for place, kernel in emit_all(builder.module).items():
            store(builder, builder.ptrtoint(kernel, I64), add(builder, args[0], 8 * place))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@jit("void(int64[::1])")
def fill_addresses(table):  # type: ignore[no-untyped-def]
    store_addresses(table.ctypes.data)


def kernel_addresses() -> NDArray[np.int64]:
    """Where the kernels are in this process."""
    table = np.zeros(KERNELS, np.int64)
    fill_addresses(table)
    return table


def call(arguments: int, index: Callable[[Builder, Sequence[Value]], Value]) -> Any:
    """Code that calls the kernel at args[0][index] with the last ``arguments`` of its int64 arguments."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Any:
        address = pointer_at(builder, args[0], index(builder, args))
        kind = ir.FunctionType(ir.VoidType(), [I64] * arguments)
        builder.call(builder.inttoptr(address, kind.as_pointer()), args[len(args) - arguments :])
        return context.get_dummy_value()

    return codegen


@intrinsic
def direct(typingctx, table, fmt, words, scales, rows, first, steps, x, x_step, acc):  # type: ignore[no-untyped-def]
    """Call that kernel; see emit_all. ``table`` is the address of the table of addresses."""
    return types.void(*[types.int64] * 10), call(8, lambda b, args: add(b, args[1], DIRECT))


@intrinsic
def decode(typingctx, table, fmt, words, scales, rows, step, scratch):  # type: ignore[no-untyped-def]
    """Call that kernel; see emit_all."""
    return types.void(*[types.int64] * 7), call(5, lambda b, args: add(b, args[1], DECODE))


@intrinsic
def tile(typingctx, table, kind, count, scratch, x_step, x_offsets, acc, acc_row):  # type: ignore[no-untyped-def]
    """Call that kernel; see emit_all. ``count`` is 1, 2 or 4."""

    def index(b: Builder, args: Sequence[Value]) -> Value:
        return b.add(b.mul(args[1], const(max(TILE_ROWS) + 1)), add(b, args[2], TILE))

    return types.void(*[types.int64] * 8), call(5, index)


@intrinsic
def tree(typingctx, acc):  # type: ignore[no-untyped-def]
    """The sum of the 32 lanes at ``acc``: lane l takes l+16, then l+8, l+4, l+2, l+1."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        a, c, d, e = (load(builder, add(builder, args[0], g * GROUP_BYTES), FLOATS) for g in range(GROUPS))
        total = builder.fadd(builder.fadd(a, d), builder.fadd(c, e))
        half = WIDTH // 2
        while half:
            low = builder.shuffle_vector(total, total, indices(range(half)))
            high = builder.shuffle_vector(total, total, indices(range(half, 2 * half)))
            total = builder.fadd(low, high)
            half //= 2
        return builder.extract_element(total, ir.Constant(I32, 0))

    return types.float32(types.int64), codegen


@intrinsic
def copy_padded(typingctx, target, source, count, size):  # type: ignore[no-untyped-def]
    """``count`` bytes from source to target, then zeros up to ``size`` bytes."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, source, count, size = args
        byte = I8.as_pointer()
        cgutils.memset(builder, builder.inttoptr(target, byte), size, 0)
        cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), count, 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def load_float(typingctx, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return load(builder, args[0], F32)

    return types.float32(types.int64), codegen


@intrinsic
def load_int32(typingctx, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.sext(load(builder, args[0], I32), I64)

    return types.int64(types.int64), codegen
