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
    constants=("SELECT_DECODE", "SHARE_LOADS", "FLUSHES"),
)
DOWN = Kernel(
    "expert_down_mxfp4",
    ("Table", "Act", "Codes", "Scales", "Y"),
    ("rounds", "tiles", "slot_stride", "down_codes", "down_scales"),
    constants=("SELECT_DECODE", "SHARE_LOADS", "FLUSHES"),
)
COPY = Kernel("copy_items", ("Place", "Source", "Slab"), ("count",))
FILL = Kernel("fill_words", ("Place", "Source", "Slab"), (), 64)
PROBE = Kernel("probe", ("A", "B", "C", "Results"), ("n",))

# The dense path. Binding 0 is Step, uint32 [rows, start, first, patches] in a ``host`` tensor; the group counts are
# free (every kernel loops), and what a push constant means stands in the shader. ``_bits`` are a float32's.
_LINEAR_PUSH = ("n", "items", "x_stride", "w_at", "y_stride", "y_at")
_TILE = ("ROWS", "OUTPUTS")
LINEAR_F32 = Kernel("linear_f32", ("Step", "X", "W", "Y"), _LINEAR_PUSH, 64, _TILE)
LINEAR_BF16 = Kernel("linear_bf16", ("Step", "X", "W", "Y"), _LINEAR_PUSH, 64, _TILE)
LINEAR_INT8 = Kernel("linear_int8", ("Step", "X", "W", "S", "Y"), (*_LINEAR_PUSH, "s_at"), 64, _TILE)
LINEAR_FP8 = Kernel(
    "linear_fp8", ("Step", "X", "W", "S", "Y"), (*_LINEAR_PUSH, "s_at", "blocks"), 64, (*_TILE, "SELECT_DECODE")
)
RMS_NORM = Kernel(
    "rms_norm", ("Step", "X", "Slab", "Y"), ("width", "stride", "w_at", "eps_bits", "inverse_width_bits"), 32
)
ADD = Kernel("add", ("Step", "A", "B", "Y"), ("width", "stride"), 64)
SWIGLU = Kernel("swiglu", ("Step", "Gate", "Up", "Y"), ("width", "in_stride", "gate_at", "up_at", "y_stride"), 64)
WEIGHTED_SUM = Kernel("weighted_sum", ("Step", "Y", "Weights", "Total"), ("width", "stride", "choices"), 64)
EMBED = Kernel("embed", ("Step", "Ids", "Table", "Y"), ("width", "stride", "items", "w_at", "first_id", "count"), 64)
SPLIT_ROPE = Kernel(
    "split_rope",
    ("Step", "Qkv", "Tables", "Q", "K", "V"),
    ("stride", "chunks", "heads", "kv_heads", "head_dim", "v_dim", "turned", "value_scale_bits"),
    64,
)
KV_APPEND = Kernel(
    "kv_append",
    ("Step", "K", "V", "Keys", "Values"),
    ("kv_heads", "head_dim", "v_dim", "cache_rows", "keys_at", "values_at"),
    64,
)
COPY_RING = Kernel(
    "copy_ring",
    ("Step", "From", "To"),
    ("kv_heads", "width", "window", "from_rows", "from_at", "to_rows", "to_at"),
    64,
)
ATTENTION = Kernel(
    "attention",
    ("Step", "Q", "K", "V", "Keys", "Values", "Slab", "Out"),
    ("heads", "kv_heads", "head_dim", "v_dim", "out_stride", "window", "cache_rows", "keys_at", "values_at", "has_sink",
     "sinks_at", "scale_bits"),
    128,
    ("HEADS", "STEPS"),
)  # fmt: skip
# ATTENTION in three steps with 8 groups in z for each of its groups: for few rows over many positions.
ATTENTION_MAX = Kernel(
    "attention_max",
    ("Step", "Q", "K", "Keys", "Maxima"),
    ("heads", "kv_heads", "head_dim", "window", "cache_rows", "keys_at", "scale_bits"),
    128,
    ("HEADS", "STEPS"),
)
ATTENTION_PART = Kernel(
    "attention_part",
    ("Step", "Q", "K", "V", "Keys", "Values", "Slab", "Maxima", "Sums"),
    ("heads", "kv_heads", "head_dim", "v_dim", "window", "cache_rows", "keys_at", "values_at", "has_sink", "sinks_at",
     "scale_bits"),
    128,
    ("HEADS", "STEPS"),
)  # fmt: skip
ATTENTION_JOIN = Kernel(
    "attention_join",
    ("Step", "Slab", "Maxima", "Sums", "Out"),
    ("heads", "v_dim", "out_stride", "has_sink", "sinks_at"),
    64,
)
ROUTE = Kernel(
    "route",
    ("Step", "Logits", "Slab", "Ids", "Weights"),
    ("experts", "stride", "chosen", "bias_at", "scaling_bits"),
    32,
)
# The picture tower's own; the last word of Step is the picture's patches.
ADD_ROW = Kernel("add_row", ("Step", "X", "Slab", "Y"), ("width", "stride", "row_at"), 64)
GELU = Kernel("gelu", ("Step", "X", "Y"), ("width", "stride"), 64)
LAYER_NORM = Kernel(
    "layer_norm",
    ("Step", "X", "Slab", "Y"),
    ("width", "unit", "x_stride", "y_stride", "w_at", "eps_bits", "inverse_width_bits"),
    32,
)
PATCH_ATTENTION = Kernel(
    "patch_attention",
    ("Step", "Q", "Keys", "Values", "Slab", "Out"),
    ("heads", "kv_heads", "head_dim", "v_dim", "out_stride", "reach", "cache_rows", "keys_at", "values_at", "has_sink",
     "key0", "sinks_at", "scale_bits"),
    128,
    ("HEADS", "STEPS"),
)  # fmt: skip
VISION = (ADD_ROW, GELU, LAYER_NORM, PATCH_ATTENTION)
DENSE = (
    LINEAR_F32, LINEAR_BF16, LINEAR_INT8, LINEAR_FP8, RMS_NORM, ADD, SWIGLU, WEIGHTED_SUM, EMBED, SPLIT_ROPE, KV_APPEND,
    COPY_RING, ATTENTION, ATTENTION_MAX, ATTENTION_PART, ATTENTION_JOIN, ROUTE,
)  # fmt: skip
KERNELS = (GATE_UP, DOWN, COPY, FILL, PROBE, *DENSE, *VISION)


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
