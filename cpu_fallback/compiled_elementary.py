"""Compiled twins of ``cpu_fallback/elementary.py``: scalar float32 functions that are inlined into loops.

They hold no branches, only selections, so that LLVM can run them on vectors. Both sides of a selection are computed, so
both must be harmless. numba widens every integer operation to 64 bits: the int32 around each one narrows it again.
"""

from __future__ import annotations

import numpy as np

from cpu_fallback.elementary import (
    ERF_END,
    ERF_FAR,
    ERF_NEAR,
    ERF_SLOPE,
    ERF_TINY_BITS,
    EXP_E2,
    EXP_E3,
    EXP_E4,
    EXP_E5,
    EXP_E6,
    EXP_HIGH,
    EXP_LOW,
    FRACTION_BITS,
    FRACTION_WIDTH,
    HALF,
    INFINITY,
    INFINITY_BITS,
    INT_ONE,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    MAGNITUDE_BITS,
    NAN,
    ONE,
    ONE_BITS,
    RECIPROCAL_HIGH_BITS,
    RECIPROCAL_SEED,
    RSQRT_SEED,
    SIGN_BIT,
    SMALLEST_NORMAL_BITS,
    SQRT_HALF,
    ZERO,
)
from cpu_fallback.jit import jit


@jit(inline="always")
def exp(x: np.float32) -> np.float32:
    """e^x as ``elementary.exp``."""
    inside = (x >= EXP_LOW) & (x <= EXP_HIGH)
    a = x if inside else ZERO
    n = np.floor(a * LOG2_E + HALF)
    r = (a - n * LN2_HIGH) - n * LN2_LOW
    p = EXP_E6 * r + EXP_E5
    p = p * r + EXP_E4
    p = p * r + EXP_E3
    p = p * r + EXP_E2
    p = (p * (r * r) + r) + ONE
    bits = np.int32(np.float32(p).view(np.int32) + np.int32(np.int32(n) << FRACTION_WIDTH))
    y = np.int32(bits).view(np.float32)
    below = ZERO if x < EXP_LOW else NAN
    outside = INFINITY if x > EXP_HIGH else below
    return y if inside else outside


@jit(inline="always")
def reciprocal(x: np.float32) -> np.float32:
    """1/x as ``elementary.reciprocal``."""
    bits = np.float32(x).view(np.int32)
    magnitude = np.int32(bits & MAGNITUDE_BITS)
    m_bits = np.int32((bits & FRACTION_BITS) | ONE_BITS)
    m = np.int32(m_bits).view(np.float32)
    y = np.int32(RECIPROCAL_SEED - m_bits).view(np.float32)
    y = y + y * (ONE - m * y)
    y = y + y * (ONE - m * y)
    y = y + y * (ONE - m * y)
    y = y + y * (ONE - m * y)
    result = np.int32(np.float32(y).view(np.int32) - np.int32(magnitude - m_bits))
    tiny = magnitude < SMALLEST_NORMAL_BITS
    outside = INFINITY_BITS if tiny else np.int32(0)
    unsigned = outside if tiny | (magnitude > RECIPROCAL_HIGH_BITS) else result
    signed = np.int32(unsigned | np.int32(bits & SIGN_BIT))
    value = np.int32(signed).view(np.float32)
    return NAN if magnitude > INFINITY_BITS else value


@jit(inline="always")
def rsqrt(x: np.float32) -> np.float32:
    """1/sqrt(x) as ``elementary.rsqrt``."""
    bits = np.float32(x).view(np.int32)
    inside = (bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS)
    a_bits = bits if inside else ONE_BITS
    a = np.int32(a_bits).view(np.float32)
    y = np.int32(RSQRT_SEED - np.int32(a_bits >> INT_ONE)).view(np.float32)
    y = y + y * (HALF - HALF * ((a * y) * y))
    y = y + y * (HALF - HALF * ((a * y) * y))
    y = y + y * (HALF - HALF * ((a * y) * y))
    y = y + y * (HALF - HALF * ((a * y) * y))
    infinite = ZERO if bits == INFINITY_BITS else NAN
    outside = INFINITY if np.int32(bits & MAGNITUDE_BITS) < SMALLEST_NORMAL_BITS else infinite
    return y if inside else outside


@jit(inline="always")
def sigmoid(x: np.float32) -> np.float32:
    """reciprocal(1 + exp(-x))."""
    return reciprocal(ONE + exp(-x))


@jit(inline="always")
def erf(x: np.float32) -> np.float32:
    """As ``elementary.erf``."""
    bits = np.float32(x).view(np.int32)
    magnitude, sign = np.int32(bits & MAGNITUDE_BITS), np.int32(bits & SIGN_BIT)
    tiny = magnitude < ERF_TINY_BITS
    normal_bits = sign if magnitude < SMALLEST_NORMAL_BITS else bits
    small = np.int32(normal_bits).view(np.float32) * ERF_SLOPE
    near = (magnitude <= ONE_BITS) & (magnitude >= ERF_TINY_BITS)
    a = x if near else ONE
    q = a * a
    p = ERF_NEAR[6] * q + ERF_NEAR[5]
    p = p * q + ERF_NEAR[4]
    p = p * q + ERF_NEAR[3]
    p = p * q + ERF_NEAR[2]
    p = p * q + ERF_NEAR[1]
    p = p * q + ERF_NEAR[0]
    size = np.int32(magnitude).view(np.float32)
    t = size if (size > ONE) & (size < ERF_END) else ERF_END
    r = ERF_FAR[7] * t + ERF_FAR[6]
    r = r * t + ERF_FAR[5]
    r = r * t + ERF_FAR[4]
    r = r * t + ERF_FAR[3]
    r = r * t + ERF_FAR[2]
    r = r * t + ERF_FAR[1]
    r = r * t + ERF_FAR[0]
    rest = np.float32(ONE - exp(-r))
    far = np.int32(rest.view(np.int32) | sign).view(np.float32)
    beyond = a + a * p if near else far
    value = small if tiny else beyond
    return NAN if magnitude > INFINITY_BITS else value


@jit(inline="always")
def gelu(x: np.float32) -> np.float32:
    """As ``elementary.gelu``."""
    return (HALF * x) * (ONE + erf(x * SQRT_HALF))
