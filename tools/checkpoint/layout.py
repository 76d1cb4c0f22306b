"""Which tensors a checkpoint has, and in which file and order: the release's names, dtypes and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tools.checkpoint.geometry import ENCODER_HEAD_DIM, Geometry, Vision

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
BLOCK = 128  # rows and columns under one FP8 scale
MX_BLOCK = 32  # columns under one MXFP4 scale


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be stored: safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def shard_name(rank: int, shard: int) -> str:
    return f"model_pp0_ep{rank}_shard{shard}.safetensors"


def files(g: Geometry) -> dict[str, list[TensorSpec]]:
    """File name to its tensors in stored order: the non-expert tensors in ep0_shard0, the experts in all others."""
    out = {shard_name(0, 0): list(_trunk(g))}
    encoders = [*_vision(g), *_audio(g)]
    if g.encoders_apart:
        out[shard_name(g.ranks, 0)] = encoders
    else:
        out[shard_name(0, 0)] += encoders
    names = [shard_name(r, s + (r == 0)) for r in range(g.ranks) for s in range(g.shards)]
    names = names[: g.experts]
    for name in names:
        out[name] = []
    for layer in range(g.layers):
        for expert in range(g.experts if g.moe[layer] else 0):
            out[names[expert * len(names) // g.experts]] += _expert(g, layer, expert)
    return out


def _fp8(name: str, rows: int, cols: int, scale_rows: int | None = None) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "F8_E4M3", (rows, cols))
    yield TensorSpec(f"{name}.weight_scale_inv", "F32", (scale_rows or blocks(rows), blocks(cols)))


def _trunk(g: Geometry) -> Iterator[TensorSpec]:
    yield TensorSpec("model.embed_tokens.weight", "BF16", (g.vocab, g.hidden))
    for layer in range(g.layers):
        yield from _attention(g, layer)
        yield from _router(g, layer) if g.moe[layer] else _dense_mlp(g, layer)
    yield TensorSpec("model.norm.weight", "BF16", (g.hidden,))
    yield TensorSpec("lm_head.weight", "BF16", (g.vocab, g.hidden))


def _attention(g: Geometry, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}"
    yield TensorSpec(f"{prefix}.input_layernorm.weight", "BF16", (g.hidden,))
    if g.window[layer]:
        yield TensorSpec(f"{prefix}.self_attn.attention_sink_bias", "BF16", (g.heads,))
    yield TensorSpec(f"{prefix}.self_attn.o_proj.weight", "BF16", (g.hidden, g.heads * g.v_head_dim))
    rows = g.chunk_rows(layer)
    # the scale grid restarts at each chunk
    yield from _fp8(f"{prefix}.self_attn.qkv_proj", g.chunks * rows, g.hidden, g.chunks * blocks(rows))
    yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", "BF16", (g.hidden,))


def _dense_mlp(g: Geometry, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}.mlp"
    yield from _fp8(f"{prefix}.down_proj", g.hidden, g.intermediate)
    yield from _fp8(f"{prefix}.gate_proj", g.intermediate, g.hidden)
    yield from _fp8(f"{prefix}.up_proj", g.intermediate, g.hidden)


def _router(g: Geometry, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}.mlp.gate"
    yield TensorSpec(f"{prefix}.e_score_correction_bias", "F32", (g.experts,))
    yield TensorSpec(f"{prefix}.weight", "BF16", (g.experts, g.hidden))


def _expert(g: Geometry, layer: int, expert: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}.mlp.experts.{expert}"
    wide, narrow = g.hidden, g.moe_intermediate
    for part, rows, cols in (("down", wide, narrow), ("gate", narrow, wide), ("up", narrow, wide)):
        yield TensorSpec(f"{prefix}.{part}_proj.weight", "U8", (rows, cols // 2))
        yield TensorSpec(f"{prefix}.{part}_proj.weight_scale", "U8", (rows, cols // MX_BLOCK))


def _vision(g: Geometry) -> Iterator[TensorSpec]:
    if g.vision is None:
        return
    v = g.vision
    yield TensorSpec("visual.patch_embed.proj.weight", "BF16", (v.hidden, 3, 2, 16, 16))
    for block in range(v.depth):
        yield from _vision_block(v, block)
    merged = 4 * v.hidden
    yield TensorSpec("visual.merger.ln_q.weight", "BF16", (v.hidden,))
    yield TensorSpec("visual.merger.mlp.0.weight", "BF16", (merged, merged))
    yield TensorSpec("visual.merger.mlp.2.weight", "BF16", (g.hidden, merged))


def _vision_block(v: Vision, block: int) -> Iterator[TensorSpec]:
    prefix = f"visual.blocks.{block}"
    q_rows, kv_rows = v.heads * ENCODER_HEAD_DIM, v.kv_heads * ENCODER_HEAD_DIM
    for norm in ("norm1", "norm2"):
        yield TensorSpec(f"{prefix}.{norm}.weight", "BF16", (v.hidden,))
    if v.window_types[block] != -1:
        yield TensorSpec(f"{prefix}.attn.sinks", "BF16", (v.heads,))
    for part, rows, cols in (
        ("attn.qkv", q_rows + 2 * kv_rows, v.hidden),
        ("attn.proj", v.hidden, q_rows),
        ("mlp.gate_proj", v.intermediate, v.hidden),
        ("mlp.up_proj", v.intermediate, v.hidden),
        ("mlp.down_proj", v.hidden, v.intermediate),
    ):
        yield TensorSpec(f"{prefix}.{part}.weight", "BF16", (rows, cols))
        yield TensorSpec(f"{prefix}.{part}.bias", "BF16", (rows,))


def _audio(g: Geometry) -> Iterator[TensorSpec]:
    """Stand-ins, 64 numbers each: only their number and their two prefixes are the release's."""
    for i in range(g.audio_tensors):
        name = f"speech_embeddings.{i}.weight" if i < 20 else f"audio_encoder.stand_in.{i - 20}.weight"
        yield TensorSpec(name, "BF16", (64,))
