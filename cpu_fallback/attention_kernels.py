"""The inner loops of attention as LLVM functions, and the numba intrinsics that call them. Arguments are addresses.

8 query heads of one kv head are the lanes of a vector, a *plane*. A plane of q is [width][8], width the head dimension
in whole rounds of 32. Keys and values are found through a table of row addresses, so that a ring, a cache and the
block's own rows all look alike. Visiting the 32 lanes of a sum in bit-reversed order turns its tree into a stack of
partial sums, at most 6 deep.

A plane of scores is [32 lanes][rounds][8]: the keys of one lane of the sums over keys lie together. Key j stands at
place first_lane + j, whose lane is the place mod 32 and whose round is the place div 32; the few slots of the first
and the last round without a key are never summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cpu_fallback.jit import jit
from cpu_fallback.vector_ir import (
    F32,
    FLOATS,
    I64,
    WIDTH,
    Builder,
    Value,
    add,
    broadcast,
    const,
    function,
    load,
    pointer_at,
    span,
    store,
)

LANES = 32
PLANE_ROW = 4 * WIDTH  # bytes of one dimension of a plane of q, or of one key's scores
KEY_TILE = 2  # keys that share the loads of q
VALUE_TILE = 2  # vectors of a value row that one pass over the keys sums
HEAD_TILE = 4  # heads that share the loads of the value rows
SCORE_ARGUMENTS = 9
ZEROS = ir.Constant(FLOATS, [ir.Constant(F32, 0.0)] * WIDTH)
BIT_REVERSED = tuple(int(f"{i:05b}"[::-1], 2) for i in range(LANES))


def push(b: Builder, stack: list[Value], index: int, value: Value) -> None:
    """Put the ``index``-th lane in bit-reversed order on the stack, joining what the tree joins."""
    while index & 1:
        value = b.fadd(stack.pop(), value)
        index >>= 1
    stack.append(value)


def score_tile(b: Builder, rounds: int, planes: Sequence[Value], keys: Sequence[Value]) -> list[Value]:
    """tree(q.k) of every plane with every key, plane by plane."""
    stacks: list[list[Value]] = [[] for _ in range(len(planes) * len(keys))]
    for index, lane in enumerate(BIT_REVERSED):
        # A lane starts from its first product and not from +0: that only tells -0 from +0, which exp doesn't.
        sums: list[Value] = [None] * len(stacks)
        for dim in range(lane, rounds * LANES, LANES):
            ks = [broadcast(b, load(b, add(b, key, 4 * dim), F32), FLOATS) for key in keys]
            for p, plane in enumerate(planes):
                q = load(b, add(b, plane, PLANE_ROW * dim), FLOATS)
                for j, k in enumerate(ks):
                    product = b.fmul(q, k)
                    place = p * len(keys) + j
                    sums[place] = product if sums[place] is None else b.fadd(sums[place], product)
        for stack, total in zip(stacks, sums, strict=True):
            push(b, stack, index, total)
    return [stack[0] for stack in stacks]


def slot(b: Builder, place: Value, rounds: Value) -> Value:
    """The offset in a plane of scores of the key at that place."""
    lane, at = b.and_(place, const(LANES - 1)), b.lshr(place, const(5))
    return b.mul(b.add(b.mul(lane, rounds), at), const(PLANE_ROW))


def emit_scores(width_rounds: int, planes: int) -> Callable[[Builder, Sequence[Value]], None]:
    """The score of every key, tree(q.k)*scale, and the largest of each head so far to maxima [planes][8]."""

    def emit(b: Builder, args: Sequence[Value]) -> None:
        q, table, count, scale_at, scores, plane_bytes, maxima, first_lane, rounds = args
        scale = broadcast(b, load(b, scale_at, F32), FLOATS)
        qs = [add(b, q, p * width_rounds * LANES * PLANE_ROW) for p in range(planes)]
        rows = [b.add(scores, b.mul(plane_bytes, const(p))) for p in range(planes)]

        def some_keys(first: Value, keys: int) -> None:
            addresses = [pointer_at(b, table, b.add(first, const(j))) for j in range(keys)]
            offsets = [slot(b, b.add(first_lane, b.add(first, const(j))), rounds) for j in range(keys)]
            sums = score_tile(b, width_rounds, qs, addresses)
            for p in range(planes):
                high = load(b, add(b, maxima, p * PLANE_ROW), FLOATS)
                for j in range(keys):
                    s = b.fmul(sums[p * keys + j], scale)
                    store(b, s, b.add(rows[p], offsets[j]))
                    high = b.select(b.fcmp_ordered(">", s, high), s, high)
                store(b, high, add(b, maxima, p * PLANE_ROW))

        whole = b.and_(count, const(-KEY_TILE))
        with span(b, const(0), whole, KEY_TILE) as first:
            some_keys(first, KEY_TILE)
        with span(b, whole, count, 1) as first:
            some_keys(first, 1)

    return emit


def emit_subtract(b: Builder, args: Sequence[Value]) -> None:
    """scores[i][8] -= maximum[8] for one plane."""
    scores, count, maximum = args
    m = load(b, maximum, FLOATS)
    with span(b, const(0), b.mul(count, const(PLANE_ROW)), PLANE_ROW) as offset:
        place = b.add(scores, offset)
        store(b, b.fsub(load(b, place, FLOATS), m), place)


def emit_sum(b: Builder, args: Sequence[Value]) -> None:
    """out[8] = e[0][8] + e[1][8] + ..., from +0."""
    e, count, out = args
    store(b, ZEROS, out)
    with span(b, const(0), b.mul(count, const(PLANE_ROW)), PLANE_ROW) as offset:
        store(b, b.fadd(load(b, out, FLOATS), load(b, b.add(e, offset), FLOATS)), out)


def emit_gather(b: Builder, args: Sequence[Value]) -> None:
    """The value rows j = first, first + 32, ... to out [rows][vectors*8].

    Rows 32 apart share the sets of every cache, so they are copied together before all heads read them.
    """
    table, first, count, vectors, out = args
    row_bytes = b.mul(vectors, const(PLANE_ROW))
    with span(b, first, count, LANES) as j:
        row = pointer_at(b, table, j)
        target = b.add(out, b.mul(b.lshr(b.sub(j, first), const(5)), row_bytes))
        with span(b, const(0), row_bytes, PLANE_ROW) as offset:
            store(b, load(b, b.add(row, offset), FLOATS), b.add(target, offset))


def emit_lane(vectors: int, heads: int) -> Callable[[Builder, Sequence[Value]], None]:
    """out[head][d] = sum over rows of e[row][head]*v[row][d], for a few heads and vectors of d."""

    def emit(b: Builder, args: Sequence[Value]) -> None:
        e, rows, row_bytes, count, out, head_bytes = args
        before, head, body, after = b.block, *(b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        j = b.phi(I64)
        j.add_incoming(const(0), before)
        sums = [b.phi(FLOATS) for _ in range(heads * vectors)]
        for total in sums:
            total.add_incoming(ZEROS, before)
        b.cbranch(b.icmp_signed("<", j, count), body, after)
        b.position_at_end(body)
        row = b.add(rows, b.mul(j, row_bytes))
        values = [load(b, add(b, row, x * PLANE_ROW), FLOATS) for x in range(vectors)]
        weights = b.add(e, b.mul(j, const(PLANE_ROW)))
        for h in range(heads):
            weight = broadcast(b, load(b, add(b, weights, 4 * h), F32), FLOATS)
            for x in range(vectors):
                total = sums[h * vectors + x]
                total.add_incoming(b.fadd(total, b.fmul(weight, values[x])), b.block)
        j.add_incoming(b.add(j, const(1)), b.block)
        b.branch(head)
        b.position_at_end(after)
        for h in range(heads):
            for x in range(vectors):
                place = add(b, b.add(out, b.mul(head_bytes, const(h))), x * PLANE_ROW)
                store(b, sums[h * vectors + x], place)

    return emit


def emit_lane_values(b: Builder, args: Sequence[Value]) -> None:
    """out[head][d] for ``heads`` heads (1 to 8) of one plane and ``vectors`` vectors of d: tiles of ``emit_lane``."""
    e, rows, count, heads, vectors, out = args
    row_bytes = b.mul(vectors, const(PLANE_ROW))

    def tile(h: Value, x: Value, tile_heads: int, tile_vectors: int) -> None:
        name = f"mimo_attention_lane_{tile_vectors}_{tile_heads}"
        target = function(b.module, name, 6, emit_lane(tile_vectors, tile_heads))
        offset = b.mul(x, const(PLANE_ROW))
        place = b.add(b.add(out, b.mul(h, row_bytes)), offset)
        b.call(target, [b.add(e, b.mul(h, const(4))), b.add(rows, offset), row_bytes, count, place, row_bytes])

    def head_tiles(x: Value, tile_vectors: int) -> None:
        whole = b.and_(heads, const(-HEAD_TILE))
        with span(b, const(0), whole, HEAD_TILE) as h:
            tile(h, x, HEAD_TILE, tile_vectors)
        with span(b, whole, heads, 1) as h:
            tile(h, x, 1, tile_vectors)

    even = b.and_(vectors, const(-VALUE_TILE))
    with span(b, const(0), even, VALUE_TILE) as x:
        head_tiles(x, VALUE_TILE)
    with span(b, even, vectors, 1) as x:
        head_tiles(x, 1)


def calling(name: str, arguments: int, emit: Callable[[Builder, Sequence[Value]], None]) -> Any:
    """Code of an intrinsic that calls the function ``name`` of its arguments."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Any:
        builder.call(function(builder.module, name, arguments, emit), args)
        return context.get_dummy_value()

    return codegen


@intrinsic(prefer_literal=True)
def store_score_kernels(typingctx, rounds, table):  # type: ignore[no-untyped-def]
    """The addresses of the kernels for one and for two planes to the int64 [2] table at this address."""
    if not isinstance(rounds, types.IntegerLiteral):
        return None
    r = rounds.literal_value

    def codegen(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Any:
        for p in (1, 2):
            kernel = function(builder.module, f"mimo_attention_scores_{r}_{p}", SCORE_ARGUMENTS, emit_scores(r, p))
            store(builder, builder.ptrtoint(kernel, I64), add(builder, args[1], 8 * (p - 1)))
        return context.get_dummy_value()

    return types.void(rounds, types.int64), codegen


def make_score_kernels(rounds: int) -> tuple[NDArray[np.int64], Any]:
    """Addresses of the kernels for head dimensions of ``rounds`` rounds, and the compiled code that must outlive them.

    The kernels are long, so they are compiled once, apart from the code that calls them.
    """

    @jit()
    def fill(table):  # type: ignore[no-untyped-def]
        store_score_kernels(rounds, table.ctypes.data)

    table = np.zeros(2, np.int64)
    fill(table)
    return table, fill


score_kernels = cache(make_score_kernels)


@intrinsic
def score_keys(typingctx, kernel, q, table, count, scale_at, scores, plane_bytes, maxima, first_lane, rounds):  # type: ignore[no-untyped-def]
    """Call the score kernel at that address; see emit_scores."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * SCORE_ARGUMENTS)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (SCORE_ARGUMENTS + 1)), codegen


@intrinsic
def subtract_maximum(typingctx, scores, count, maximum):  # type: ignore[no-untyped-def]
    """See emit_subtract."""
    return types.void(*[types.int64] * 3), calling("mimo_attention_subtract", 3, emit_subtract)


@intrinsic
def sum_weights(typingctx, e, count, out):  # type: ignore[no-untyped-def]
    """See emit_sum."""
    return types.void(*[types.int64] * 3), calling("mimo_attention_sum", 3, emit_sum)


@intrinsic
def gather_values(typingctx, table, first, count, vectors, out):  # type: ignore[no-untyped-def]
    """See emit_gather."""
    return types.void(*[types.int64] * 5), calling("mimo_attention_gather", 5, emit_gather)


@intrinsic
def lane_values(typingctx, e, rows, count, heads, vectors, out):  # type: ignore[no-untyped-def]
    """See emit_lane_values."""
    return types.void(*[types.int64] * 6), calling("mimo_attention_values", 6, emit_lane_values)
