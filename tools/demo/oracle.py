"""transformers' MiMoV2FlashForCausalLM with the demonstration's weights: what the training's forward must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM

from tools.demo.network import Attention, DenseMlp, Network
from tools.demo.shape import Shape


def oracle_config(shape: Shape) -> Any:
    def rope(theta: float) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": shape.rope_dim / shape.head_dim}

    return MiMoV2FlashConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        moe_intermediate_size=shape.moe_intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.full_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        attention_value_scale=shape.value_scale,
        sliding_window=shape.window,
        rms_norm_eps=shape.eps,
        n_routed_experts=shape.experts,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        layer_types=["sliding_attention" if window else "full_attention" for window in shape.pattern],
        mlp_layer_types=["sparse" if shape.is_moe(layer) else "dense" for layer in range(shape.layers)],
        rope_parameters={"full_attention": rope(shape.full_theta), "sliding_attention": rope(shape.window_theta)},
        pad_token_id=0,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def attention_state(attention: Attention, prefix: str) -> dict[str, Tensor]:
    shape = attention.shape
    heads, kv = shape.num_heads // shape.chunks, attention.kv // shape.chunks
    sizes = [heads * shape.head_dim, kv * shape.head_dim, kv * shape.v_head_dim]
    parts = attention.qkv_proj.view(shape.chunks, -1, shape.hidden_size).split(sizes, dim=1)
    state = {
        f"{prefix}{name}_proj.weight": part.reshape(-1, shape.hidden_size)
        for name, part in zip("qkv", parts, strict=True)
    }
    state[f"{prefix}o_proj.weight"] = attention.o_proj
    if attention.sink is not None:
        state[f"{prefix}sinks"] = attention.sink
    return state


@torch.no_grad()
def oracle(net: Network) -> Any:
    """The module, holding net's weights as they are (round them first to compare with what is stored)."""
    model = MiMoV2FlashForCausalLM(oracle_config(net.shape)).eval()
    state = {"model.embed_tokens.weight": net.embed, "model.norm.weight": net.norm, "lm_head.weight": net.lm_head}
    for i, layer in enumerate(net.layers):
        prefix = f"model.layers.{i}."
        state |= {
            f"{prefix}input_layernorm.weight": layer.input_norm,
            f"{prefix}post_attention_layernorm.weight": layer.post_attention_norm,
        }
        state |= attention_state(layer.attention, f"{prefix}self_attn.")
        if isinstance(layer.mlp, DenseMlp):
            state |= {f"{prefix}mlp.{name}_proj.weight": getattr(layer.mlp, name) for name in ("gate", "up", "down")}
        else:
            state[f"{prefix}mlp.gate.weight"] = layer.mlp.router
            state[f"{prefix}mlp.gate.e_score_correction_bias"] = layer.mlp.bias
            state[f"{prefix}mlp.experts.gate_up_proj"] = layer.mlp.gate_up.flatten(1, 2)
            state[f"{prefix}mlp.experts.down_proj"] = layer.mlp.down
    model.load_state_dict(state, strict=True)
    return model
