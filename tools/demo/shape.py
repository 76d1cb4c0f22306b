"""The demonstration model's shape, and the config.json that says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.demo.control import END, IMAGE_PAD, PAD, STOP_TOKENS


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. ``pattern`` has a 0 for a full layer and a 1 for a sliding-window layer."""

    vocab_size: int = 2048
    hidden_size: int = 160
    intermediate_size: int = 352
    moe_intermediate_size: int = 64
    experts: int = 16
    experts_per_token: int = 4
    pattern: tuple[int, ...] = (1, 0, 1, 0, 1, 1)
    num_heads: int = 8
    full_kv_heads: int = 2
    window_kv_heads: int = 4
    head_dim: int = 32
    v_head_dim: int = 24
    rope_dim: int = 16
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
    layers = shape.layers
    return {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "attention_bias": False,
        "attention_chunk_size": shape.window,
        "attention_dropout": 0.0,
        "attention_value_scale": shape.value_scale,
        "attention_projection_layout": "fused_qkv",
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "swa_num_key_value_heads": shape.window_kv_heads,
        "swa_num_attention_heads": shape.num_heads,
        "swa_head_dim": shape.head_dim,
        "swa_v_head_dim": shape.v_head_dim,
        "dtype": "bfloat16",
        "eos_token_id": ids[END],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": list(shape.pattern),
        "image_token_id": ids[IMAGE_PAD],
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layernorm_epsilon": shape.eps,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "moe_layer_freq": [int(shape.is_moe(layer)) for layer in range(layers)],
        "n_group": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": None,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.full_kv_heads,
        "pad_token_id": ids[PAD],
        "partial_rotary_factor": shape.rope_dim / shape.head_dim,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "store_dtype": "mxfp4",
            "ignored_layers": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(layers)],
            "weight_block_size": [128, 128],
            "mxfp4_block_size": 32,
        },
        "rope_theta": shape.full_theta,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": shape.window,
        "sliding_window_size": shape.window,
        "swa_rope_theta": shape.window_theta,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": shape.v_head_dim,
        "vocab_size": shape.vocab_size,
    }


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
