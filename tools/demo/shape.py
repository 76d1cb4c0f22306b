"""The demonstration model's shape, and the config.json that says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.checkpoint import geometry
from tools.demo.control import PAD, STOP_TOKENS

VISION = geometry.Vision(hidden=96, intermediate=160, heads=4, kv_heads=2, window_types=(-1, 0, 1, -1))
VISION_WINDOW = 12  # patches to each side: a picture of four units has 16 of them, one of sixteen 64


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. ``pattern`` has a 0 for a full layer and a 1 for a sliding-window layer."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 288
    moe_intermediate_size: int = 96
    experts: int = 32
    experts_per_token: int = 4
    pattern: tuple[int, ...] = (1, 0, 1, 0, 1, 1)
    num_heads: int = 8
    full_kv_heads: int = 2
    window_kv_heads: int = 4
    head_dim: int = 24
    v_head_dim: int = 16
    rope_dim: int = 12
    window: int = 32
    full_theta: float = 100000.0
    window_theta: float = 1000.0
    value_scale: float = 0.707
    eps: float = 1e-5

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @property
    def chunks(self) -> int:
        """Into how many chunks a fused qkv is cut, each with its own FP8 grid: the kv heads of the full layers."""
        return self.full_kv_heads

    def kv_heads(self, layer: int) -> int:
        return self.window_kv_heads if self.pattern[layer] else self.full_kv_heads

    def qkv_rows(self, layer: int) -> int:
        kv = self.kv_heads(layer)
        return self.num_heads * self.head_dim + kv * (self.head_dim + self.v_head_dim)

    def is_moe(self, layer: int) -> bool:
        return layer > 0


def config_json(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    """config.json with the release's keys. ``ids`` gives the control tokens' ids by their text."""
    config = geometry.config_json(as_geometry(shape, min(ids.values())), ids)
    config.update(
        partial_rotary_factor=shape.rope_dim / shape.head_dim,
        rope_theta=shape.full_theta,
        swa_rope_theta=shape.window_theta,
        sliding_window=shape.window,
        sliding_window_size=shape.window,
        attention_chunk_size=shape.window,
    )
    config["vision_config"]["visual_token_window_size"] = VISION_WINDOW
    config["rope_parameters"].update(partial_rotary_factor=config["partial_rotary_factor"], rope_theta=shape.full_theta)
    return config


def as_geometry(shape: Shape, base_tokens: int) -> geometry.Geometry:
    """The shape in the words of the checkpoint maker, whose config.json and tensor list it shares."""
    return geometry.Geometry(
        name="demo",
        contents="exact",
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        moe_intermediate=shape.moe_intermediate_size,
        experts=shape.experts,
        top_k=shape.experts_per_token,
        window=shape.pattern,
        moe=tuple(int(shape.is_moe(layer)) for layer in range(shape.layers)),
        heads=shape.num_heads,
        kv_heads=shape.full_kv_heads,
        window_kv_heads=shape.window_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        vocab=shape.vocab_size,
        base_tokens=base_tokens,
        eps=shape.eps,
        value_scale=shape.value_scale,
        max_positions=32768,
        ranks=2,
        vision=VISION,
    )


def generation_config_json(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json: a low temperature, because so small a model is right where it is sure."""
    return {
        "do_sample": True,
        "temperature": 0.1,
        "top_p": 0.9,
        "bos_token_id": ids[PAD],
        "pad_token_id": ids[PAD],
        "eos_token_id": [ids[text] for text in STOP_TOKENS],
    }
