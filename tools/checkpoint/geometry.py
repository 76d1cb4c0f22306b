"""The sizes of the checkpoints that can be made, and the config.json that goes with each."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).resolve().parents[1] / "data"
ENCODER_HEAD_DIM = 64  # of the picture tower: no key of config.json says so


@dataclass(frozen=True)
class Vision:
    """The picture tower; ``window_types`` has one entry per block, -1 for full attention."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    window_types: tuple[int, ...]

    @property
    def depth(self) -> int:
        return len(self.window_types)


@dataclass(frozen=True)
class Geometry:
    """One checkpoint. ``window[i]`` and ``moe[i]`` are layer i's entries of the two layer lists of config.json."""

    name: str
    contents: Literal["exact", "tiled", "sparse"]
    hidden: int
    intermediate: int
    moe_intermediate: int
    experts: int
    top_k: int
    window: tuple[int, ...]
    moe: tuple[int, ...]
    heads: int
    kv_heads: int
    window_kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab: int
    base_tokens: int  # ids below the control tokens
    eps: float
    value_scale: float
    max_positions: int
    ranks: int  # expert files are spread over ranks * shards
    shards: int = 1
    vision: Vision | None = None
    audio_tensors: int = 0
    encoders_apart: bool = False  # the picture and audio tensors in a file of their own

    @property
    def layers(self) -> int:
        return len(self.window)

    @property
    def chunks(self) -> int:
        """T: the number of slices that the fused qkv is stored in."""
        return self.kv_heads

    def kv_of(self, layer: int) -> int:
        return self.window_kv_heads if self.window[layer] else self.kv_heads

    def chunk_rows(self, layer: int) -> int:
        """Rows of one slice [Q | K | V] of layer ``layer``'s qkv_proj."""
        kv = self.kv_of(layer)
        total = self.heads * self.head_dim + kv * (self.head_dim + self.v_head_dim)
        return total // self.chunks


def _full_at(layers: int, full: set[int]) -> tuple[int, ...]:
    return tuple(int(layer not in full) for layer in range(layers))


# Six layers in an irregular order. With 16 heads of 24 and 2 chunks a full layer's slice has 232 rows: the restarted
# grid has 4 scale rows and so has one grid over all 464 rows, with different cells; a window layer's slice has 272
# rows: 6 against 5. The slice's own grid is the right one in both.
TINY = Geometry(
    name="tiny",
    contents="exact",
    hidden=256,
    intermediate=384,
    moe_intermediate=64,
    experts=16,
    top_k=4,
    window=(0, 1, 1, 0, 1, 0),
    moe=(0, 1, 1, 1, 1, 1),
    heads=16,
    kv_heads=2,
    window_kv_heads=4,
    head_dim=24,
    v_head_dim=16,
    vocab=600,
    base_tokens=520,
    eps=1e-3,
    value_scale=0.612,
    max_positions=4096,
    ranks=4,
    vision=Vision(hidden=64, intermediate=96, heads=4, kv_heads=2, window_types=(-1, 0, 1, -1)),
    audio_tensors=3,
)

_RELEASE_VISION = Vision(
    hidden=1280,
    intermediate=4608,
    heads=32,
    kv_heads=8,
    window_types=(-1,) + ((0,) * 4 + (1,) * 4 + (-1,)) * 3,
)

FLASH = Geometry(
    name="flash-sparse",
    contents="sparse",
    hidden=4096,
    intermediate=16384,
    moe_intermediate=2048,
    experts=256,
    top_k=8,
    window=_full_at(48, {0, 5, 11, 17, 23, 29, 35, 41, 47}),
    moe=(0,) + (1,) * 47,
    heads=64,
    kv_heads=4,
    window_kv_heads=8,
    head_dim=192,
    v_head_dim=128,
    vocab=152576,
    base_tokens=151643,
    eps=1e-6,
    value_scale=0.707,
    max_positions=1048576,
    ranks=64,
    vision=_RELEASE_VISION,
    audio_tensors=143,
)

PRO = replace(
    FLASH,
    name="pro-sparse",
    hidden=6144,
    experts=384,
    window=_full_at(70, {0, 7, 15, 23, 31, 39, 47, 55, 62, 69}),
    moe=(0,) + (1,) * 69,
    heads=128,
    kv_heads=8,
    eps=1e-5,
    value_scale=0.612,
    shards=2,
    encoders_apart=True,
)


def with_layers(geometry: Geometry, layers: int) -> Geometry:
    """The first ``layers`` layers of a geometry."""
    return replace(geometry, window=geometry.window[:layers], moe=geometry.moe[:layers])


def _slice(name: str, whole: Geometry) -> Geometry:
    cut = with_layers(whole, 3)
    return replace(cut, name=name, contents="tiled", ranks=8, shards=1, vision=None, audio_tensors=0)


GEOMETRIES: dict[str, tuple[Geometry, Geometry]] = {
    # name: (what is made by default, what --layers may cut from)
    "tiny": (TINY, TINY),
    "flash-slice": (
        _slice("flash-slice", FLASH),
        replace(_slice("flash-slice", FLASH), window=FLASH.window, moe=FLASH.moe),
    ),
    "pro-slice": (_slice("pro-slice", PRO), replace(_slice("pro-slice", PRO), window=PRO.window, moe=PRO.moe)),
    "flash-sparse": (FLASH, FLASH),
    "pro-sparse": (PRO, PRO),
}


def find_geometry(name: str, experts: int | None = None, layers: int | None = None) -> Geometry:
    """The geometry called ``name``, with another number of experts or its first ``layers`` layers.

    Raises ValueError, naming the value and its limits.
    """
    if name not in GEOMETRIES:
        raise ValueError(f"geometry {name!r}: expected one of {', '.join(GEOMETRIES)}")
    geometry, whole = GEOMETRIES[name]
    if layers is not None:
        if not 1 <= layers <= whole.layers:
            raise ValueError(f"layers {layers}: {name} has 1 to {whole.layers}")
        geometry = with_layers(whole, layers)
    if experts is not None:
        if not geometry.top_k <= experts <= geometry.experts:
            raise ValueError(f"experts {experts}: {name} has {geometry.top_k} to {geometry.experts}")
        geometry = replace(geometry, experts=experts)
    return geometry


def config_json(g: Geometry, control: dict[str, int]) -> dict[str, Any]:
    """config.json: the release's keys (``data/config.json``) with this geometry's numbers and token ids."""
    config: dict[str, Any] = json.loads((DATA / "config.json").read_text("utf-8"))
    config.update(
        attention_value_scale=g.value_scale,
        num_attention_heads=g.heads,
        swa_num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        swa_num_key_value_heads=g.window_kv_heads,
        head_dim=g.head_dim,
        swa_head_dim=g.head_dim,
        v_head_dim=g.v_head_dim,
        swa_v_head_dim=g.v_head_dim,
        hidden_size=g.hidden,
        intermediate_size=g.intermediate,
        moe_intermediate_size=g.moe_intermediate,
        n_routed_experts=g.experts,
        num_experts_per_tok=g.top_k,
        num_hidden_layers=g.layers,
        hybrid_layer_pattern=list(g.window),
        moe_layer_freq=list(g.moe),
        layernorm_epsilon=g.eps,
        max_position_embeddings=g.max_positions,
        vocab_size=g.vocab,
        eos_token_id=control["<|im_end|>"],
        pad_token_id=control["<|endoftext|>"],
        image_token_id=control["<|image_pad|>"],
        video_token_id=control["<|video_pad|>"],
        vision_start_token_id=control["<|vision_start|>"],
        vision_end_token_id=control["<|vision_end|>"],
    )
    config["quantization_config"]["ignored_layers"] = [
        *(f"model.layers.{layer}.self_attn.o_proj" for layer in range(g.layers)),
        "model.decoder.self_attn.o_proj",
    ]
    config["audio_config"]["out_hidden_size"] = g.hidden
    _set_processor_ids(config["processor_config"], control)
    _set_vision(config, g)
    return config


def _set_processor_ids(processor: dict[str, Any], control: dict[str, int]) -> None:
    processor.update(
        audio_start_token_id=control["<|mimo_audio_start|>"],
        audio_end_token_id=control["<|mimo_audio_end|>"],
        audio_token_id=control["<|audio_pad|>"],
        image_token_id=control["<|image_pad|>"],
        pad_token_id=control["<|endoftext|>"],
        video_start_token_id=control["<|mimo_video_start|>"],
        video_end_token_id=control["<|mimo_video_end|>"],
        video_token_id=control["<|video_pad|>"],
        vision_start_token_id=control["<|vision_start|>"],
        vision_end_token_id=control["<|vision_end|>"],
    )


def _set_vision(config: dict[str, Any], g: Geometry) -> None:
    if g.vision is None:
        config["vision_config"] = None
        return
    config["vision_config"].update(
        depth=g.vision.depth,
        fullatt_block_indexes=[i for i, kind in enumerate(g.vision.window_types) if kind == -1],
        hidden_size=g.vision.hidden,
        intermediate_size=g.vision.intermediate,
        num_heads=g.vision.heads,
        num_key_value_heads=g.vision.kv_heads,
        num_query_groups=g.vision.heads // g.vision.kv_heads,
        out_hidden_size=g.hidden,
        vit_window_attn_types=list(g.vision.window_types),
    )
