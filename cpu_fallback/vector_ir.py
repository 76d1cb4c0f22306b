"""Vectors for numba: short helpers that emit LLVM instructions through llvmlite's builder.

numba has no vector type, so the hot loops of the matrix products are emitted as LLVM functions over <8 x float>
values and called from compiled code by address. No instruction carries a fast-math flag: nothing is fused or reordered.
Every memory access has alignment 1, as a row of a mapped file may start anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import config

WIDTH = 8  # lanes in one vector; LLVM splits it where the host's registers are shorter

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
BYTES = ir.VectorType(I8, 4 * WIDTH)
HALVES = ir.VectorType(I16, 2 * WIDTH)
INTS = ir.VectorType(I32, WIDTH)
FLOATS = ir.VectorType(F32, WIDTH)

Value = Any  # an LLVM value; llvmlite's own classes carry no types
Builder = Any  # ir.IRBuilder


def const(value: int) -> Value:
    return ir.Constant(I64, value)


def signed32(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def splat(bits: int) -> Value:
    """A 32-bit pattern in every lane."""
    return ir.Constant(INTS, [ir.Constant(I32, signed32(bits))] * WIDTH)


def splat_halves(bits: int) -> Value:
    return ir.Constant(HALVES, [ir.Constant(I16, bits)] * (2 * WIDTH))


def splat_float(value: float) -> Value:
    return ir.Constant(FLOATS, [ir.Constant(F32, value)] * WIDTH)


def byte_vector(values: Sequence[int]) -> Value:
    return ir.Constant(BYTES, [ir.Constant(I8, v) for v in values])


def indices(values: Sequence[int]) -> Value:
    return ir.Constant(ir.VectorType(I32, len(values)), [ir.Constant(I32, v) for v in values])


def add(b: Builder, address: Value, offset: int) -> Value:
    return b.add(address, const(offset)) if offset else address


def load(b: Builder, address: Value, kind: Any) -> Value:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def broadcast(b: Builder, scalar: Value, kind: Any) -> Value:
    """A scalar in every lane of the vector type ``kind``."""
    single = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), indices([0] * kind.count))


def shuffle_bytes(b: Builder, first: Value, second: Value, order: Sequence[int]) -> Value:
    """Byte i of the result is byte order[i] of the two vectors laid end to end."""
    return b.shuffle_vector(first, second, indices(order))


def pointer_at(b: Builder, table: Value, index: Value) -> Value:
    """The address that stands at a place of a table of addresses."""
    return load(b, b.add(table, b.mul(index, const(8))), I64)


@contextmanager
def span(b: Builder, first: Value, last: Value, step: int) -> Iterator[Value]:
    """Emit the body once, run it for first, first + step, ... while below ``last``; yields the index."""
    before, head, body, after = b.block, *(b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(first, before)
    b.cbranch(b.icmp_signed("<", index, last), body, after)
    b.position_at_end(body)
    yield index
    index.add_incoming(b.add(index, const(step)), b.block)
    b.branch(head)
    b.position_at_end(after)


@contextmanager
def loop(b: Builder, count: Value) -> Iterator[Value]:
    """The same ``count`` times (0 is fine), from 0 on."""
    with span(b, const(0), count, 1) as index:
        yield index


def function(module: Any, name: str, arguments: int, emit: Callable[[Builder, Sequence[Value]], None]) -> Value:
    """The module's function ``name`` of so many int64 arguments, emitted on first use; it returns nothing."""
    existing = module.globals.get(name)
    if existing is not None:
        return existing
    result = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name=name)
    result.linkage = "internal"
    result.attributes.add("noinline")
    result.attributes.alignstack = 4 * WIDTH  # else vectors spilled to the stack may straddle cache lines
    b = ir.IRBuilder(result.append_basic_block("entry"))
    emit(b, result.args)
    b.ret_void()
    return result


def target_has(feature: str) -> bool:
    """Whether numba compiles for a processor with this LLVM feature."""
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:  # the user named another processor
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))
