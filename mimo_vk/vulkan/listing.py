"""Which Vulkan devices there are, found out in a child process; and which of them is meant."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from mimo_vk.errors import UsageError
from mimo_vk.probe import Child, run_child

ROOT = __file__.rsplit("/", 3)[0]
GB = 1e9

LIST = """
import sys
sys.path.insert(0, {root!r})
from mimo_vk.vulkan.loader import main
main()
"""


@dataclass(frozen=True)
class DeviceInfo:
    """A physical device and its limits, in bytes where not said otherwise. ``index`` is the loader's, and kp's."""

    index: int
    name: str
    kind: str
    api: str
    driver: str
    uuid: str
    pci: str  # "" where the driver doesn't say
    heap_bytes: int  # the largest device-local heap
    free_bytes: int  # of that heap: what the driver says is left, else its size
    max_buffer: int  # one storage buffer's range
    max_allocation: int
    max_groups: tuple[int, int, int]
    max_group_size: int
    push_bytes: int
    storage_buffers: int  # a shader may bind
    subgroup_size: int  # 0 where subgroups can't broadcast in compute shaders
    float_controls: bool  # rounding to nearest and signed zeros, infinities and NaN can be asked for
    denorm_preserve: bool  # and that subnormals are kept

    @property
    def shares_memory(self) -> bool:
        """Whether the device's memory is the machine's own. A virtual GPU's may well be a card's."""
        return self.kind in ("integrated GPU", "CPU")

    def describe(self) -> str:
        """For a person: ``0: NAME, KIND, 8.6 GB, DRIVER``."""
        return f"{self.index}: {self.name}, {self.kind}, {self.heap_bytes / GB:.1f} GB, {self.driver}"

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceInfo:
        fields = json.loads(text)
        return cls(**{**fields, "max_groups": tuple(fields["max_groups"])})


@dataclass(frozen=True)
class Listing:
    """The devices, and why there are none ("" where nothing went wrong)."""

    devices: tuple[DeviceInfo, ...]
    trouble: str


def list_devices() -> Listing:
    """Ask the loader in a child process: a driver that crashes takes only that along."""
    return read_listing(run_child([sys.executable, "-c", LIST.format(root=ROOT)]))


def read_listing(child: Child) -> Listing:
    """What the child printed: one line of JSON for each device. A card seen through two drivers counts once."""
    if child.trouble:
        return Listing((), f"no Vulkan device: asking for one, {child.trouble}")
    devices: list[DeviceInfo] = []
    trouble = "there is none"
    for line in child.output.splitlines():
        if line.startswith('{"trouble"'):
            trouble = json.loads(line)["trouble"]
        elif line.startswith("{"):
            device = DeviceInfo.from_json(line)
            if not device.pci or device.pci not in [d.pci for d in devices]:
                devices.append(device)
    return Listing(tuple(devices), "" if devices else f"no Vulkan device: {trouble}")


def choose(listing: Listing, wanted: str) -> DeviceInfo | None:
    """The device meant by ``auto``, an index, a UUID or a part of a name.

    ``auto``: a discrete one before an integrated or virtual one, never a CPU driver; None where there is none.
    Errors: UsageError for a device that isn't there, with those that are.
    """
    if wanted == "auto":
        order = ("discrete GPU", "integrated GPU", "virtual GPU")
        usable = [d for d in listing.devices if d.kind in order]
        return min(usable, key=lambda d: order.index(d.kind), default=None)
    if wanted.isdecimal():
        found = [d for d in listing.devices if d.index == int(wanted)]
    else:
        low = wanted.lower()
        found = [d for d in listing.devices if low == d.uuid] or [d for d in listing.devices if low in d.name.lower()]
    if found:
        return found[0]
    there = "; ".join(d.describe() for d in listing.devices) or listing.trouble
    raise UsageError(f"--device {wanted}: no such Vulkan device ({there})")


def explain(listing: Listing, wanted: str) -> str:
    """Which device ``--device wanted`` takes and why, for a person. Errors: UsageError as for ``choose``."""
    chosen = choose(listing, wanted)
    if chosen is None:
        return f"--device {wanted} takes none: {listing.trouble or 'there is no GPU, and a CPU driver must be named'}"
    if wanted != "auto":
        return f"--device {wanted} takes {chosen.describe()}"
    same = sum(device.kind == chosen.kind for device in listing.devices)
    which = f"the first of {same} of this kind" if same > 1 else "the only one of this kind"
    before = "" if chosen.kind == "discrete GPU" else ", and there is no discrete GPU"
    return f"--device auto takes {chosen.describe()}: {which}{before}"
