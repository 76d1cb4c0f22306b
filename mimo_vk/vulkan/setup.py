"""From the settings to a tier, or to none with the reason: which device, how many experts, how it is started."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from mimo_vk.config import Config
from mimo_vk.errors import UsageError
from mimo_vk.machine import memory_available
from mimo_vk.settings import GB, Settings
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.client import DeviceClient, TierGone
from mimo_vk.vulkan.layout import SlotLayout
from mimo_vk.vulkan.listing import DeviceInfo, choose, list_devices
from mimo_vk.vulkan.tier import Tier

MARGIN = 0.1  # of the heap, left to the driver and to other programs
LEAST_MARGIN = 256_000_000
SHARED_PART = 0.25  # of the available memory, where a device shares it and no --tier-gb is given
MOST_PAIRS = 512  # in one step: larger blocks take several
STAGING = 4  # experts on their way at once
PROCESS_BYTES = 150_000_000  # the device process itself, with a driver that compiles


@dataclass(frozen=True)
class TierPlan:
    """A tier to be made: the device, the sizes, and what it takes of the machine's own memory."""

    info: DeviceInfo
    shape: TierShape
    slots: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.shape.layout.slot_bytes

    @property
    def ram_bytes(self) -> int:
        """Of the machine's memory: the slots too where the device shares it."""
        return PROCESS_BYTES + (self.nbytes if self.info.shares_memory else 0)

    def describe(self) -> str:
        """For a person."""
        return f"device {self.info.describe()}; room for {self.slots} experts ({self.nbytes / GB:.3f} GB)"

    def start(self) -> DeviceClient:
        """Start the device process; ``wait_ready`` before it is used."""
        return DeviceClient(self.info, self.shape, self.slots)


def refuse_dense(settings: Settings) -> None:
    """UsageError for what this version can't do."""
    if settings.dense == "device":
        raise UsageError("--dense device: not in this version, dense products run on the CPU (--dense cpu)")


def plan_tier(settings: Settings, config: Config, chunk: int) -> tuple[TierPlan | None, str]:
    """The tier that the settings ask for, and a line about it; None for no tier, the line then says why, or is "".

    Nothing of Vulkan is loaded with --cpu. Errors: UsageError for a device that isn't one of those there are.
    """
    layers = sum(spec.moe for spec in config.layers)
    if settings.cpu or settings.tier_gb == 0 or not layers:
        return None, ""
    listing = list_devices()
    if not listing.devices:
        return None, f"{listing.trouble}; running on the CPU"
    info = choose(listing, settings.device)
    if info is None:
        return None, ""  # only a CPU driver, and nobody asked for it
    if find_spec("kp") is None:
        return None, unused(info, "kp is not installed (make setup builds it)")
    rows = max(1, min(chunk, MOST_PAIRS // config.num_experts_per_tok))
    shape = TierShape(config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok, rows, STAGING)
    plan, line = fit_tier(info, shape, settings.tier_gb, layers * config.n_routed_experts)
    return plan, line


def unused(info: DeviceInfo, why: str) -> str:
    """The line about a device that can't be used."""
    return f"device {info.describe()} is not used: {why}; running on the CPU"


def fit_tier(info: DeviceInfo, shape: TierShape, tier_gb: float | None, experts: int) -> tuple[TierPlan | None, str]:
    """As many slots as were asked for, as there is room for, and as there are experts; the line says which."""
    layout: SlotLayout = shape.layout
    room = max(0, info.free_bytes - max(LEAST_MARGIN, int(MARGIN * info.heap_bytes)))
    if tier_gb is not None:
        wanted = int(tier_gb * GB)
    else:
        wanted = min(room, int(SHARED_PART * memory_available())) if info.shares_memory else room
    slots = min(wanted, room) // layout.slot_bytes
    if layout.slot_bytes > info.max_buffer:
        slots = 0
    if slots == 0:
        return None, unused(info, f"there is no room for one expert of {layout.slot_bytes} bytes")
    plan = TierPlan(info, shape, min(slots, experts))
    line = plan.describe()
    if tier_gb is not None and wanted > room:
        line += f", less than the {tier_gb:g} GB asked for: {room / GB:.3f} GB are left on the device"
    return plan, line


def open_tier(client: DeviceClient, config: Config, rate: int, notices: list[str]) -> Tier | None:
    """The tier over a device process, once that is ready; None, with a notice, where the device can't be used."""
    try:
        client.wait_ready()
    except TierGone as error:
        notices[:] = [unused(client.info, str(error))]
        return None
    return Tier(client, {spec.index: config.n_routed_experts for spec in config.layers if spec.moe}, rate)
