"""The one registry of settings: each shared flag, its variable and range. No other file reads the environment."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo_vk.errors import UsageError
from mimo_vk.machine import physical_cores

if TYPE_CHECKING:
    from mimo_vk.ops import SinkReading  # it brings numpy along, which --help does without

GB = 1e9  # the unit of --ram and --tier-gb, in bytes
PIN_SLOTS = 4


@dataclass(frozen=True)
class Settings:
    """What the shared flags and the MIMO_ variables ask for. Sizes named in GB are in units of 1e9 bytes."""

    model: Path | None = None  # None: the small model that ships with the project
    dirs: tuple[Path, ...] = ()
    cap: int | None = None
    ram: float | None = None
    ctx: int = 8192
    chunk: int = 64
    dense_bits: int = 0
    device: str = "auto"
    cpu: bool = False
    dense: str = "auto"
    tier_gb: float | None = None  # None: what the device has left, less a margin
    tier_rate: int = 8
    threads: int = 1
    read_threads: int = 8
    direct: bool = True
    pin_slots: int = PIN_SLOTS
    max_image_tokens: int | None = None  # None: what the checkpoint's own limits allow
    temperature: float | None = None  # None: each command's own default
    top_p: float | None = None
    seed: int | None = None
    think: bool = False
    log_level: str = "warning"
    backend: str = "auto"
    vision_sink: SinkReading = "key0"
    api_key: str | None = field(default=None, repr=False)
    log_prompts: bool = False
    serving: bool = False  # said by `serve`, not by a person: its own process has a share of the memory


@dataclass(frozen=True)
class Row:
    """One setting: its field in Settings, its flag and variable (None where it has none), and how its text is read."""

    field: str
    flag: str | None
    variable: str | None
    parse: Callable[[str], Any]
    metavar: str | None  # None: a flag that takes no value
    help: str


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """A reader of whole numbers from low to high, both included."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A reader of finite numbers from low to high; ``above`` leaves low itself out."""
    span = f"{'above' if above else 'of at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high and not (above and value == low)):
            raise ValueError(f"a number {span}")
        return value

    return parse


def choice(*values: str) -> Callable[[str], str]:
    """A reader of one of a few words."""

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError("one of " + ", ".join(values))
        return text

    return parse


def switch(text: str) -> bool:
    """Read 1 or 0 (also true, false, yes, no, on, off)."""
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError("1 or 0")
    return known[text.lower()]


def bits(text: str) -> int:
    """Read a width for the dense weights."""
    return int(choice("0", "8", "32")(text))


def words(text: str) -> str:
    """Read any text that isn't blank."""
    if not text.strip():
        raise ValueError("a name")
    return text


def paths(text: str) -> tuple[Path, ...]:
    """Read directories separated by colons."""
    return tuple(Path(part).expanduser() for part in text.split(":") if part)


def path(text: str) -> Path:
    """Read one directory."""
    if not text.strip():
        raise ValueError("a directory")
    return Path(text).expanduser()


THREADS = whole(1, 1024)
# fmt: off
SHARED: tuple[Row, ...] = (
    Row("model", "--model", "MIMO_MODEL", path, "DIR",
        "the checkpoint (the small model that ships with the project)"),
    Row("dirs", "--dirs", "MIMO_DIRS", paths, "A:B",
        "more directories that hold shards"),
    Row("cap", "--cap", "MIMO_CAP", whole(1), "N",
        "experts cached per layer, never below one routing step (what --ram allows)"),
    Row("ram", "--ram", None, number(0, above=True), "GB",
        "memory to stay under, in 1e9 bytes (70%% of what is available)"),
    Row("ctx", "--ctx", "MIMO_CTX", whole(1), "N",
        "tokens of context (8192), capped by the checkpoint"),
    Row("chunk", "--chunk", "MIMO_CHUNK", whole(1), "N",
        "prompt tokens read as one block (64)"),
    Row("dense_bits", "--dense-bits", "MIMO_DENSE_BITS", bits, "0|8|32",
        "dense weights as stored (0), as int8 or as float32"),
    Row("device", "--device", "MIMO_DEVICE", words, "auto|cpu|N|NAME",
        "the Vulkan device (auto)"),
    Row("cpu", "--cpu", None, switch, None,
        "no Vulkan at all: the driver isn't even loaded"),
    Row("dense", "--dense", "MIMO_VK_DENSE", choice("auto", "cpu", "device"), "auto|cpu|device",
        "where dense products run (auto: on a discrete device)"),
    Row("tier_gb", "--tier-gb", "MIMO_VK_TIER_GB", number(0), "X",
        "GB of experts held on the device (what it has left, less a margin)"),
    Row("tier_rate", "--tier-rate", "MIMO_VK_TIER_RATE", whole(0), "N",
        "experts sent to the device per token at most (8)"),
    Row("threads", "--threads", "MIMO_THREADS", THREADS, "N",
        "threads that compute (the physical cores)"),
    Row("read_threads", "--read-threads", "MIMO_READ_THREADS", THREADS, "N",
        "threads that read from disk (8)"),
    Row("direct", "--no-direct", "MIMO_DIRECT", switch, None,
        "buffered reads instead of O_DIRECT"),
    Row("temperature", "--temperature", None, number(0, 100), "X",
        "sampling temperature; 0 always takes the likeliest token"),
    Row("top_p", "--top-p", None, number(0, 1, above=True), "P",
        "sample among the likeliest tokens that add up to P"),
    Row("seed", "--seed", None, whole(0, 2**63 - 1), "N",
        "the same seed gives the same text"),
    Row("think", "--think", None, switch, None,
        "let the model think before it answers"),
    Row("log_level", "--log-level", "MIMO_LOG", choice("error", "warning", "info", "debug"), "LEVEL",
        "error, warning, info or debug (warning)"),
    Row("backend", None, "MIMO_BACKEND", choice("auto", "numpy", "numba"), "NAME",
        "the CPU backend; every one returns the same bytes"),
    Row("vision_sink", None, "MIMO_VISION_SINK", choice("key0", "denominator"), "READING",
        "what the vision tower's sinks are added to: the first key's score (key0) or the softmax's denominator"),
    Row("pin_slots", None, "MIMO_PIN_SLOTS", whole(1, 1024), "N",
        "snapshots kept at most (4)"),
    Row("max_image_tokens", None, "MIMO_MAX_IMAGE_TOKENS", whole(1), "N",
        "tokens that one picture may cost: larger ones are scaled down (what the checkpoint allows)"),
    Row("api_key", None, "MIMO_API_KEY", words, "KEY",
        "the key that requests to the server must bring"),
    Row("log_prompts", None, "MIMO_LOG_PROMPTS", switch, None,
        "the server's log holds the text of what it is asked"),
)
# fmt: on


def read(row: Row, text: str, name: str) -> Any:
    """Parse a setting's text; the UsageError names the flag or the variable that it came from."""
    try:
        return row.parse(text)
    except ValueError as error:
        raise UsageError(f"{name}: expected {error}, found {text!r}") from None


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> tuple[Settings, list[str]]:
    """Flags (by field: the text given, True for a bare flag, None for absent) and variables to Settings and warnings.

    A flag beats its variable, and an empty variable counts as absent. Errors: UsageError, one line for each bad value.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {"threads": physical_cores()}
    problems: list[str] = []
    for row in SHARED:
        given, variable = flags.get(row.field), environ.get(row.variable or "", "")
        try:
            if given is True:
                values[row.field] = not row.flag or not row.flag.startswith("--no-")
            elif given not in (None, False):
                values[row.field] = read(row, str(given), row.flag or "--" + row.field.replace("_", "-"))
            elif row.variable and variable:
                values[row.field] = read(row, variable, row.variable)
        except UsageError as error:
            problems.append(str(error))
    if flags.get("cpu") is True and flags.get("device") not in (None, "cpu"):
        problems.append(f"--cpu and --device {flags['device']}: only one of them can be meant")
    if flags.get("cpu") is True and flags.get("dense") == "device":
        problems.append("--cpu and --dense device: only one of them can be meant")
    if problems:
        raise UsageError("\n".join(problems))
    values["cpu"] = values.get("cpu", False) or values.get("device") == "cpu"
    if values["cpu"]:
        values["device"] = "cpu"
    return Settings(**values), unknown_variables(environ)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each MIMO_ variable that nothing reads, with the name that was probably meant."""
    known = [row.variable for row in SHARED if row.variable]
    warnings = []
    for name in sorted(environ):
        if name.startswith("MIMO_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            warnings.append(f"unknown variable {name} is ignored" + (f"; {close[0]} was meant?" if close else ""))
    return warnings


def validation_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the Vulkan loader is told to switch the Khronos validation layer on."""
    environ = os.environ if environ is None else environ
    names = environ.get("VK_INSTANCE_LAYERS", "") + ":" + environ.get("VK_LOADER_LAYERS_ENABLE", "")
    return "VK_LAYER_KHRONOS_validation" in names.replace("*validation*", "VK_LAYER_KHRONOS_validation")
