"""Safetensors files and a small model, written byte by byte, so that a test can break any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

ITEM = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "F8_E8M0": 1}
Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data
INDEX = "model.safetensors.index.json"


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header: an object for JSON, or the bytes themselves."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def write_shard(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """A well-formed file with the tensors in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    return raw_file(path, header, b"".join(data for _, _, data in tensors.values()))


def write_index(directory: Path, files: dict[str, list[str]], **metadata: object) -> None:
    where = {name: file for file, names in files.items() for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": where}))


def write_sharded(directory: Path, files: dict[str, dict[str, Tensor]]) -> Path:
    """Files and the index that names them."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        write_shard(directory / file, tensors)
    total = sum(len(t[2]) for tensors in files.values() for t in tensors.values())
    write_index(directory, {file: list(tensors) for file, tensors in files.items()}, total_size=total)
    return directory


def bytes_of(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes()


# The small model: layer 0 full and dense, layer 1 a window with experts. Its two qkv grids, worked out by hand:
# full: 2 chunks of (2 heads + 1 k) * 36 + 36 = 144 rows, 2 scale rows each: 4, where one grid over 288 rows has 3;
# window: 2 chunks of (2 + 2) * 36 + 2 * 36 = 216 rows, 2 scale rows each: 4, and one grid over 432 rows has 4 too.
HIDDEN, VOCAB, EXPERTS, INNER, DENSE_INNER = 160, 40, 3, 32, 200
FULL_ROWS, WINDOW_ROWS, O_COLUMNS = 288, 432, 144

SMALL_CONFIG: dict[str, Any] = {
    "model_type": "mimo_v2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "intermediate_size": DENSE_INNER,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1],
    "hybrid_layer_pattern": [0, 1],
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 4,
    "head_dim": 36,
    "swa_head_dim": 36,
    "v_head_dim": 36,
    "swa_v_head_dim": 36,
    "partial_rotary_factor": 0.334,
    "rope_theta": 10000000,
    "swa_rope_theta": 10000,
    "sliding_window": 5,
    "attention_value_scale": 0.612,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "layernorm_epsilon": 1e-05,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 512,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "store_dtype": "mxfp4",
        "mxfp4_block_size": 32,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "attention_projection_layout": "fused_qkv",
    "n_shared_experts": None,
    "eos_token_id": 3,
}


def fp8(shape: tuple[int, int], seed: int) -> Tensor:
    codes = np.random.default_rng(seed).integers(0, 0x7F, shape, dtype=np.uint8)
    return "F8_E4M3", shape, codes.tobytes()


def f32(shape: tuple[int, ...], seed: int) -> Tensor:
    return "F32", shape, np.random.default_rng(seed).uniform(0.01, 0.02, shape).astype("<f4").tobytes()


def bf16(shape: tuple[int, ...], seed: int) -> Tensor:
    """Finite bfloat16: the upper halves of normal float32 numbers."""
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    return "BF16", shape, (values.view("<u4") >> 16).astype("<u2").tobytes()


def small_tensors() -> dict[str, Tensor]:
    """Every tensor of the small model, by name."""
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": bf16((VOCAB, HIDDEN), 1),
        "lm_head.weight": bf16((VOCAB, HIDDEN), 2),
        "model.norm.weight": bf16((HIDDEN,), 3),
    }
    for layer, rows in ((0, FULL_ROWS), (1, WINDOW_ROWS)):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": bf16((HIDDEN,), 10 + layer),
            at + "post_attention_layernorm.weight": bf16((HIDDEN,), 20 + layer),
            at + "self_attn.qkv_proj.weight": fp8((rows, HIDDEN), 30 + layer),
            at + "self_attn.qkv_proj.weight_scale_inv": f32((4, 2), 40 + layer),
            at + "self_attn.o_proj.weight": bf16((HIDDEN, O_COLUMNS), 50 + layer),
        }
    tensors["model.layers.1.self_attn.attention_sink_bias"] = bf16((4,), 60)
    for name, shape in (
        ("gate", (DENSE_INNER, HIDDEN)),
        ("up", (DENSE_INNER, HIDDEN)),
        ("down", (HIDDEN, DENSE_INNER)),
    ):
        tensors[f"model.layers.0.mlp.{name}_proj.weight"] = fp8(shape, 70)
        tensors[f"model.layers.0.mlp.{name}_proj.weight_scale_inv"] = f32((2, 2), 71)
    tensors["model.layers.1.mlp.gate.weight"] = bf16((EXPERTS, HIDDEN), 80)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = f32((EXPERTS,), 81)
    for expert in range(EXPERTS):
        at = f"model.layers.1.mlp.experts.{expert}."
        for name, rows, columns in (("down", HIDDEN, INNER), ("gate", INNER, HIDDEN), ("up", INNER, HIDDEN)):
            tensors[f"{at}{name}_proj.weight"] = "U8", (rows, columns // 2), bytes_of(rows * columns // 2, expert)
            tensors[f"{at}{name}_proj.weight_scale"] = "U8", (rows, columns // 32), bytes_of(rows * columns // 32, 9)
    return tensors


def write_model(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """A model in two files with odd names, the second of which holds the experts."""
    experts = {name: t for name, t in tensors.items() if ".experts." in name}
    rest = {name: t for name, t in tensors.items() if name not in experts}
    write_sharded(directory, {"model_pp0_ep0_shard0.safetensors": rest, "odd name.safetensors": experts})
    (directory / "config.json").write_text(json.dumps(config or SMALL_CONFIG))
    return directory
