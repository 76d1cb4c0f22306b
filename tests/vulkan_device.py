"""The device that the Vulkan tests run on, and what they compare with."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32, Expert
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.client import DeviceClient
from mimo_vk.vulkan.layout import ROUND, permute_rows
from mimo_vk.vulkan.listing import DeviceInfo, choose, list_devices


@functools.cache
def software_device() -> DeviceInfo:
    """Lavapipe, which set-up installs; or the device that VULKAN_TEST_DEVICE names, for tests marked ``bits`` alone."""
    listing = list_devices()
    named = os.environ.get("VULKAN_TEST_DEVICE")
    chosen = choose(listing, named) if named else None
    return chosen or next(device for device in listing.devices if device.kind == "CPU")


def reference(experts: Sequence[Expert], pairs: np.ndarray, x: F32) -> F32:
    """Each (slot, row) pair's result by numpy: [pairs, hidden]."""
    ops = ReferenceOps()
    slots, rows = (pairs[:, i].astype(np.int32) for i in (0, 1))
    return ops.expert_down(experts, slots, ops.expert_gate_up(experts, slots, rows, x))


def permuted(x: F32, shape: TierShape) -> F32:
    out = np.empty((len(x), shape.layout.rounds * ROUND), np.float32)
    permute_rows(x, out)
    return out


def assert_computed(client: DeviceClient, found: F32, expected: F32) -> None:
    """Equal bits, where a device that takes subnormal floats for zero may leave results to the CPU, as NaN."""
    assert_same_bits(np.where(np.isnan(found) & client.flushes, expected, found), expected)


def assert_same_bits(found: F32, expected: F32) -> None:
    """Equal bits, where any NaN equals any other; fails with the first index that differs."""
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    first = np.unravel_index(np.argmin(same), same.shape)
    assert same.all(), (
        f"at {first}: {found[first]!r}, expected {expected[first]!r}; {(~same).sum()} of {same.size} differ"
    )
