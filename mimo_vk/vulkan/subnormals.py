"""Experts on a device that takes subnormal floats for zero, as NVIDIA's do: it computes only what can't meet one.

Let every x that is not zero be LEAST or more, and every scale 2^-40 or more. With its 24 bits x is a multiple of 2^-85;
x times a code, where codes are multiples of a half, is one of 2^-86, and so are the sums of a word's products. Times a
scale these are multiples of 2^-126, the smallest normal number, and so are all sums from there on: none is subnormal.
Activations are the x of the down product. For those that don't comply the shader puts NaN (its FLUSHES), which makes
the pair's result NaN, and what is not finite the CPU computes again.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, Expert, MatrixMXFP4
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.client import DeviceClient, TierGone
from mimo_vk.vulkan.listing import DeviceInfo

LEAST = np.float32(2.0**-62)
LEAST_SCALE = 127 - 40  # the byte of 2^-40


@functools.cache
def flushes(info: DeviceInfo) -> bool:
    """Whether a device takes subnormal floats for zero: it is tried out, unless its driver promises to keep them."""
    if info.denorm_preserve:
        return False
    with DeviceClient(info, TierShape(32, 32, 1, 1, 1), 0) as client:
        try:
            client.wait_ready()
        except TierGone:
            return False  # the start in earnest will say why
        return client.flushes


def meets_subnormals(x: F32) -> NDArray[np.bool_]:
    """Which rows of x [n, H] have an element below LEAST that is not zero."""
    magnitudes = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    least = LEAST.view(np.uint32)
    small: NDArray[np.bool_] = magnitudes - np.uint32(1) < least - np.uint32(1)  # zero becomes the largest
    return np.logical_or.reduce(small, axis=1)


def is_steady(expert: Expert) -> bool:
    """Whether all scales comply, but for those of blocks of zeros."""
    return all(map(_has_no_small_scale, (expert.gate, expert.up, expert.down)))


def _has_no_small_scale(matrix: MatrixMXFP4) -> bool:
    small = matrix.scales < LEAST_SCALE
    if not small.any():
        return True
    codes = matrix.codes.reshape(*matrix.scales.shape, 16)[small]
    return not (codes & 0x77).any()  # without the signs
