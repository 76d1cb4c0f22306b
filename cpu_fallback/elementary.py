"""exp, reciprocal, reciprocal square root, sigmoid and erf as short sequences of float32 and integer operations.

Only add, subtract, multiply, floor, comparison, shifts and integer adds, each float operation rounded on its own, so
every processor that follows IEEE-754 returns the same bits. The constants stand here once; the compiled twins import
them, and a shader repeats them. No function reads or makes a subnormal: a subnormal argument counts as zero.

Largest error against float64, in units of the last place: exp 1.0 on [-64, 88], reciprocal 1.25 and rsqrt 1.22 on
every normal number, erf 1.4 on every normal number (``tools/fit_elementary.py`` measures them and derives the
polynomials).
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
# erf(x) = x + x * (N0 + N1 x^2 + ... + N6 x^12) where |x| <= 1
ERF_NEAR = tuple(
    np.float32(c)
    for c in (0.12837916612625122, -0.3761262595653534, 0.1128358542919159, -0.026853812858462334,
              0.005188327748328447, -0.0008010194869711995, 7.853864372009411e-05)
)  # fmt: skip
# and 1 - exp(-(F0 + F1 |x| + ... + F7 |x|^7)), of x's sign, elsewhere; from 4 on it rounds to 1
ERF_FAR = tuple(
    np.float32(c)
    for c in (-0.00018846840248443186, 1.1295802593231201, 0.633216381072998, 0.10842210054397583,
              -0.025210341438651085, 0.00420528557151556, -0.00044147277367301285, 2.1697622287319973e-05)
)  # fmt: skip
ERF_END = np.float32(4.0)
ERF_TINY_BITS = np.int32(0x21800000)  # 2^-60: below it x * (N0 * x^2) could be subnormal
ERF_SLOPE = np.float32(1.1283791670955126)  # 2/sqrt(pi), which erf(x)/x is there
SQRT_HALF = np.float32(0.7071067811865476)

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


def erf(x: F32) -> F32:
    """The error function, of x's sign: 1 from 4 on, a zero for zeros and subnormals, NaN for NaN."""
    bits = x.view(np.int32)
    magnitude, sign = bits & MAGNITUDE_BITS, bits & SIGN_BIT
    tiny = magnitude < ERF_TINY_BITS
    small = np.where(magnitude < SMALLEST_NORMAL_BITS, sign, bits).view(np.float32) * ERF_SLOPE
    near = (magnitude <= ONE_BITS) & ~tiny
    a = np.where(near, x, ONE)
    q = horner(ERF_NEAR, a * a)
    size = magnitude.view(np.float32)
    rest = exp(-horner(ERF_FAR, np.where((size > ONE) & (size < ERF_END), size, ERF_END)))
    far = ((ONE - rest).view(np.int32) | sign).view(np.float32)
    value = np.where(tiny, small, np.where(near, a + a * q, far))
    return np.where(magnitude > INFINITY_BITS, NAN, value)


def horner(coefficients: tuple[np.float32, ...], x: F32) -> F32:
    """c0 + x*(c1 + x*(c2 + ...)), from the inside out."""
    p = coefficients[-1] * x + coefficients[-2]
    for c in coefficients[-3::-1]:
        p = p * x + c
    return p


def gelu(x: F32) -> F32:
    """(x/2) * (1 + erf(x*sqrt(1/2)))."""
    return (HALF * x) * (ONE + erf(x * SQRT_HALF))
