"""exp, reciprocal, reciprocal square root and sigmoid as short sequences of float32 and integer operations.

Only add, subtract, multiply, floor, comparison, shifts and integer adds, each float operation rounded on its own, so
every processor that follows IEEE-754 returns the same bits. The constants stand here once; the compiled twins import
them, and a shader repeats them. No function reads or makes a subnormal: a subnormal argument counts as zero.

Largest error against float64, in units of the last place: exp 1.0 on [-64, 88], reciprocal 1.25 and rsqrt 1.22 on
every normal number (``tools/fit_elementary.py`` measures them and derives the polynomial).
"""

from __future__ import annotations

import numpy as np

from mimo_vk.formats import F32

EXP_LOW = np.float32(-64.0)  # below: +0
EXP_HIGH = np.float32(88.72283172607422)  # the largest float32 whose exp is finite; above: +inf
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # 10 bits, so that n * LN2_HIGH is exact for every n that occurs
LN2_LOW = np.float32(-0.00021219444170128554)  # log(2) - LN2_HIGH
# exp(r) = 1 + r + r^2 * (E2 + E3 r + E4 r^2 + E5 r^3 + E6 r^4) on |r| <= log(2)/2
EXP_E2 = np.float32(0.4999999403953552)
EXP_E3 = np.float32(0.1666652113199234)
EXP_E4 = np.float32(0.04166838899254799)
EXP_E5 = np.float32(0.00836874544620514)
EXP_E6 = np.float32(0.0013814540579915047)

RECIPROCAL_SEED = np.int32(0x7EF311C7)
RECIPROCAL_HIGH_BITS = np.int32(0x7E800000)  # 2^126; a larger magnitude gives a zero of the same sign
RSQRT_SEED = np.int32(0x5F3759DF)

ONE = np.float32(1.0)
HALF = np.float32(0.5)
ZERO = np.float32(0.0)
INFINITY = np.float32(np.inf)
NAN = np.float32(np.nan)
SIGN_BIT = np.int32(-0x80000000)
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
FRACTION_BITS = np.int32(0x007FFFFF)
ONE_BITS = np.int32(0x3F800000)
SMALLEST_NORMAL_BITS = np.int32(0x00800000)
INFINITY_BITS = np.int32(0x7F800000)
FRACTION_WIDTH = np.int32(23)
INT_ONE = np.int32(1)


def exp(x: F32) -> F32:
    """e^x: +0 below -64, +inf above 88.7228, NaN for NaN. Any shape, float32."""
    inside = (x >= EXP_LOW) & (x <= EXP_HIGH)
    a = np.where(inside, x, ZERO)
    n = np.floor(a * LOG2_E + HALF)
    r = (a - n * LN2_HIGH) - n * LN2_LOW
    p = EXP_E6 * r + EXP_E5
    p = p * r + EXP_E4
    p = p * r + EXP_E3
    p = p * r + EXP_E2
    p = (p * (r * r) + r) + ONE
    # n is -93..128; at 128 p is below 1, so the sum of the exponents stays a finite number's
    y = (p.view(np.int32) + (n.astype(np.int32) << FRACTION_WIDTH)).view(np.float32)
    outside = np.where(x > EXP_HIGH, INFINITY, np.where(x < EXP_LOW, ZERO, NAN))
    return np.where(inside, y, outside)


def reciprocal(x: F32) -> F32:
    """1/x: an infinity of x's sign for zeros and subnormals, a zero of x's sign where |x| > 2^126, NaN for NaN.

    The Newton steps work on the fraction in [1, 2); the exponent is taken off the result's bits.
    """
    bits = x.view(np.int32)
    magnitude = bits & MAGNITUDE_BITS
    m_bits = (bits & FRACTION_BITS) | ONE_BITS
    m = m_bits.view(np.float32)
    y = (RECIPROCAL_SEED - m_bits).view(np.float32)
    for _ in range(4):
        y = y + y * (ONE - m * y)
    inside = (magnitude >= SMALLEST_NORMAL_BITS) & (magnitude <= RECIPROCAL_HIGH_BITS)
    exponent = magnitude - m_bits  # of x, where the fraction bits cancel, still shifted to their place
    result = y.view(np.int32) - exponent
    outside = np.where(magnitude < SMALLEST_NORMAL_BITS, INFINITY_BITS, np.int32(0))
    signed = (np.where(inside, result, outside) | (bits & SIGN_BIT)).view(np.float32)
    return np.where(magnitude > INFINITY_BITS, NAN, signed)


def rsqrt(x: F32) -> F32:
    """1/sqrt(x): +inf for zeros and subnormals of either sign, NaN below that and for NaN, +0 for +inf."""
    bits = x.view(np.int32)
    inside = (bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS)
    a_bits = np.where(inside, bits, ONE_BITS)
    a = a_bits.view(np.float32)
    y = (RSQRT_SEED - (a_bits >> INT_ONE)).view(np.float32)
    for _ in range(4):
        y = y + y * (HALF - HALF * ((a * y) * y))
    tiny = (bits & MAGNITUDE_BITS) < SMALLEST_NORMAL_BITS
    outside = np.where(tiny, INFINITY, np.where(bits == INFINITY_BITS, ZERO, NAN))
    return np.where(inside, y, outside)


def sigmoid(x: F32) -> F32:
    """reciprocal(1 + exp(-x))."""
    return reciprocal(ONE + exp(-x))
