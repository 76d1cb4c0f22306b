"""Which devices there are, and which one is meant."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from typing import Any

import pytest

from mimo_vk.errors import UsageError
from mimo_vk.probe import Child, vulkan
from mimo_vk.vulkan import setup
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.listing import DeviceInfo, Listing, choose, explain, list_devices, read_listing
from mimo_vk.vulkan.setup import DevicePlan, fit_tier, room_on
from tests.vulkan_device import software_device


def device(index: int, name: str, kind: str, **changes: Any) -> DeviceInfo:
    values: dict[str, Any] = {
        "heap_bytes": 8_000_000_000,
        "free_bytes": 8_000_000_000,
        "pci": f"0000:0{index}:00.0",
    } | changes
    return replace(software_device(), index=index, name=name, kind=kind, **values)


DEVICES = (
    device(0, "llvmpipe (LLVM 15)", "CPU", pci=""),
    device(1, "Some iGPU 770", "integrated GPU"),
    device(2, "Big Card 9000", "discrete GPU", uuid="00112233445566778899aabbccddeeff"),
    device(3, "Big Card 9000", "discrete GPU"),
)


def test_the_software_device_is_as_vulkaninfo_says() -> None:
    """Limits from another program: offsets in the structures that are read by hand would show here."""
    found = software_device()
    (listed,) = [d for d in vulkan().devices if d.kind == "CPU"]
    assert (found.index, found.name, found.driver, found.api) == (
        listed.index, listed.name, listed.driver, listed.api,
    )  # fmt: skip
    text = subprocess.run(["vulkaninfo"], capture_output=True, text=True).stdout

    def number(name: str) -> int:
        return int(next(line for line in text.splitlines() if line.strip().startswith(name)).split("=")[1], 0)

    assert found.max_buffer == number("maxStorageBufferRange")
    assert found.max_allocation == number("maxMemoryAllocationSize")
    assert found.max_group_size == number("maxComputeWorkGroupInvocations")
    assert found.push_bytes == number("maxPushConstantsSize")
    assert found.storage_buffers == number("maxPerStageDescriptorStorageBuffers")
    assert found.subgroup_size == number("subgroupSize ")
    assert found.heap_bytes == int(text.split("memoryHeaps[0]:")[1].split("size   = ")[1].split(" ")[0])
    assert found.max_groups == (65535, 65535, 65535) and found.float_controls
    uuid = next(line for line in text.splitlines() if "deviceUUID" in line)
    assert found.uuid == uuid.split("=")[1].strip().replace("-", "")


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ("auto", 2),
        ("0", 0),
        ("3", 3),
        ("big card", 2),
        ("LLVM", 0),
        ("00112233445566778899aabbccddeeff", 2),
        ("iGPU 770", 1),
    ],
)
def test_choosing(wanted: str, index: int) -> None:
    chosen = choose(Listing(DEVICES, ""), wanted)
    assert chosen is not None and chosen.index == index


def test_auto_takes_an_integrated_device_but_never_a_cpu_driver() -> None:
    chosen = choose(Listing(DEVICES[:2], ""), "auto")
    assert chosen is not None and chosen.index == 1
    assert choose(Listing(DEVICES[:1], ""), "auto") is None


@pytest.mark.parametrize(
    ("devices", "wanted", "said"),
    [
        (DEVICES, "auto", f"auto takes {DEVICES[2].describe()}: the first of 2 of this kind"),
        (DEVICES[:3], "auto", f"auto takes {DEVICES[2].describe()}: the only one of this kind"),
        (
            DEVICES[:2],
            "auto",
            f"auto takes {DEVICES[1].describe()}: the only one of this kind, and there is no discrete GPU",
        ),
        (DEVICES[:1], "auto", "auto takes none: there is no GPU, and a CPU driver must be named"),
        (DEVICES, "0", f"0 takes {DEVICES[0].describe()}"),
    ],
)
def test_why_a_device_is_taken(devices: tuple[DeviceInfo, ...], wanted: str, said: str) -> None:
    assert explain(Listing(devices, ""), wanted) == f"--device {said}"


@pytest.mark.parametrize("wanted", ["4", "radeon"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(wanted: str) -> None:
    with pytest.raises(UsageError, match=f"--device {wanted}: no such.*1: Some iGPU 770, integrated GPU, 8.0 GB"):
        choose(Listing(DEVICES, ""), wanted)


def test_one_card_under_two_drivers_is_listed_once() -> None:
    lines = [json.dumps(asdict(d)) for d in (DEVICES[2], replace(DEVICES[2], index=3, driver="another"), DEVICES[0])]
    assert read_listing(Child("\n".join(lines), "")).devices == (DEVICES[2], DEVICES[0])


def test_no_driver_and_a_crash_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_listing(Child("", "it crashed (SIGSEGV)")).trouble == (
        "no Vulkan device: asking for one, it crashed (SIGSEGV)"
    )
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")
    assert list_devices() == Listing((), "no Vulkan device: no driver is installed")


SHAPE = TierShape(4096, 2048, 8, 64, 4)
SLOT = 13_369_344  # 3 * 4096 * 2048 codes of half a byte, and a scale byte for each 32


@pytest.mark.parametrize(
    ("changes", "tier_gb", "slots"),
    [
        ({}, 1.0, 74),
        ({}, 100.0, (8_000_000_000 - 800_000_000) // SLOT),  # a tenth of the heap is left to others
        ({}, None, (8_000_000_000 - 800_000_000) // SLOT),
        ({"free_bytes": 2_000_000_000}, None, (2_000_000_000 - 800_000_000) // SLOT),
        ({"heap_bytes": 1_000_000_000, "free_bytes": 1_000_000_000}, None, (1_000_000_000 - 256_000_000) // SLOT),
        ({"kind": "integrated GPU"}, None, 4_000_000_000 // 4 // SLOT),  # a quarter of what the machine has left
        ({"kind": "integrated GPU"}, 2.0, 2_000_000_000 // SLOT),
        ({}, 0.01, None),
        ({"max_buffer": 8 << 20}, None, None),
        ({"free_bytes": 100_000_000}, None, None),
    ],
    ids=str,
)
def test_how_many_experts_there_is_room_for(
    changes: dict[str, Any], tier_gb: float | None, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "memory_available", lambda: 4_000_000_000)
    info = replace(DEVICES[2], **changes)
    plan, line = fit_tier(DevicePlan(info, SHAPE, 0, 48), tier_gb, 12_000, room_on(info))
    if slots is None:
        assert plan is None and "there is no room for one expert of 13369344 bytes; running on the CPU" in line
    else:
        assert plan is not None and plan.slots == slots and f"room for {slots} experts" in line
        shared = changes.get("kind") == "integrated GPU"
        assert plan.ram_bytes == 150_000_000 + (slots * SLOT if shared else 0)
    assert ("less than the 100 GB asked for: 7.200 GB are left" in line) == (tier_gb == 100.0)


def test_no_more_slots_than_experts() -> None:
    plan, _ = fit_tier(DevicePlan(DEVICES[2], SHAPE, 0, 48), None, 7, room_on(DEVICES[2]))
    assert plan is not None and plan.slots == 7
