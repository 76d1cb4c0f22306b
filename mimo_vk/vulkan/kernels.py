"""A typed row per shader: bindings and push constants in order, group size. A test holds each to its GLSL."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class Kernel:
    """What the host must know of ``shaders/NAME.comp``. Push constants are all uint32."""

    name: str
    bindings: tuple[str, ...]
    push: tuple[str, ...]
    local_size: int = 32
    constants: tuple[str, ...] = ()  # specialization constants, uint32, ids from 0


GATE_UP = Kernel(
    "expert_gate_up_mxfp4",
    ("Table", "X", "Codes", "Scales", "Act"),
    ("rounds", "tiles", "act_rounds", "slot_stride", "gate_codes", "up_codes", "gate_scales", "up_scales"),
    constants=("SELECT_DECODE", "SHARE_LOADS"),
)
DOWN = Kernel(
    "expert_down_mxfp4",
    ("Table", "Act", "Codes", "Scales", "Y"),
    ("rounds", "tiles", "slot_stride", "down_codes", "down_scales"),
    constants=("SELECT_DECODE", "SHARE_LOADS"),
)
COPY = Kernel("copy_items", ("Place", "Source", "Slab"), ("count",))
PROBE = Kernel("probe", ("A", "B", "C", "Results"), ("n",))
KERNELS = (GATE_UP, DOWN, COPY, PROBE)


def shader_folder() -> Path:
    """``shaders`` of an installed package, or of the tree."""
    installed = HERE.parents[1] / "shaders"
    return installed if installed.is_dir() else HERE.parents[2] / "shaders"


def spirv(kernel: Kernel, denorm_preserve: bool) -> bytes:
    """The compiled shader; the second build, for devices that report it, also declares that subnormals are kept."""
    suffix = ".denorm.spv" if denorm_preserve else ".spv"
    return (shader_folder() / (kernel.name + suffix)).read_bytes()


def source_files(name: str) -> list[Path]:
    """A shader's source and what it includes, each once, in the order first met."""
    folder = shader_folder()
    found = [folder / f"{name}.comp"]
    for path in found:  # grows while it is walked
        for include in re.findall(r'^#include "(.+)"', path.read_text(), flags=re.MULTILINE):
            if folder / "include" / include not in found:
                found.append(folder / "include" / include)
    return found


def source_hash(name: str) -> str:
    """SHA-256 over a shader's sources, as ``make shaders`` writes it to ``shaders/hashes.txt``."""
    digest = hashlib.sha256()
    for path in source_files(name):
        digest.update(path.read_bytes())
    return digest.hexdigest()
