"""``mimo-vk doctor``: what this machine has, one line each: ``ok``, or ``--`` with what to do."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mimo_vk import machine, probe
from mimo_vk.disk_speed import measure
from mimo_vk.errors import CheckpointError, MimoError, UsageError
from mimo_vk.settings import GB, Settings, validation_requested

if TYPE_CHECKING:
    from mimo_vk.config import Config
    from mimo_vk.vulkan.listing import DeviceInfo

SHOWN_PROBLEMS = 20
ENOUGH = 64_000_000  # bytes that a disk's speed can be judged by


@dataclass(frozen=True)
class Finding:
    """One line. ``broken`` things make the exit status 1; a thing that can be done without is ``--`` and no more."""

    name: str
    ok: bool
    text: str
    broken: bool = False

    def __str__(self) -> str:
        return f"{'ok' if self.ok else '--'}  {self.name}: {self.text}"


def main(settings: Settings, args: argparse.Namespace) -> int:
    """Print each finding as it is made; 1 if something is broken."""
    broken = False
    for finding in findings(settings):
        print(finding, flush=True)
        broken |= finding.broken
    return int(broken)


def findings(settings: Settings) -> Iterator[Finding]:
    """All checks, in order."""
    yield check_python()
    yield check_numpy()
    yield check_numba()
    if settings.cpu:
        yield Finding("vulkan", True, "not looked at: --cpu")
    else:
        yield from check_vulkan(settings.device)
    yield check_cpu()
    yield check_memory()
    if settings.model is None:
        yield Finding("checkpoint", True, "not looked at: name one with --model DIR")
    else:
        yield from check_checkpoint(settings.model, settings)


def check_python() -> Finding:
    text = f"{platform.python_version()} ({sys.executable})"
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Finding("python", False, f"{text}: 3.11 to 3.14 is needed", broken=True)
    return Finding("python", True, text)


def check_numpy() -> Finding:
    try:
        version = str(importlib.import_module("numpy").__version__)
    except Exception as error:
        return Finding("numpy", False, f"{error} (make setup installs it)", broken=True)
    return Finding("numpy", True, version)


def check_numba() -> Finding:
    """Its version, and whether compiled code can be kept: else it is compiled at each start."""
    try:
        numba = importlib.import_module("numba")
    except Exception as error:  # a numba that doesn't fit numpy or llvmlite fails in many ways
        return Finding("numba", False, f"{error}: everything runs on numpy, several times slower (pip install numba)")
    places = cache_places(numba.config.CACHE_DIR)
    writable = next((place for place in places if can_write(place)), None)
    if writable is None:
        names = " nor ".join(map(str, places))
        return Finding(
            "numba", False, f"{numba.__version__}, but neither {names} can be written: it compiles at each start"
        )
    return Finding("numba", True, f"{numba.__version__}, compiled code is kept in {writable}")


def cache_places(configured: str) -> list[Path]:
    """Where numba may keep compiled code, first choice first."""
    if configured:
        return [Path(configured)]
    package = importlib.import_module("cpu_fallback")
    base = importlib.import_module("numba.misc.appdirs").AppDirs(appname="numba", appauthor=False)
    return [Path(str(package.__file__)).parent / "__pycache__", Path(base.user_cache_dir)]


def can_write(directory: Path) -> bool:
    """Whether the directory, or the nearest parent that exists, can be written."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def check_vulkan(wanted: str) -> Iterator[Finding]:
    """Devices, the validation layer, kp with one round trip, and whether the device that is meant can be used."""
    report = probe.vulkan()
    if report.trouble:
        yield Finding("vulkan", False, f"{report.trouble}; everything runs on the CPU")
    elif not report.devices:
        yield Finding(
            "vulkan", False, "no device or driver (sudo apt-get install -y mesa-vulkan-drivers); the CPU is used"
        )
    for device in report.devices:
        text = f"{device.index}: {device.name}, {device.kind}, Vulkan {device.api}, {device.driver}"
        yield Finding("vulkan", True, text)
    yield check_validation(report.validation_installed)
    kp = check_kp(report.devices)
    yield kp
    if report.devices:
        yield check_device(wanted, kp.ok)


def check_device(wanted: str, has_kp: bool) -> Finding:
    """Which device is taken and why, and that its arithmetic is the CPU's."""
    from mimo_vk.vulkan.listing import choose, explain, list_devices

    listing = list_devices()
    try:
        info, text = choose(listing, wanted), explain(listing, wanted)
    except UsageError as error:
        return Finding("device", False, str(error), broken=True)
    if info is None or not has_kp:
        return Finding("device", info is None, text if info is None else f"{text}; without kp it is not used")
    try:
        flushes = try_device(info)
    except MimoError as error:
        return Finding("device", False, f"{text}; it is not used: {error}")
    but = "; for dense layers it is not used, as it takes subnormal floats for zero" if flushes else ""
    return Finding("device", True, f"{text}; its results have the CPU's bits{but}")


def try_device(info: DeviceInfo) -> bool:
    """Start a device process as a model does, which checks the arithmetic; whether it takes subnormals for zero.

    Errors: TierGone.
    """
    from mimo_vk.vulkan.arena import TierShape
    from mimo_vk.vulkan.client import DeviceClient

    with DeviceClient(info, TierShape(32, 32, 1, 1, 1), 1) as client:
        client.wait_ready()
        return client.flushes


def check_validation(installed: bool) -> Finding:
    if not validation_requested():
        return Finding("validation layer", True, "off" + (" (installed)" if installed else ""))
    if not installed:
        return Finding("validation layer", False, "asked for, but not installed (vulkan-validationlayers)")
    return Finding("validation layer", True, "on: each step on the device is slower")


def check_kp(devices: tuple[probe.Device, ...]) -> Finding:
    version = probe.kp_version()
    if version.trouble:
        return Finding("kp", False, f"{version.trouble}: Vulkan is not used (make setup builds it)")
    name = f"{version.output.strip()} imports"
    if not devices:
        return Finding("kp", True, f"{name}; no device to try it on")
    trip = probe.kp_round_trip(devices[0].index)
    if trip.trouble:
        return Finding(
            "kp", False, f"{name}, but a round trip on device {devices[0].index} fails: {trip.trouble}", broken=True
        )
    return Finding("kp", True, f"{name}, a round trip on device {devices[0].index} is right")


def check_cpu() -> Finding:
    flags = machine.cpu_flags()
    wanted = (
        ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vbmi") if platform.machine() == "x86_64" else ("asimd",)
    )
    found = [flag for flag in wanted if flag in flags]
    text = f"{machine.cpu_name()}, cores to use: {machine.physical_cores()}, {' '.join(found) or 'no vector extension'}"
    if not found:
        return Finding("cpu", False, f"{text}: the kernels run, slowly")
    return Finding("cpu", True, text)


def check_memory() -> Finding:
    text = f"{machine.memory_total() / GB:.1f} GB, {machine.memory_available() / GB:.1f} GB available"
    limit = machine.cgroup_memory()
    return Finding("memory", True, text + (f", limited to {limit[0] / GB:.1f} GB by a cgroup" if limit else ""))


def check_checkpoint(model: Path, settings: Settings) -> Iterator[Finding]:
    """Completeness from config and headers alone, the files beside them, and the disk's speed."""
    # Here, not above: what they import may be what is broken, and the lines before this one then say so.
    from mimo_vk.checkpoint import Checkpoint
    from mimo_vk.config import load_config
    from mimo_vk.weights import check_names

    problems: list[str] = []
    try:
        config, warnings = load_config(model / "config.json")
    except CheckpointError as error:
        config, warnings, problems = None, [], list(error.problems)
    checkpoint = None
    try:
        checkpoint = Checkpoint.open(model, settings.dirs)
        if config is not None:
            check_names(checkpoint, config)
    except CheckpointError as error:
        problems += error.problems
    for problem in problems[:SHOWN_PROBLEMS]:
        yield Finding("checkpoint", False, problem, broken=True)
    if len(problems) > SHOWN_PROBLEMS:
        yield Finding("checkpoint", False, f"and {len(problems) - SHOWN_PROBLEMS} problems more", broken=True)
    for warning in warnings:
        yield Finding("checkpoint", False, warning)
    if config is not None and not settings.cpu:
        yield from check_placement(config, settings)
    if checkpoint is not None and not problems:
        size = sum(info.nbytes for info in checkpoint.tensors.values())
        counts = f"{len(checkpoint.tensors)} tensors in {len(checkpoint.files)} files"
        yield Finding("checkpoint", True, f"{model}: complete, {counts}, {amount(size)}")
    yield from check_text_files(model)
    if config is not None and config.vision is not None:
        yield from check_pictures(model, config, settings)
    if checkpoint is not None and checkpoint.files:
        yield check_disk(checkpoint.files, settings)


def check_placement(config: Config, settings: Settings) -> Iterator[Finding]:
    """What of the model is to live on the device; nothing where ``--device`` names none, which was said before."""
    from mimo_vk.vulkan.setup import plan_device

    ctx = min(settings.ctx, config.max_position_embeddings)
    try:
        plan, line = plan_device(settings, config, ctx, min(settings.chunk, ctx))
    except UsageError:
        return
    yield Finding("placement", plan is not None or not line, line or "everything runs on the CPU")


def check_text_files(model: Path) -> Iterator[Finding]:
    """The files that only text needs: without one token ids can still be run, with a broken one nothing starts."""
    from mimo_vk.chat_format import ChatTemplate
    from mimo_vk.config import load_generation_config
    from mimo_vk.tokenizer import Tokenizer

    if not model.is_dir():
        return
    if not (model / "tokenizer.json").exists():
        yield Finding("tokenizer", False, f"{model / 'tokenizer.json'} is missing: only run --ids works")
    else:
        yield from check_loading("tokenizer", lambda: Tokenizer.load(model))
    if not (model / "generation_config.json").exists():
        yield Finding(
            "generation", False, f"{model / 'generation_config.json'} is missing: config.json's stop ids are used"
        )
    yield from check_loading("generation", lambda: load_generation_config(model))
    if (model / "chat_template.jinja").exists():
        yield from check_loading("chat template", lambda: ChatTemplate.load(model))
    else:
        yield from check_loading("chat template", lambda: ChatTemplate.load(model), "chat is not possible")


def check_loading(name: str, load: Callable[[], object], without: str = "") -> Iterator[Finding]:
    """What keeps a file from being used. ``without``: what then doesn't work; "" where nothing does."""
    try:
        load()
    except CheckpointError as error:
        for problem in error.problems:
            yield Finding(name, False, f"{problem}: {without}" if without else problem, broken=not without)


def check_pictures(model: Path, config: Config, settings: Settings) -> Iterator[Finding]:
    """What pictures need beside the tower's tensors: without it text still runs."""
    from mimo_vk.pictures import load_tools

    try:
        load_tools(model, config, settings)
    except CheckpointError as error:
        for problem in error.problems:
            yield Finding("pictures", False, f"{problem}: no pictures can be read")


def check_disk(files: list[Path], settings: Settings) -> Finding:
    """Sequential reads from the largest shard."""
    largest = max(files, key=os.path.getsize)
    try:
        speed = measure(largest, settings.read_threads, settings.direct)
    except MimoError as error:
        return Finding("disk", False, str(error), broken=True)
    how = "O_DIRECT" if speed.direct else "buffered: O_DIRECT is off or refused, so the page cache may flatter it"
    what = f"{amount(speed.nbytes)} of {largest.name} by {settings.read_threads} readers"
    if speed.nbytes < ENOUGH:
        how += ", too little to judge by"
    return Finding("disk", True, f"{speed.gb_per_second:.2f} GB/s, {what} ({how})")


def amount(nbytes: int) -> str:
    """Bytes for a person."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB else f"{nbytes / 1e6:.1f} MB"
