"""Which tensors the model and its picture tower need: names, dtypes and shapes, all from the Config.

Also what is left out on purpose, and the grids of the fused qkv's scales.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimo_vk.config import Config, LayerSpec
from mimo_vk.formats import FP8_BLOCK, MXFP4_BLOCK
from mimo_vk.vision_config import VisionConfig

Shape = tuple[int, ...]

# Sound, multi-token prediction and the draft model aren't loaded; nor is visual.* where config.json has no tower.
TOWER = "visual."
TOWER_KIND = "vision tower"
SKIPPED = re.compile(r"(model\.)?(visual\.|audio|speech_|mtp|dflash)")

EXPERT_PARTS = ("down_proj.weight", "down_proj.weight_scale", "gate_proj.weight", "gate_proj.weight_scale",
                "up_proj.weight", "up_proj.weight_scale")  # fmt: skip
WEIGHT_DTYPES, SCALE_DTYPES = ("U8",), ("U8", "F8_E8M0")  # the dtype may read either way: the same bytes


class Wanted(NamedTuple):
    """A tensor the model needs. ``kind`` names its line in a plan; the first shape is the release's."""

    kind: str
    dtype: str
    shapes: tuple[Shape, ...]


def blocks(count: int, size: int = FP8_BLOCK) -> int:
    return -(-count // size)


def qkv_rows(spec: LayerSpec) -> int:
    """Rows of a layer's fused qkv_proj."""
    return spec.num_heads * spec.head_dim + spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)


def qkv_scale_rows(spec: LayerSpec, chunks: int) -> tuple[int, ...]:
    """Legal row counts of qkv_proj's scales: a grid that restarts at each chunk (first), or one over all rows."""
    rows = qkv_rows(spec)
    chunked, continuous = chunks * blocks(rows // chunks), blocks(rows)
    return (chunked,) if chunked == continuous else (chunked, continuous)


def qkv_scale_row(rows: int, scale_rows: int, chunks: int) -> NDArray[np.int32]:
    """The scale row of each qkv row, int32 [rows]. Where both grids have as many rows, the chunked one holds."""
    row = np.arange(rows, dtype=np.int32)
    per_chunk = rows // chunks
    if scale_rows == chunks * blocks(per_chunk):
        return row // per_chunk * blocks(per_chunk) + row % per_chunk // FP8_BLOCK
    assert scale_rows == blocks(rows), (rows, scale_rows, chunks)
    return row // FP8_BLOCK


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def dense_tensors(config: Config) -> dict[str, Wanted]:
    """Every tensor that isn't an expert's, by name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    wanted = {
        "model.embed_tokens.weight": Wanted("embedding", "BF16", ((vocab, hidden),)),
        "lm_head.weight": Wanted("head", "BF16", ((vocab, hidden),)),
        "model.norm.weight": Wanted("norms", "BF16", ((hidden,),)),
    }
    for spec in config.layers:
        wanted |= _layer_tensors(config, spec)
    if config.tower is not None:
        wanted |= vision_tensors(config.tower)
    return wanted


def vision_tensors(v: VisionConfig) -> dict[str, Wanted]:
    """The picture tower's. The merger has no biases."""
    joined, patch = v.merge_unit * v.hidden_size, v.patch_size
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (v.hidden_size, v.channels, v.temporal_patch_size, patch, patch),
        "merger.ln_q.weight": (v.hidden_size,),
        "merger.mlp.0.weight": (joined, joined),
        "merger.mlp.2.weight": (v.out_hidden_size, joined),
    }
    for block in range(len(v.block_types)):
        at = f"blocks.{block}."
        shapes |= {at + "norm1.weight": (v.hidden_size,), at + "norm2.weight": (v.hidden_size,)}
        if v.sinks_in(block):
            shapes[at + "attn.sinks"] = (v.num_heads,)
        for part, rows, columns in (
            ("attn.qkv", v.qkv_rows, v.hidden_size),
            ("attn.proj", v.hidden_size, v.num_heads * v.head_dim),
            ("mlp.gate_proj", v.intermediate_size, v.hidden_size),
            ("mlp.up_proj", v.intermediate_size, v.hidden_size),
            ("mlp.down_proj", v.hidden_size, v.intermediate_size),
        ):
            shapes |= {f"{at}{part}.weight": (rows, columns), f"{at}{part}.bias": (rows,)}
    return {TOWER + name: Wanted(TOWER_KIND, "BF16", (shape,)) for name, shape in shapes.items()}


def _layer_tensors(config: Config, spec: LayerSpec) -> dict[str, Wanted]:
    hidden, at = config.hidden_size, layer_prefix(spec.index)
    scale_columns = blocks(hidden)
    wanted = {
        at + "input_layernorm.weight": Wanted("norms", "BF16", ((hidden,),)),
        at + "post_attention_layernorm.weight": Wanted("norms", "BF16", ((hidden,),)),
        at + "self_attn.qkv_proj.weight": Wanted("qkv", "F8_E4M3", ((qkv_rows(spec), hidden),)),
        at + "self_attn.qkv_proj.weight_scale_inv": Wanted(
            "qkv", "F32", tuple((rows, scale_columns) for rows in qkv_scale_rows(spec, config.qkv_chunks))
        ),
        at + "self_attn.o_proj.weight": Wanted("o_proj", "BF16", ((hidden, spec.num_heads * spec.v_head_dim),)),
    }
    if spec.has_sink:
        wanted[at + "self_attn.attention_sink_bias"] = Wanted("norms", "BF16", ((spec.num_heads,),))
    if spec.moe:
        wanted[at + "mlp.gate.weight"] = Wanted("router", "BF16", ((config.n_routed_experts, hidden),))
        wanted[at + "mlp.gate.e_score_correction_bias"] = Wanted("router", "F32", ((config.n_routed_experts,),))
        return wanted
    inner = config.intermediate_size
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        grid = blocks(shape[0]), blocks(shape[1])
        wanted[f"{at}mlp.{name}_proj.weight"] = Wanted("dense MLP", "F8_E4M3", (shape,))
        wanted[f"{at}mlp.{name}_proj.weight_scale_inv"] = Wanted("dense MLP", "F32", (grid,))
    return wanted


def expert_shapes(config: Config) -> tuple[Shape, ...]:
    """Shapes of an expert's six tensors, in EXPERT_PARTS' order, as stored (two codes a byte)."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    down = (hidden, inner // 2), (hidden, inner // MXFP4_BLOCK)
    up = (inner, hidden // 2), (inner, hidden // MXFP4_BLOCK)
    return *down, *up, *up


def expert_bytes(config: Config) -> int:
    """Bytes of one expert's six tensors."""
    return sum(rows * columns for rows, columns in expert_shapes(config))


def expert_names(layer: int, expert: int) -> list[str]:
    at = f"model.layers.{layer}.mlp.experts.{expert}."
    return [at + part for part in EXPERT_PARTS]
