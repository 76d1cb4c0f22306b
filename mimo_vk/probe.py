"""Vulkan and kp looked at from child processes: a driver or kp may crash the process that loads them."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

SECONDS = 60.0  # a driver that hangs is given up on

KP_VERSION = """
import importlib.metadata, kp
print(importlib.metadata.version("kp"))
"""

# Under numpy 2, and some builds, kp's arrays read wrong without an error: what comes back is compared.
KP_ROUND_TRIP = """
import kp, numpy as np
sent = np.arange(1, 1025, dtype=np.float32)
manager = kp.Manager({index})
tensor = manager.tensor(sent)
manager.sequence().eval(kp.OpTensorSyncDevice([tensor]))
tensor.data()[:] = 0
manager.sequence().eval(kp.OpTensorSyncLocal([tensor]))
print("same" if np.array_equal(np.array(tensor.data()), sent) else f"differs: {{tensor.data()[:4]}}")
"""


@dataclass(frozen=True)
class Child:
    """How a child process ended: its standard output, and what went wrong, in words ("" for nothing)."""

    output: str
    trouble: str


@dataclass(frozen=True)
class Device:
    """A Vulkan device as vulkaninfo lists it; ``kind`` is "discrete GPU", "integrated GPU", "CPU"..."""

    index: int
    name: str
    kind: str
    driver: str
    api: str


@dataclass(frozen=True)
class VulkanReport:
    """What vulkaninfo said: devices, whether the validation layer is installed, what went wrong ("" for nothing)."""

    devices: tuple[Device, ...]
    validation_installed: bool
    trouble: str


def run_child(command: list[str], seconds: float | None = None) -> Child:
    """Run a command without input; a crash, a time-out or a missing program is described, never raised."""
    limit = SECONDS if seconds is None else seconds
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        return Child("", f"no answer in {limit:.0f} s")
    except OSError as error:
        return Child("", error.strerror or str(error))
    if done.returncode < 0:
        name = (
            signal.Signals(-done.returncode).name if -done.returncode in set(signal.Signals) else str(-done.returncode)
        )
        return Child(done.stdout, f"it crashed ({name})")
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        return Child(done.stdout, f"exit status {done.returncode}: {last[0].strip()}")
    return Child(done.stdout, "")


def kp_version() -> Child:
    """Import kp in a child and print its version."""
    return run_child([sys.executable, "-c", KP_VERSION])


def kp_round_trip(index: int) -> Child:
    """Send 1024 numbers to a device and read them back. Only where there is a device: without one kp crashes."""
    child = run_child([sys.executable, "-c", KP_ROUND_TRIP.format(index=index)])
    last = child.output.strip().splitlines()[-1:] or [""]
    if not child.trouble and last[0] != "same":
        return Child(child.output, f"what came back {last[0] or 'is empty'}")
    return child


def vulkan() -> VulkanReport:
    """Ask vulkaninfo, where it is installed."""
    program = shutil.which("vulkaninfo")
    if program is None:
        return VulkanReport(
            (), False, "vulkaninfo is not installed (sudo apt-get install -y vulkan-tools mesa-vulkan-drivers)"
        )
    child = run_child([program, "--summary"])
    devices = parse_devices(child.output)
    trouble = child.trouble if not devices else ""
    if "ERROR_INCOMPATIBLE_DRIVER" in trouble:  # the loader's word for having found no driver at all
        trouble = "no driver is installed (sudo apt-get install -y mesa-vulkan-drivers)"
    return VulkanReport(devices, "VK_LAYER_KHRONOS_validation" in child.output, trouble)


def parse_devices(summary: str) -> tuple[Device, ...]:
    """The devices in the text of ``vulkaninfo --summary``."""
    devices = []
    for block in re.split(r"^GPU(?=\d+:)", summary, flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^\s+(\w+)\s*=\s*(.+?)\s*$", block, flags=re.MULTILINE))
        kind = fields.get("deviceType", "unknown").removeprefix("PHYSICAL_DEVICE_TYPE_")
        kind = kind.replace("_", " ").lower().replace("gpu", "GPU").replace("cpu", "CPU")
        driver = " ".join(fields[key] for key in ("driverName", "driverInfo") if key in fields) or "unknown driver"
        devices.append(
            Device(
                int(block.split(":")[0]),
                fields.get("deviceName", "unnamed"),
                kind,
                driver,
                fields.get("apiVersion", "?"),
            )
        )
    return tuple(devices)
