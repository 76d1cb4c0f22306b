"""The Vulkan loader through ctypes: devices and limits, and a trial allocation. Only ever run in a child process.

kp tells neither a device's type nor its memory, and checks no allocation. The offsets are those of the structures in
vulkan_core.h on 64-bit machines; a test compares what is read here with vulkaninfo.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
from typing import Any

LIBRARIES = ("libvulkan.so.1", "libvulkan.so")
API_1_1 = 1 << 22 | 1 << 12
KINDS = ("other", "integrated GPU", "discrete GPU", "virtual GPU", "CPU")

# VkStructureType
APPLICATION, INSTANCE, QUEUE, DEVICE, ALLOCATE = 0, 1, 2, 3, 5
PROPERTIES, MEMORY, ID, SUBALLOCATION = 1000059001, 1000059006, 1000071004, 1000168000
SUBGROUP, DRIVER, FLOAT_CONTROLS, PCI, BUDGET = 1000094000, 1000196000, 1000197000, 1000212000, 1000237000
SUBGROUP_COMPUTE, SUBGROUP_BALLOT = 0x20, 0x8
LIMITS = 16 + 296  # of VkPhysicalDeviceLimits in VkPhysicalDeviceProperties2
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT = 1, 2, 4


class VulkanError(Exception):
    """The loader or a driver said no."""


def structure(kind: int, size: int, following: Any = None) -> Any:
    """A zeroed structure of ``size`` bytes with its sType and pNext."""
    made = ctypes.create_string_buffer(size)
    struct.pack_into("=i4xQ", made, 0, kind, ctypes.addressof(following) if following is not None else 0)
    return made


def words(buffer: Any, offset: int, count: int = 1) -> tuple[int, ...]:
    return struct.unpack_from(f"={count}I", buffer, offset)


def text(buffer: Any, offset: int) -> str:
    return bytes(buffer[offset : offset + 256]).split(b"\0")[0].decode(errors="replace")


class Loader:
    """One instance and its physical devices."""

    def __init__(self) -> None:
        self.library = self._open()
        self.instance = ctypes.c_void_p()
        application = structure(APPLICATION, 48)
        struct.pack_into("=I", application, 44, API_1_1)
        info = structure(INSTANCE, 64)
        struct.pack_into("=Q", info, 24, ctypes.addressof(application))
        self.check(self.library.vkCreateInstance(info, None, ctypes.byref(self.instance)), "vkCreateInstance")
        self.devices = self._physical_devices()

    @staticmethod
    def _open() -> ctypes.CDLL:
        for name in LIBRARIES:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
        raise VulkanError(f"{LIBRARIES[0]} is not installed")

    @staticmethod
    def check(result: int, what: str) -> None:
        if result < 0:
            raise VulkanError("no driver is installed" if result == -9 else f"{what} failed with VkResult {result}")

    def _physical_devices(self) -> list[int]:
        count = ctypes.c_uint32()
        enumerate_devices = self.library.vkEnumeratePhysicalDevices
        self.check(enumerate_devices(self.instance, ctypes.byref(count), None), "vkEnumeratePhysicalDevices")
        handles = (ctypes.c_void_p * count.value)()
        self.check(enumerate_devices(self.instance, ctypes.byref(count), handles), "vkEnumeratePhysicalDevices")
        return [handle for handle in handles[: count.value] if handle]

    def extensions(self, device: int) -> set[str]:
        count = ctypes.c_uint32()
        ask = self.library.vkEnumerateDeviceExtensionProperties
        ask(ctypes.c_void_p(device), None, ctypes.byref(count), None)
        found = ctypes.create_string_buffer(260 * max(1, count.value))
        ask(ctypes.c_void_p(device), None, ctypes.byref(count), found)
        return {text(found, 260 * i) for i in range(count.value)}

    def describe(self, index: int) -> dict[str, Any]:
        """The fields of ``listing.DeviceInfo``."""
        device = self.devices[index]
        extensions = self.extensions(device)
        ids, suballocation = structure(ID, 64), structure(SUBALLOCATION, 32)
        driver, controls = structure(DRIVER, 536), structure(FLOAT_CONTROLS, 88)
        pci, subgroup = structure(PCI, 32), structure(SUBGROUP, 32)
        chain = [ids, suballocation, subgroup]
        has_controls = "VK_KHR_shader_float_controls" in extensions
        chain += [controls] if has_controls else []
        chain += [driver] if "VK_KHR_driver_properties" in extensions else []
        chain += [pci] if "VK_EXT_pci_bus_info" in extensions else []
        for one, following in itertools.pairwise(chain):
            struct.pack_into("=Q", one, 8, ctypes.addressof(following))
        properties = structure(PROPERTIES, 16 + 824, chain[0])
        self.library.vkGetPhysicalDeviceProperties2(ctypes.c_void_p(device), properties)
        api, driver_version, _, _, kind = words(properties, 16, 5)
        heap, free = self.memory(device, "VK_EXT_memory_budget" in extensions)
        name = f"{text(driver, 20)} {text(driver, 276)}".strip()
        subgroup_size, stages, operations = words(subgroup, 16, 3)
        has_ballot = stages & SUBGROUP_COMPUTE and operations & SUBGROUP_BALLOT
        return {
            "index": index,
            "name": text(properties, 36),
            "kind": KINDS[kind] if kind < len(KINDS) else KINDS[0],
            "api": f"{api >> 22 & 127}.{api >> 12 & 1023}.{api & 4095}",
            "driver": name or f"driver version {driver_version:#x}",
            "uuid": bytes(ids[16:32]).hex(),
            "pci": "{:04x}:{:02x}:{:02x}.{}".format(*words(pci, 16, 4)) if pci in chain else "",
            "heap_bytes": heap,
            "free_bytes": free,
            "max_buffer": words(properties, LIMITS + 28)[0],
            "max_allocation": struct.unpack_from("=Q", suballocation, 24)[0],
            "max_groups": words(properties, LIMITS + 220, 3),
            "max_group_size": words(properties, LIMITS + 232)[0],
            "push_bytes": words(properties, LIMITS + 32)[0],
            "storage_buffers": words(properties, LIMITS + 76)[0],
            "subgroup_size": subgroup_size if has_ballot else 0,
            "float_controls": has_controls and bool(words(controls, 28)[0]) and bool(words(controls, 64)[0]),
            "denorm_preserve": has_controls and bool(words(controls, 40)[0]),
        }

    def memory(self, device: int, has_budget: bool) -> tuple[int, int]:
        """The largest device-local heap, and what is left of it."""
        budget = structure(BUDGET, 16 + 256)
        memory = structure(MEMORY, 16 + 520, budget if has_budget else None)
        self.library.vkGetPhysicalDeviceMemoryProperties2(ctypes.c_void_p(device), memory)
        best = (0, 0)
        for i in range(words(memory, 16 + 260)[0]):
            size, flags = struct.unpack_from("=QI", memory, 16 + 264 + 16 * i)
            left = size
            if has_budget:
                allowed, used = (struct.unpack_from("=Q", budget, 16 + at + 8 * i)[0] for at in (0, 128))
                left = min(size, max(0, allowed - used))
            if flags & DEVICE_LOCAL:
                best = max(best, (size, left))
        return best

    def memory_type(self, device: int, flags: int) -> int:
        """The first type that has the flags, which is the one that kp takes."""
        memory = structure(MEMORY, 16 + 520)
        self.library.vkGetPhysicalDeviceMemoryProperties2(ctypes.c_void_p(device), memory)
        for i in range(words(memory, 16)[0]):
            if words(memory, 20 + 8 * i)[0] & flags == flags:
                return i
        raise VulkanError(f"no memory type has the flags {flags}")


class Trial:
    """A device of our own beside kp's, to ask whether an allocation would succeed."""

    def __init__(self, index: int) -> None:
        self._loader = Loader()
        self._physical = self._loader.devices[index]
        priority = ctypes.c_float(1.0)
        queue = structure(QUEUE, 40)
        struct.pack_into("=IIIIQ", queue, 16, 0, 0, 1, 0, ctypes.addressof(priority))
        info = structure(DEVICE, 72)
        struct.pack_into("=IIQ", info, 16, 0, 1, ctypes.addressof(queue))
        self._device = ctypes.c_void_p()
        create = self._loader.library.vkCreateDevice
        Loader.check(create(ctypes.c_void_p(self._physical), info, None, ctypes.byref(self._device)), "vkCreateDevice")

    def fits(self, nbytes: int, host: bool) -> bool:
        """Whether ``nbytes`` of device-local (``host``: host-visible) memory can be had; it is freed again."""
        library = self._loader.library
        flags = HOST_VISIBLE | HOST_COHERENT if host else DEVICE_LOCAL
        info = structure(ALLOCATE, 32)
        struct.pack_into("=QI", info, 16, nbytes, self._loader.memory_type(self._physical, flags))
        memory = ctypes.c_void_p()
        if library.vkAllocateMemory(self._device, info, None, ctypes.byref(memory)) != 0:
            return False
        library.vkFreeMemory(self._device, memory, None)
        return True


def main() -> None:
    """Print every device as a line of JSON, or what the loader says instead as ``{"trouble": ...}``."""
    try:
        loader = Loader()
        for index in range(len(loader.devices)):
            print(json.dumps(loader.describe(index)), flush=True)
    except VulkanError as error:
        print(json.dumps({"trouble": str(error)}), flush=True)
