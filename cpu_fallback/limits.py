"""What the machine can do at most, measured: a read-only pass, a plain copy, and multiplications with additions.

They are what a kernel's speed is printed beside: a product of one row reads the matrix once, and no exact product can
beat a loop of unfused multiply and add that never leaves the registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from cpu_fallback.jit import jit
from cpu_fallback.threads import get_threads, set_threads
from cpu_fallback.vector_ir import FLOATS, I64, WIDTH, Builder, Value, const, function, load, store

CHAINS = 12  # independent chains: enough to hide the latency of a multiplication and an addition
PEAK_FLOPS = 2 * CHAINS * WIDTH  # of one iteration


def emit_peak(b: Builder, args: Sequence[Value]) -> None:
    """``count`` times p = p*a + c on every chain, in registers; a and c are the two vectors at the address."""
    count, address = args
    a, c = load(b, address, FLOATS), load(b, b.add(address, const(4 * WIDTH)), FLOATS)
    before, body, after = b.block, b.append_basic_block("body"), b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(const(0), before)
    chains = [b.phi(FLOATS) for _ in range(CHAINS)]
    following = [b.fadd(b.fmul(p, a), c) for p in chains]
    for p, result in zip(chains, following, strict=True):
        p.add_incoming(c, before)
        p.add_incoming(result, body)
    step = b.add(index, const(1))
    index.add_incoming(step, body)
    b.cbranch(b.icmp_signed("<", step, count), body, after)
    b.position_at_end(after)
    total = following[0]
    for result in following[1:]:
        total = b.fadd(total, result)
    store(b, total, address)


@intrinsic
def peak_loop(typingctx, count, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.call(function(builder.module, "mimo_peak", 2, emit_peak), args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@jit()
def peak_part(count):  # type: ignore[no-untyped-def]
    numbers = np.full(2 * WIDTH, np.float32(0.5))
    peak_loop(count, numbers.ctypes.data)
    return numbers[0]


@jit()
def read_part(part, parts, data):  # type: ignore[no-untyped-def]
    first, last = len(data) * part // parts, len(data) * (part + 1) // parts
    quarter = (last - first) // 4
    total = np.int64(0)
    for i in range(first, first + quarter):  # four places at once keep more reads in flight than one
        total ^= (data[i] ^ data[i + quarter]) ^ (data[i + 2 * quarter] ^ data[i + 3 * quarter])
    for i in range(first + 4 * quarter, last):
        total ^= data[i]
    return total


@jit()
def copy_part(part, parts, data, out):  # type: ignore[no-untyped-def]
    for i in range(len(data) * part // parts, len(data) * (part + 1) // parts):
        out[i] = data[i]


@jit("void(int64, int64, float32[::1])", parallel=True)
def multiply_add(threads, count, out):  # type: ignore[no-untyped-def]
    """``count`` iterations of PEAK_FLOPS on each thread; out [threads] keeps them from being left out."""
    before = get_threads()
    set_threads(threads)
    for part in numba.prange(threads):
        out[part] = peak_part(count)
    set_threads(before)


@jit("void(int64, int64[::1], int64[::1])", parallel=True)
def read(threads, data, out):  # type: ignore[no-untyped-def]
    """Read data once; out [threads]."""
    before = get_threads()
    set_threads(threads)
    for part in numba.prange(threads):
        out[part] = read_part(part, threads, data)
    set_threads(before)


@jit("void(int64, int64[::1], int64[::1])", parallel=True)
def copy(threads, data, out):  # type: ignore[no-untyped-def]
    """Copy data to out once."""
    before = get_threads()
    set_threads(threads)
    for part in numba.prange(threads):
        copy_part(part, threads, data, out)
    set_threads(before)
