"""From the settings to a device's use, or to none with the reason: which device, what is to live there, its start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from mimo_vk.config import Config
from mimo_vk.machine import memory_available
from mimo_vk.settings import GB, Settings
from mimo_vk.vulkan.arena import BULK_WORDS, TierShape
from mimo_vk.vulkan.client import DeviceClient, TierGone
from mimo_vk.vulkan.dense_device import DenseDevice
from mimo_vk.vulkan.dense_layout import DenseLayout, DenseShape
from mimo_vk.vulkan.dense_plan import describe, device_bytes, fit_dense, wants_dense
from mimo_vk.vulkan.listing import DeviceInfo, choose, list_devices
from mimo_vk.vulkan.subnormals import flushes
from mimo_vk.vulkan.tier import Tier
from mimo_vk.weight_check import Progress
from mimo_vk.weights import Weights

MARGIN = 0.1  # of the heap, left to the driver and to other programs
LEAST_MARGIN = 256_000_000
SHARED_PART = 0.25  # of the available memory, where a device shares it and no --tier-gb is given
MOST_PAIRS = 512  # in one step: larger blocks take several
STAGING = 4  # experts on their way at once
NO_DENSE = "it takes subnormal floats for zero, so dense layers stay on the CPU"
PROCESS_BYTES = 150_000_000  # the device process itself, with a driver that compiles


@dataclass(frozen=True)
class DevicePlan:
    """What is to live on a device: ``slots`` experts, and the dense layers of a shape (None: dense runs on the CPU)."""

    info: DeviceInfo
    shape: TierShape
    slots: int
    layers: int  # that the model has
    dense: DenseShape | None = None

    @property
    def nbytes(self) -> int:
        """Of the tier."""
        return self.slots * self.shape.layout.slot_bytes

    @property
    def dense_bytes(self) -> int:
        """Of the dense layers."""
        return device_bytes(DenseLayout(self.dense)) if self.dense else 0

    @property
    def ram_bytes(self) -> int:
        """Of the machine's memory: what lives there too where the device shares it."""
        on_their_way = 8 * BULK_WORDS if self.dense else 0
        return PROCESS_BYTES + on_their_way + (self.nbytes + self.dense_bytes if self.info.shares_memory else 0)

    def describe(self) -> str:
        """For a person."""
        parts = [f"device {self.info.describe()}"]
        if self.dense:
            parts.append(describe(DenseLayout(self.dense), self.layers))
        if self.slots:
            parts.append(f"room for {self.slots} experts ({self.nbytes / GB:.3f} GB)")
        return "; ".join(parts)

    def start(self) -> DeviceClient:
        """Start the device process; ``wait_ready`` before it is used."""
        return DeviceClient(self.info, self.shape, self.slots, self.dense)


@dataclass
class OnDevice:
    """What lives on the device of a running engine."""

    tier: Tier | None = None
    dense: DenseDevice | None = None


def plan_device(settings: Settings, config: Config, ctx: int, chunk: int) -> tuple[DevicePlan | None, str]:
    """The device's use that the settings ask for, and a line about it; None for none, the line then says why, or is "".

    Nothing of Vulkan is loaded with --cpu. Errors: UsageError for a device that isn't one of those there are.
    """
    experts = sum(spec.moe for spec in config.layers) * config.n_routed_experts
    tier = settings.tier_gb != 0 and experts > 0
    if settings.cpu or not (tier or settings.dense != "cpu"):
        return None, ""
    listing = list_devices()
    if not listing.devices:
        return None, f"{listing.trouble}; running on the CPU"
    info = choose(listing, settings.device)
    if info is None:  # only a CPU driver, and nobody asked for it
        why = "no GPU for --dense device (--device takes a CPU driver by name); running on the CPU"
        return None, why if settings.dense == "device" else ""
    if not tier and not wants_dense(settings, info):
        return None, ""
    if find_spec("kp") is None:
        return None, unused(info, "kp is not installed (make setup builds it)")
    rows = max(1, min(chunk, MOST_PAIRS // config.num_experts_per_tok))
    shape = TierShape(config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok, rows, STAGING)
    plan, room = DevicePlan(info, shape, 0, len(config.layers)), room_on(info)
    if not wants_dense(settings, info):
        return fit_tier(plan, settings.tier_gb, experts, room)
    if flushes(info):
        if not tier:
            return None, unused(info, NO_DENSE)
        with_tier, line = fit_tier(plan, settings.tier_gb, experts, room)
        return with_tier, f"{line}; {NO_DENSE}"
    kept = int((settings.tier_gb or 0) * GB)  # for the experts that were asked for by size
    dense = fit_dense(info, config, settings, ctx, chunk, room - kept)
    plan = replace(plan, dense=dense if dense.layers or dense.head else None)
    return fit_tier(plan, settings.tier_gb, experts, room - plan.dense_bytes)


def unused(info: DeviceInfo, why: str) -> str:
    """The line about a device that can't be used."""
    return f"device {info.describe()} is not used: {why}; running on the CPU"


def room_on(info: DeviceInfo) -> int:
    """Bytes of a device's memory that we may use."""
    return max(0, info.free_bytes - max(LEAST_MARGIN, int(MARGIN * info.heap_bytes)))


def fit_tier(plan: DevicePlan, tier_gb: float | None, experts: int, room: int) -> tuple[DevicePlan | None, str]:
    """As many slots as were asked for, as ``room`` bytes have place for, and as there are experts; the line says which.

    None where neither an expert nor a layer is to live on the device.
    """
    info, slot_bytes = plan.info, plan.shape.layout.slot_bytes
    if tier_gb is not None:
        wanted = int(tier_gb * GB)
    else:
        wanted = min(room, int(SHARED_PART * memory_available())) if info.shares_memory else room
    slots = 0 if slot_bytes > info.max_buffer else min(max(0, min(wanted, room)) // slot_bytes, experts)
    plan = replace(plan, slots=slots)
    if not slots and not plan.dense:
        return None, unused(info, f"there is no room for one expert of {slot_bytes} bytes")
    line = plan.describe()
    if tier_gb is not None and wanted > room:
        line += f", less than the {tier_gb:g} GB asked for: {max(0, room) / GB:.3f} GB are left on the device"
    return plan, line


def open_device(
    client: DeviceClient, plan: DevicePlan, weights: Weights, rate: int, notices: list[str], progress: Progress | None
) -> OnDevice:
    """What lives on the device, once its process is ready and has the dense weights.

    Nothing, with a notice, where the device can't be used.
    """
    config = weights.config
    try:
        client.wait_ready()
        dense = open_dense(client, plan, notices)
        if dense is not None:
            dense.send(weights, progress)
    except TierGone as error:
        notices[:] = [unused(client.info, str(error))]
        return OnDevice()
    experts = {spec.index: config.n_routed_experts for spec in config.layers if spec.moe}
    return OnDevice(Tier(client, experts, rate) if client.slots else None, dense)


def open_dense(client: DeviceClient, plan: DevicePlan, notices: list[str]) -> DenseDevice | None:
    """The dense layers for which the device process found room."""
    if plan.dense is None:
        return None
    layers, head, tower = client.answer("ready")[2:]
    kept = tuple(spec for spec in plan.dense.layers if spec.index in layers)
    shape = replace(plan.dense, layers=kept, head=head, tower=plan.dense.tower if tower else None)
    if shape != plan.dense:
        layout = DenseLayout(shape)
        notices.append(f"the device has room for {describe(layout, plan.layers)} only")
    return DenseDevice(client, DenseLayout(shape)) if layers or head else None
