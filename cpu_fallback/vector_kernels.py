"""The kernels of the matrix products, emitted as LLVM functions, and the numba intrinsics that call them.

All work on steps of 256 columns and on rows given by address, and keep the order of ``mimo_vk/ops.py``. ``direct``
decodes in registers, for a few rows of x. For more, ``decode`` writes stored rows as floats to a small scratch and
``tile`` multiplies them with up to four rows of x. As lanes meet only in the final tree, those two work on one group of
8 lanes at a time: its lane sums stay in the first-level cache, and its part of x in the second.

x is permuted once per call into [group of lanes][step][row][column of the lane][lane of the group], zero padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from cpu_fallback.jit import jit
from cpu_fallback.vector_decode import (
    COLUMNS,
    DECODERS,
    FORMAT_FP8_FOLDED,
    GROUPS,
    LANES,
    LAYOUTS,
    block_scales,
    group_scales,
    step_scales,
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
    pointer_at,
    store,
)

ROUND_BYTES = 4 * LANES  # one word of each lane, or the lane sums of one product
GROUP_BYTES = 4 * WIDTH  # the same of one group of lanes
X_STEP_BYTES = COLUMNS * GROUP_BYTES  # one group's part of a step of a row of x
SCRATCH_BYTES = X_STEP_BYTES + 2 * GROUP_BYTES  # the same of a decoded row, then the scales of its words (two at most)
TOGETHER = 2  # groups of lanes whose instructions ``direct`` interleaves
DIRECT_COUNTS = (1, 2, 4)  # rows of x that ``direct`` takes; 4 where decoding costs next to nothing
PAIR = 2  # decoded rows in a tile
TILE_ROWS = (1, 2, 4)  # rows of x in a tile


def chain(b: Builder, p: Value | None, weight: Value, x: Value) -> Value:
    product = b.fmul(weight, x)
    return product if p is None else b.fadd(p, product)


def scales_in_step(b: Builder, fmt: int, scales: Value) -> Callable[[int, int], Value | None]:
    """The scale vector of word t of group q, or None, for one row; ``scales`` is the address of the step's."""
    if LAYOUTS[fmt].scale_bytes == 0:
        return lambda t, q: None
    if LAYOUTS[fmt].g == 8:
        of_group = step_scales(b, scales)
        return lambda t, q: of_group(q)
    by_round = block_scales(b, fmt, scales)
    return lambda t, q: by_round[t]


def direct_step(
    b: Builder, fmt: int, words: Value, scales: Value, xs: Sequence[Sequence[Value]], accs: Sequence[Value]
) -> None:
    """256 columns of one stored row times some rows of x (``xs``: row, group), added to the lane sums at ``accs``."""
    layout = LAYOUTS[fmt]
    scale_of = scales_in_step(b, fmt, scales)
    together = max(1, TOGETHER // len(xs))
    for first in range(0, GROUPS, together):
        products = [(m, q) for q in range(first, first + together) for m in range(len(xs))]
        places = {(m, q): add(b, accs[m], q * GROUP_BYTES) for m, q in products}
        totals = {key: load(b, place, FLOATS) for key, place in places.items()}
        for t in range(layout.rounds):
            columns: dict[int, Iterator[Value]] = {}
            for q in range(first, first + together):
                word = load(b, add(b, words, t * ROUND_BYTES + q * GROUP_BYTES), INTS)
                columns[q] = DECODERS[fmt](b, word)
            p: dict[Any, Value | None] = dict.fromkeys(products)
            for c in range(t * layout.g, (t + 1) * layout.g):
                weights = {q: next(decoded) for q, decoded in columns.items()}
                for m, q in products:
                    p[m, q] = chain(b, p[m, q], weights[q], load(b, add(b, xs[m][q], c * GROUP_BYTES), FLOATS))
            for m, q in products:
                scale = scale_of(t, q)
                totals[m, q] = b.fadd(totals[m, q], p[m, q] if scale is None else b.fmul(p[m, q], scale))
        for key, place in places.items():
            store(b, totals[key], place)


def emit_direct(fmt: int, count: int) -> Callable[[Builder, Sequence[Value]], None]:
    layout = LAYOUTS[fmt]

    def emit(b: Builder, args: Sequence[Value]) -> None:
        words, scales, rows, first, steps, x, x_step, x_group, x_offsets, acc, acc_row = args
        starts = [b.add(x, pointer_at(b, x_offsets, const(m))) for m in range(count)]
        with loop(b, steps) as s:
            step = b.add(first, s)
            here = [b.add(start, b.mul(step, x_step)) for start in starts]
            xs = [[b.add(start, b.mul(x_group, const(q))) for q in range(GROUPS)] for start in here]
            word_offset = b.mul(step, const(layout.step_bytes))
            scale_offset = b.mul(step, const(layout.scale_bytes))
            with loop(b, rows) as r:
                w = b.add(pointer_at(b, words, r), word_offset)
                sc = b.add(pointer_at(b, scales, r), scale_offset)
                sums = b.add(acc, b.mul(r, acc_row))
                direct_step(b, fmt, w, sc, xs, [add(b, sums, m * ROUND_BYTES) for m in range(count)])

    return emit


def emit_decode(fmt: int) -> Callable[[Builder, Sequence[Value]], None]:
    layout = LAYOUTS[fmt]

    def emit(b: Builder, args: Sequence[Value]) -> None:
        words, scales, rows, first, steps, group, scratch = args
        with loop(b, rows) as r:
            row_words = b.add(pointer_at(b, words, r), b.mul(group, const(GROUP_BYTES)))
            row_scales = pointer_at(b, scales, r)
            with loop(b, steps) as s:
                step = b.add(first, s)
                w = b.add(row_words, b.mul(step, const(layout.step_bytes)))
                sc = b.add(row_scales, b.mul(step, const(layout.scale_bytes)))
                out = b.add(scratch, b.mul(b.add(b.mul(s, rows), r), const(SCRATCH_BYTES)))
                for t in range(layout.rounds):
                    word = load(b, add(b, w, t * ROUND_BYTES), INTS)
                    for c, weight in enumerate(DECODERS[fmt](b, word), t * layout.g):
                        store(b, weight, add(b, out, c * GROUP_BYTES))
                if layout.g == 8:
                    store(b, group_scales(b, b.add(sc, b.mul(group, const(2)))), add(b, out, X_STEP_BYTES))
                elif layout.scale_bytes:
                    for t, scale in enumerate(block_scales(b, fmt, sc)):
                        store(b, scale, add(b, out, X_STEP_BYTES + t * GROUP_BYTES))

    return emit


def tile_partials(b: Builder, g: int, weights: Sequence[Value], xs: Sequence[Value], t: int) -> dict[Any, Value]:
    """The partials of word t of every pair of a decoded row and a row of x."""
    p: dict[Any, Value] = {}
    columns = range(t * g, (t + 1) * g)
    if g > 2:  # column by column: the partials of all pairs in registers
        for c in columns:
            ws = [load(b, add(b, w, c * GROUP_BYTES), FLOATS) for w in weights]
            for m, x in enumerate(xs):
                column = load(b, add(b, x, c * GROUP_BYTES), FLOATS)
                for r, w in enumerate(ws):
                    p[r, m] = chain(b, p.get((r, m)), w, column)
        return p
    decoded = [[load(b, add(b, w, c * GROUP_BYTES), FLOATS) for c in columns] for w in weights]
    for m, x in enumerate(xs):
        for i, c in enumerate(columns):
            column = load(b, add(b, x, c * GROUP_BYTES), FLOATS)
            for r, ws in enumerate(decoded):
                p[r, m] = chain(b, p.get((r, m)), ws[i], column)
    return p


def tile_step(
    b: Builder, g: int, scaled: bool, weights: Sequence[Value], xs: Sequence[Value], rows: list[Value]
) -> None:
    """One group and step of decoded rows times some rows of x, added to the lane sums [row of x][8] at ``rows``."""
    places = {(r, m): add(b, row, m * GROUP_BYTES) for r, row in enumerate(rows) for m in range(len(xs))}
    totals = {key: load(b, place, FLOATS) for key, place in places.items()}
    for t in range(COLUMNS // g):
        p = tile_partials(b, g, weights, xs, t)
        for r, weight in enumerate(weights):
            scale = load(b, add(b, weight, X_STEP_BYTES + t * GROUP_BYTES), FLOATS) if scaled else None
            for m in range(len(xs)):
                totals[r, m] = b.fadd(totals[r, m], p[r, m] if scale is None else b.fmul(p[r, m], scale))
    for key, place in places.items():
        store(b, totals[key], place)


def emit_tile(g: int, scaled: bool, count: int) -> Callable[[Builder, Sequence[Value]], None]:
    def emit(b: Builder, args: Sequence[Value]) -> None:
        scratch, rows, steps, x, x_step, x_offsets, acc, acc_row = args
        starts = [b.add(x, pointer_at(b, x_offsets, const(m))) for m in range(count)]
        pairs = b.lshr(b.add(rows, const(PAIR - 1)), const(1))
        with loop(b, steps) as s:
            xs = [b.add(start, b.mul(s, x_step)) for start in starts]
            step_scratch = b.add(scratch, b.mul(b.mul(s, rows), const(SCRATCH_BYTES)))
            with loop(b, pairs) as pair:
                weight = b.add(step_scratch, b.mul(pair, const(PAIR * SCRATCH_BYTES)))
                row = b.add(acc, b.mul(b.mul(pair, acc_row), const(PAIR)))
                tile_step(b, g, scaled, [weight, add(b, weight, SCRATCH_BYTES)], xs, [row, b.add(row, acc_row)])

    return emit


KINDS = {0: (1, False), 1: (2, False), 2: (4, False), 3: (4, True), 4: (8, True)}  # words of g columns, scaled or not
KIND_OF = (0, 1, 2, 3, 4, 4, 3)  # by format
FORMATS = len(LAYOUTS)
DECODE = FORMATS * len(DIRECT_COUNTS)  # where each family begins in the table of addresses, ``direct`` first
TILE = DECODE + FORMATS
KERNELS = TILE + len(KINDS) * (max(TILE_ROWS) + 1)


def direct_counts(fmt: int) -> tuple[int, ...]:
    """The rows of x that the format's ``direct`` kernels take."""
    if fmt == FORMAT_FP8_FOLDED:
        return (1,)
    return DIRECT_COUNTS if LAYOUTS[fmt].g <= 2 else (1, 2)


def emit_all(module: Any) -> dict[int, Value]:
    """Every kernel as a function of the module, by its place in the table of addresses.

    ``direct`` (by rows of x and format) of words, scales, rows, first, steps, x, x_step, x_group, x_offsets, acc,
    acc_row: steps first..first+steps of ``rows`` stored rows times some rows of x. words and scales are addresses of
    tables of row addresses, x that of the permuted x, its steps x_step and its groups x_group bytes apart, x_offsets
    that of a table of the rows' offsets in a step; acc [rows][acc_row bytes: row of x][32] lane sums.

    ``decode`` (by format) of words, scales, rows, first, steps, group, scratch: one group of lanes of those steps as
    floats and scales, to scratch [steps][rows][SCRATCH_BYTES].

    ``tile`` (by kind and rows of x) of scratch, rows, steps, x, x_step, x_offsets, acc, acc_row: what ``decode`` wrote
    (an even number of rows) times some rows of x. x is the address of the group's first step, x_offsets that of a table
    of the rows' offsets in a step; acc [rows][acc_row bytes: row of x][8] the group's lane sums.
    """
    kernels = {}
    for f in LAYOUTS:
        for n in direct_counts(f):
            place = DIRECT_COUNTS.index(n) * FORMATS + f
            kernels[place] = function(module, f"mimo_direct_{f}_{n}", 11, emit_direct(f, n))
        if f != FORMAT_FP8_FOLDED:
            kernels[DECODE + f] = function(module, f"mimo_decode_{f}", 7, emit_decode(f))
    for kind, (g, scaled) in KINDS.items():
        for m in TILE_ROWS:
            place = TILE + kind * (max(TILE_ROWS) + 1) + m
            kernels[place] = function(module, f"mimo_tile_{kind}_{m}", 8, emit_tile(g, scaled, m))
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
def direct(typingctx, table, fmt, n, words, scales, rows, first, steps, x, x_step, x_group, x_at, acc, acc_row):  # type: ignore[no-untyped-def]
    """Call that kernel; see emit_all. ``table`` is the address of the table of addresses; ``n`` is in direct_counts."""

    def index(b: Builder, args: Sequence[Value]) -> Value:
        return b.add(b.mul(b.lshr(args[2], const(1)), const(FORMATS)), args[1])

    return types.void(*[types.int64] * 14), call(11, index)


@intrinsic
def decode(typingctx, table, fmt, words, scales, rows, first, steps, group, scratch):  # type: ignore[no-untyped-def]
    """Call that kernel; see emit_all."""
    return types.void(*[types.int64] * 9), call(7, lambda b, args: add(b, args[1], DECODE))


@intrinsic
def tile(typingctx, table, kind, count, scratch, rows, steps, x, x_step, x_offsets, acc, acc_row):  # type: ignore[no-untyped-def]
    """Call that kernel; see emit_all. ``count`` is 1, 2 or 4."""

    def index(b: Builder, args: Sequence[Value]) -> Value:
        return b.add(b.mul(args[1], const(max(TILE_ROWS) + 1)), add(b, args[2], TILE))

    return types.void(*[types.int64] * 11), call(8, index)


@intrinsic
def tree(typingctx, acc, group):  # type: ignore[no-untyped-def]
    """The sum of 32 lanes, whose groups of 8 lie ``group`` bytes apart: lane l takes l+16, then l+8, l+4, l+2, l+1."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        places = [builder.add(args[0], builder.mul(args[1], const(q))) for q in range(GROUPS)]
        first, second, third, fourth = (load(builder, place, FLOATS) for place in places)
        total = builder.fadd(builder.fadd(first, third), builder.fadd(second, fourth))
        half = WIDTH // 2
        while half:
            low = builder.shuffle_vector(total, total, indices(range(half)))
            high = builder.shuffle_vector(total, total, indices(range(half, 2 * half)))
            total = builder.fadd(low, high)
            half //= 2
        return builder.extract_element(total, ir.Constant(I32, 0))

    return types.float32(types.int64, types.int64), codegen


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
    """The float32 at an address, aligned or not."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return load(builder, args[0], F32)

    return types.float32(types.int64), codegen


@intrinsic
def load_int32(typingctx, address):  # type: ignore[no-untyped-def]
    """The int32 at an address, aligned or not."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.sext(load(builder, args[0], I32), I64)

    return types.int64(types.int64), codegen
