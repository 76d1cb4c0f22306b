"""config.json's vision_config: the picture tower's numbers.

What no key says is what the release's own code has for it: the tower's heads are ``qk_channels`` wide, 64 where the
key is missing (and not hidden_size/num_heads); the angles' base is 10000; its norms add 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mimo_vk.config_fields import Fields
from mimo_vk.ops import QkvLayout

FULL, ROWS, COLUMNS = -1, 0, 1  # kinds of block: full attention, or a window in the order of rows or of columns
HEAD_DIM = 64
ROPE_THETA = 10000.0
NORM_EPS = 1e-6
MOST_BLOCKS = 1000

IGNORED: dict[str, str] = {
    "window_size": "windows of pixels belong to the tower that this one comes from; ours count patches",
    "tokens_per_second": "video isn't supported",
    "model_type": "the text model's model_type decides",
    "initializer_range": "training only",
    "dtype": "each tensor's header names its own dtype",
    "torch_dtype": "each tensor's header names its own dtype",
    "transformers_version": "the writer's version",
}


@dataclass(frozen=True)
class VisionConfig:
    """The tower. ``block_types`` has one of FULL, ROWS and COLUMNS per block; ``reach``: keys seen to either side."""

    hidden_size: int
    intermediate_size: int
    out_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    reach: int
    block_types: tuple[int, ...]
    has_sinks: bool  # in the blocks with a window
    rope_theta: float = ROPE_THETA
    norm_eps: float = NORM_EPS

    @property
    def merge_unit(self) -> int:
        """Patches that become one token."""
        return self.merge_size**2

    @property
    def patch_values(self) -> int:
        """Numbers in a patch: channels, times, rows and columns."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def layout(self) -> QkvLayout:
        return QkvLayout(1, self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def sinks_in(self, block: int) -> bool:
        return self.has_sinks and self.block_types[block] != FULL


def read_vision_config(config: Fields, hidden_size: int) -> tuple[VisionConfig | None, list[str]]:
    """The tower in config.json, if it has one, and a warning per unknown key; faults go to ``config``."""
    if config.take("vision_config") is None:
        return None, []
    f = config.inner("vision_config", "an object or null")
    if f is None:
        return None, []
    f.fixed({"hidden_act": "silu"})
    heads, kv = f.integer("num_heads"), f.integer("num_key_value_heads")
    if heads % kv and "num_key_value_heads" not in f.faulty:
        f.fault("num_heads", f"a multiple of num_key_value_heads ({kv})")
    patch, depth = f.integer("patch_size"), f.integer("depth")
    _repeats(f, "num_query_groups", heads // kv, "num_heads / num_key_value_heads")
    _repeats(f, "spatial_patch_size", patch, "patch_size")
    types = _block_types(f, depth)
    tower = VisionConfig(
        hidden_size=f.integer("hidden_size"),
        intermediate_size=f.integer("intermediate_size"),
        out_hidden_size=f.integer("out_hidden_size"),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=_head_dim(f),
        channels=f.integer("in_chans"),
        patch_size=patch,
        temporal_patch_size=f.integer("temporal_patch_size"),
        merge_size=f.integer("spatial_merge_size"),
        reach=f.integer("visual_token_window_size", 0),
        block_types=types,
        has_sinks=f.boolean("use_sink"),
    )
    if tower.out_hidden_size != hidden_size and "hidden_size" not in config.faulty:
        f.fault("out_hidden_size", f"hidden_size of the text model ({hidden_size})")
    return tower, f.unknown(IGNORED)


def _head_dim(f: Fields) -> int:
    if f.take("qk_channels") is None:
        return HEAD_DIM
    value = f.integer("qk_channels")
    if value % 4:
        f.fault("qk_channels", "a multiple of 4: pairs of angles for rows and for columns")
    return value


def _repeats(f: Fields, key: str, expected: int, what: str) -> None:
    """A key that may be left out, and otherwise only says again what others say."""
    if f.take(key) is not None and f.integer(key) != expected:
        f.fault(key, f"{what} ({expected})")


def _block_types(f: Fields, depth: int) -> tuple[int, ...]:
    if depth > MOST_BLOCKS:  # before a list of that length is made
        f.fault("depth", f"at most {MOST_BLOCKS}")
        depth = 1
    types: Any = f.take("vit_window_attn_types")
    known = (FULL, ROWS, COLUMNS)
    if not isinstance(types, list) or any(type(v) is not int or v not in known for v in types):
        f.fault("vit_window_attn_types", "a list with -1, 0 or 1 for each block")
    elif len(types) != depth:
        f.fault("vit_window_attn_types", f"{depth} entries (depth), not {len(types)}")
    else:
        full = [block for block, kind in enumerate(types) if kind == FULL]
        if f.take("fullatt_block_indexes") != full:
            f.fault("fullatt_block_indexes", f"the blocks whose vit_window_attn_types is -1 ({full})")
        return tuple(types)
    f.take("fullatt_block_indexes")
    return (FULL,) * depth
