"""The inner loop of RMSNorm as an LLVM function: a numba loop takes its 32 sums through memory at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba import types
from numba.extending import intrinsic

from cpu_fallback.vector_ir import FLOATS, I64, WIDTH, Builder, Value, add, const, function, load, store

LANES = 32
GROUPS = LANES // WIDTH
GROUP_BYTES = 4 * WIDTH
ROUND_BYTES = 4 * LANES


def emit_square_lanes(b: Builder, args: Sequence[Value]) -> None:
    """lanes[l] += x[l]*x[l], then x[l + 32]*x[l + 32], ... for ``rounds`` rounds of x."""
    x, rounds, lanes = args
    start = [load(b, add(b, lanes, g * GROUP_BYTES), FLOATS) for g in range(GROUPS)]
    before, head, body, after = b.block, *(b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(const(0), before)
    sums = [b.phi(FLOATS) for _ in range(GROUPS)]
    for total, value in zip(sums, start, strict=True):
        total.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", index, rounds), body, after)
    b.position_at_end(body)
    row = b.add(x, b.mul(index, const(ROUND_BYTES)))
    for g, total in enumerate(sums):
        value = load(b, add(b, row, g * GROUP_BYTES), FLOATS)
        total.add_incoming(b.fadd(total, b.fmul(value, value)), b.block)
    index.add_incoming(b.add(index, const(1)), b.block)
    b.branch(head)
    b.position_at_end(after)
    for g, total in enumerate(sums):
        store(b, total, add(b, lanes, g * GROUP_BYTES))


@intrinsic
def square_lanes(typingctx, x, rounds, lanes):  # type: ignore[no-untyped-def]
    """See emit_square_lanes; x and lanes are addresses."""

    def codegen(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Any:
        builder.call(function(builder.module, "mimo_square_lanes", 3, emit_square_lanes), args)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
