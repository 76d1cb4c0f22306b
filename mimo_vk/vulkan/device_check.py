"""The start-up check: whether a device's float arithmetic is the CPU's, and how the 16 MXFP4 codes decode on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpu_fallback import elementary
from mimo_vk.formats import E2M1, F32
from mimo_vk.vulkan.device import Device, DeviceError, Program, view
from mimo_vk.vulkan.kernels import PROBE

# Signed zeros, ties, the largest and smallest normal numbers, subnormals, infinities, and ordinary values.
VALUES = np.array(
    [0.0, -0.0, 1.0, -1.5, 1 + 2**-23, 1 - 2**-24, 2**-24, 3 * 2**-25, 0.1, -7.3, 86.5, -63.9, 88.8, 1e-20, 3e38, -3e38,
     2**-126, 3 * 2**-127, 2**-149, -(2**-140), 2**-63, 2**126, np.inf, -np.inf],
    np.float32,
)  # fmt: skip
NAMES = ("a*b", "a+b", "a-b", "a*b + c", "exp(a)", "1/a", "1/sqrt(a)")


@dataclass(frozen=True)
class Arithmetic:
    """A device's: what SELECT_DECODE must be, and whether subnormal floats count as zero."""

    select_decode: int = 0
    flushes: bool = False


def check_arithmetic(device: Device) -> Arithmetic:
    """Compare the probe kernel's results with numpy's, in bits.

    Errors: DeviceError, with the first operation that differs where no subnormal number has to do with it.
    """
    a, b = (np.array(side, np.float32) for side in zip(*itertools.product(VALUES, VALUES), strict=True))
    with np.errstate(all="ignore"):
        c = -(a * b)  # a fused a*b + c would leave the product's rounding error
    results, all_expected, flushes = run_probe(device, a, b, c), expected_results(a, b, c), False
    for name, found, expected, excused in zip(NAMES, results, all_expected, subnormal(a, b, c), strict=False):
        differs = ~same_bits(found, expected)
        flushes |= bool((differs & excused).any())
        wrong = np.flatnonzero(differs & ~excused)
        if len(wrong):
            i = wrong[0]
            raise DeviceError(
                f"its arithmetic differs: {name} for a={a[i]!r}, b={b[i]!r}, c={c[i]!r} is {found[i]!r}, "
                f"expected {expected[i]!r}"
            )
    decoded = results[7][:16]
    select_decode = int(not same_bits(decoded, E2M1 * np.float32(2.0**-14)).all())
    return Arithmetic(select_decode, flushes)


def run_probe(device: Device, a: F32, b: F32, c: F32) -> F32:
    """The probe kernel over three arrays [n]: [8, n]."""
    inputs = []
    for values in (a, b, c):
        tensor = device.host(len(values))
        view(tensor)[:] = values
        inputs.append(tensor)
    out = device.device(8 * len(a))
    groups = -(-len(a) // PROBE.local_size)
    pipeline = device.pipeline(PROBE, [*inputs, out], (groups, 1, 1), {"n": len(a)})
    Program(device).dispatch(pipeline, [out]).run()
    return view(out).reshape(8, -1).copy()


def expected_results(a: F32, b: F32, c: F32) -> list[F32]:
    """The rows of ``NAMES`` by numpy."""
    functions: tuple[Callable[[F32], F32], ...] = (elementary.exp, elementary.reciprocal, elementary.rsqrt)
    with np.errstate(all="ignore"):
        return [a * b, a + b, a - b, a * b + c, *(function(a) for function in functions)]


def subnormal(a: F32, b: F32, c: F32) -> list[NDArray[np.bool_]]:
    """Where a subnormal number goes into or comes out of the rows of ``NAMES``. The functions are made of none.

    The smallest normal number counts among what comes out: it may be what a subnormal one was rounded to.
    """
    smallest = np.finfo(np.float32).smallest_normal

    def goes_in(*numbers: F32) -> NDArray[np.bool_]:
        return np.logical_or.reduce([(n != 0) & (np.abs(n) < smallest) for n in numbers])

    def comes_out(*numbers: F32) -> NDArray[np.bool_]:
        return np.logical_or.reduce([(n != 0) & (np.abs(n) <= smallest) for n in numbers])

    product, total, difference, two_steps, *functions = expected_results(a, b, c)
    of_two, none = goes_in(a, b), np.zeros(len(a), np.bool_)
    return [
        of_two | comes_out(product), of_two | comes_out(total), of_two | comes_out(difference),
        of_two | goes_in(c) | comes_out(product, two_steps), *(none for _ in functions),
    ]  # fmt: skip


def same_bits(a: F32, b: F32) -> np.ndarray:
    """Where two arrays hold the same bits; NaN equals NaN."""
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
