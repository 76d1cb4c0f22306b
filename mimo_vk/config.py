"""config.json becomes a frozen Config and a LayerSpec per layer.

Every key is used, or stands in IGNORED with the reason; an unknown key is named in a warning. A value that
would change the arithmetic in a way that isn't supported is refused, and all faults are collected, a line each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo_vk.config_fields import NO_LIMIT, Fields, read_json, shown
from mimo_vk.errors import CheckpointError
from mimo_vk.vision_config import VisionConfig, read_vision_config

__all__ = ["Config", "GenerationConfig", "LayerSpec", "load_config", "load_generation_config", "read_json"]

IGNORED: dict[str, str] = {
    "architectures": "model_type says what the model is",
    "auto_map": "names the vendor's Python classes; ours are our own",
    "attention_dropout": "training only",
    "initializer_range": "training only",
    "use_cache": "there is always a KV cache",
    "dtype": "each tensor's header names its own dtype",
    "torch_dtype": "each tensor's header names its own dtype",
    "transformers_version": "the writer's version",
    "sliding_window_size": "repeats sliding_window",
    "attention_chunk_size": "repeats sliding_window",
    "hybrid_block_size": "hybrid_layer_pattern lists every layer",
    "moe_router_dtype": "the router is computed in float32, which is finer",
    "num_nextn_predict_layers": "multi-token prediction isn't loaded",
    "audio_config": "sound isn't supported; its tensors are skipped",
    "processor_config": "preprocessor_config.json is the authority for pictures",
    "vision_model_type": "the tower is described by vision_config",
    "vision_start_token_id": "the tokenizer knows the token by its text",
    "vision_end_token_id": "the tokenizer knows the token by its text",
    "video_token_id": "video isn't supported",
    "pad_token_id": "sequences are never padded",
    "bos_token_id": "the chat template writes every control token",
}
IGNORED_QUANTIZATION: dict[str, str] = {
    "activation_scheme": "activations stay in full precision",
    "ignored_layers": "each tensor's header names its own dtype",
    "modules_to_not_convert": "each tensor's header names its own dtype",
}

# Keys with one supported value each. Those in _MAY_BE_ABSENT may be left out: tensors would show another value.
_FIXED: dict[str, Any] = {
    "model_type": "mimo_v2",
    "hidden_act": "silu",
    "attention_projection_layout": "fused_qkv",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "n_shared_experts": None,
}
_MAY_BE_ABSENT = frozenset({"tie_word_embeddings", "attention_bias", "n_shared_experts"})
_FIXED_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "store_dtype": "mxfp4",
    "mxfp4_block_size": 32,
}
MXFP4_COLUMNS = 32  # both inner widths of an expert come in whole MXFP4 blocks


@dataclass(frozen=True)
class LayerSpec:
    """What one layer is. ``window`` is the number of visible keys, the query's own included; None sees all."""

    index: int
    window: int | None
    moe: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_theta: float
    has_sink: bool


@dataclass(frozen=True)
class Config:
    """The model's numbers, all from config.json. ``qkv_chunks`` is the T of the pre-sharded qkv_proj."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    rope_dim: int
    attention_value_scale: float
    layernorm_epsilon: float
    routed_scaling_factor: float
    max_position_embeddings: int
    qkv_chunks: int
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None
    vision: dict[str, Any] | None  # as it stands in the file
    tower: VisionConfig | None  # the same, read

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class GenerationConfig:
    """generation_config.json: sampling defaults and stop ids (None: config.json's own hold)."""

    temperature: float = 1.0
    top_p: float = 1.0
    eos_token_ids: tuple[int, ...] | None = None


def load_config(path: Path) -> tuple[Config, list[str]]:
    """Config and warnings (unknown keys, a line each) from config.json, or from the directory that holds it.

    Errors: CheckpointError with a line per faulty key: file, key, what was expected, what was found.
    """
    path = path / "config.json" if path.is_dir() else path
    faults: list[str] = []
    fields = Fields(str(path), read_json(path), faults)
    if fields.raw.get("model_type") != "mimo_v2":  # the other keys would only make noise
        fields.fault("model_type", '"mimo_v2" (no other model is supported)')
        raise CheckpointError(faults)
    fields.fixed(_FIXED, _MAY_BE_ABSENT)
    warnings = _check_quantization(fields)
    config, about_tower = _read(fields)
    if faults:
        raise CheckpointError(faults)
    return config, fields.unknown(IGNORED) + warnings + about_tower


def _read(f: Fields) -> tuple[Config, list[str]]:
    vocab = f.integer("vocab_size")
    head_dim = f.integer("head_dim")
    experts, chosen = f.integer("n_routed_experts"), f.integer("num_experts_per_tok")
    if chosen > experts and "n_routed_experts" not in f.faulty:
        f.fault("num_experts_per_tok", f"at most n_routed_experts ({experts})")
    image = f.token_ids("image_token_id", vocab) if f.take("image_token_id") is not None else ()
    hidden = _whole_blocks(f, "hidden_size")
    tower, about_tower = read_vision_config(f, hidden)
    vision = f.raw.get("vision_config")
    config = Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size"),
        moe_intermediate_size=_whole_blocks(f, "moe_intermediate_size"),
        n_routed_experts=experts,
        num_experts_per_tok=chosen,
        rope_dim=_rope_dim(f, head_dim),
        attention_value_scale=f.number("attention_value_scale", 0.0, NO_LIMIT, null=1.0),
        layernorm_epsilon=f.number("layernorm_epsilon", 0.0, 1.0),
        routed_scaling_factor=f.number("routed_scaling_factor", 0.0, NO_LIMIT, null=1.0),
        max_position_embeddings=f.integer("max_position_embeddings"),
        qkv_chunks=f.integer("num_key_value_heads"),
        layers=_layers(f, head_dim),
        eos_token_ids=f.token_ids("eos_token_id", vocab),
        image_token_id=image[0] if image else None,
        vision=vision if isinstance(vision, dict) else None,
        tower=tower,
    )
    _check_rope(f)
    return config, about_tower


def _whole_blocks(f: Fields, key: str) -> int:
    value = f.integer(key)
    if value % MXFP4_COLUMNS:
        f.fault(key, f"a multiple of {MXFP4_COLUMNS} (MXFP4 blocks)")
    return value


def _rope_dim(f: Fields, head_dim: int) -> int:
    factor = f.number("partial_rotary_factor", 0.0, 1.0)
    dims = int(head_dim * factor)
    if "head_dim" not in f.faulty and (dims < 2 or dims % 2):
        f.fault("partial_rotary_factor", f"int(head_dim {head_dim} * factor) to be even and 2 or more, not {dims}")
    return dims


def _layers(f: Fields, head_dim: int) -> tuple[LayerSpec, ...]:
    count = f.integer("num_hidden_layers")
    if count > 10_000:  # before a list of that length is made
        f.fault("num_hidden_layers", "at most 10000")
        count = 1
    pattern, moe = f.flags("hybrid_layer_pattern", count), f.flags("moe_layer_freq", count)
    window = f.integer("sliding_window")
    if f.integer("swa_head_dim") != head_dim and "head_dim" not in f.faulty:
        f.fault("swa_head_dim", f"head_dim ({head_dim})")
    sinks = f.boolean("add_full_attention_sink_bias"), f.boolean("add_swa_attention_sink_bias")
    kinds, chunks = [], f.integer("num_key_value_heads")
    for swa, prefix in enumerate(("", "swa_")):
        heads, kv = f.integer(f"{prefix}num_attention_heads"), f.integer(f"{prefix}num_key_value_heads")
        v_dim, theta = f.integer(f"{prefix}v_head_dim"), f.number(f"{prefix}rope_theta", 0.0, NO_LIMIT)
        _check_heads(f, prefix, heads, kv, chunks)
        kinds.append((window if swa else None, heads, kv, v_dim, theta, sinks[swa]))
    specs = []
    for index, (swa, is_moe) in enumerate(zip(pattern, moe, strict=True)):
        kind_window, heads, kv, v_dim, theta, sink = kinds[swa]
        specs.append(LayerSpec(index, kind_window, is_moe == 1, heads, kv, head_dim, v_dim, theta, sink))
    return tuple(specs)


def _check_heads(f: Fields, prefix: str, heads: int, kv: int, chunks: int) -> None:
    """Query heads share kv heads evenly, and the fused qkv's chunks hold whole heads of each."""
    if heads % kv and f"{prefix}num_key_value_heads" not in f.faulty:
        f.fault(f"{prefix}num_attention_heads", f"a multiple of {prefix}num_key_value_heads ({kv})")
    elif kv % chunks and "num_key_value_heads" not in f.faulty:
        f.fault(f"{prefix}num_key_value_heads", f"a multiple of num_key_value_heads ({chunks}), the qkv chunks")


def _check_quantization(f: Fields) -> list[str]:
    quantization = f.inner("quantization_config")
    if quantization is None:
        return []
    quantization.fixed(_FIXED_QUANTIZATION)
    return quantization.unknown(IGNORED_QUANTIZATION)


def _check_rope(f: Fields) -> None:
    """rope_parameters and rope_scaling may only repeat the flat keys: any scaling of positions is refused."""
    for key in ("rope_parameters", "rope_scaling"):
        if f.take(key) is None:
            continue
        rope = f.inner(key)
        allowed: dict[str, Any] = {"rope_type": "default", "type": "default"}
        allowed |= {name: f.raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        for name, value in rope.raw.items() if rope else ():
            assert rope is not None
            if name not in allowed:
                rope.fault(name, "no such key (only the default rotary embedding is supported)")
            elif isinstance(value, bool) or value != allowed[name]:
                rope.fault(name, f"{shown(allowed[name])} (the flat keys' own; no scaling of positions is supported)")


def load_generation_config(path: Path) -> GenerationConfig:
    """generation_config.json, or the directory that holds it; a file that isn't there gives the defaults.

    Errors: CheckpointError with a line per faulty key.
    """
    path = path / "generation_config.json" if path.is_dir() else path
    if not path.exists():
        return GenerationConfig()
    faults: list[str] = []
    f = Fields(str(path), read_json(path), faults)
    generation = GenerationConfig(
        temperature=f.number("temperature", 0.0, 100.0, low_too=True) if f.raw.get("temperature") is not None else 1.0,
        top_p=f.number("top_p", 0.0, 1.0) if f.raw.get("top_p") is not None else 1.0,
        eos_token_ids=f.token_ids("eos_token_id", 2**31) if f.raw.get("eos_token_id") is not None else None,
    )
    if faults:
        raise CheckpointError(faults)
    return generation
