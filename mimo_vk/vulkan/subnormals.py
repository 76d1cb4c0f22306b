"""Experts on a device that takes subnormal floats for zero: it computes only what can't meet one.

NVIDIA's driver doesn't offer to keep them (shaderDenormPreserveFloat32 of a GTX 1070 and an RTX 3070:
github.com/llvm/offload-test-suite/pull/728, github.com/HansKristian-Work/vkd3d-proton/pull/1567); Lavapipe flushes them
since Mesa 26.1.

Let every x that is not zero be LEAST or more. With its 24 bits it is a multiple of 2^-125; x times a code, where codes
are multiples of a half, is one of 2^-126, the smallest normal number, and so are the sums of a word's products. Let
these times their scale be LEAST or more, too, where they are not zero: then they are multiples of 2^-125, and so are
all sums from there on. None is subnormal. Where that is not so for x, the CPU computes the row's pairs. At what
is scaled and at activations, the x of the down product, the shaders look (FLUSHES): for what does not comply they put
NaN, which makes the pair's result NaN, and what is not finite the CPU computes again.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.client import DeviceClient, TierGone
from mimo_vk.vulkan.listing import DeviceInfo

LEAST = np.float32(2.0**-102)  # LEAST_BITS in the shaders


def flushes(info: DeviceInfo) -> bool:
    """Whether a device takes subnormal floats for zero: it is tried out, unless its driver promises to keep them."""
    return not info.denorm_preserve and _flushes(replace(info, free_bytes=0))  # of which the answer doesn't depend


@functools.cache
def _flushes(info: DeviceInfo) -> bool:
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
