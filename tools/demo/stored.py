"""The trained weights under the release's names, the bytes they are stored as, and a check of those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from mimo_vk.checkpoint import Checkpoint
from mimo_vk.formats import FP8_BLOCK, MatrixFP8, MatrixMXFP4, bf16_to_float32, dequantize
from tools.demo.network import DenseMlp, Layer, Moe, Network
from tools.demo.rounding import bf16_round, fp8_codes, fp8_round, mxfp4_codes, mxfp4_round
from tools.demo.tower import Tower

PATCH_SHAPE = (3, 2, 16, 16)  # channels, times, y, x
TOWER_LINEARS = {
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Weight:
    """One weight as it is trained. ``name``: the tensor's, without the scales' suffixes."""

    name: str
    kind: Literal["bf16", "f32", "fp8", "mxfp4"]
    value: Tensor
    chunks: int = 1  # of an FP8 grid

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What goes into the file."""
        if self.kind == "bf16":
            yield self.name, self.value.bfloat16()
        elif self.kind == "f32":
            yield self.name, self.value
        elif self.kind == "fp8":
            codes, scales = fp8_codes(self.value, self.chunks)
            yield from ((self.name, codes), (f"{self.name}_scale_inv", scales))
        else:
            codes, scales = mxfp4_codes(self.value)
            yield from ((self.name, codes), (f"{self.name}_scale", scales))

    def trained(self) -> Tensor:
        """What took part in training."""
        if self.kind == "mxfp4":
            return mxfp4_round(self.value)
        if self.kind == "fp8":
            return fp8_round(self.value, self.chunks)
        return bf16_round(self.value) if self.kind == "bf16" else self.value

    def stored(self, checkpoint: Checkpoint) -> np.ndarray:
        """What the engine reads."""
        raw = checkpoint.read(self.name)
        if self.kind == "bf16":
            return bf16_to_float32(raw)
        if self.kind == "f32":
            return raw
        if self.kind == "mxfp4":
            return dequantize(MatrixMXFP4(raw, checkpoint.read(f"{self.name}_scale")))
        row, per_chunk = np.arange(len(raw)), len(raw) // self.chunks
        scale_row = row // per_chunk * -(-per_chunk // FP8_BLOCK) + row % per_chunk // FP8_BLOCK
        scales = checkpoint.read(f"{self.name}_scale_inv")
        return dequantize(MatrixFP8(raw, scales, scale_row.astype(np.int32)))


def weights(net: Network) -> Iterator[Weight]:
    assert net.tower is not None
    yield Weight("model.embed_tokens.weight", "bf16", net.embed)
    yield Weight("model.norm.weight", "bf16", net.norm)
    yield Weight("lm_head.weight", "bf16", net.lm_head)
    for i, layer in enumerate(net.layers):
        prefix = f"model.layers.{i}"
        yield from attention_weights(layer, prefix)
        if isinstance(layer.mlp, DenseMlp):
            for part in ("gate", "up", "down"):
                yield Weight(f"{prefix}.mlp.{part}_proj.weight", "fp8", getattr(layer.mlp, part))
        else:
            yield from moe_weights(layer.mlp, f"{prefix}.mlp")
    yield from tower_weights(net.tower)


def attention_weights(layer: Layer, prefix: str) -> Iterator[Weight]:
    attention = layer.attention
    yield Weight(f"{prefix}.input_layernorm.weight", "bf16", layer.input_norm)
    yield Weight(f"{prefix}.post_attention_layernorm.weight", "bf16", layer.post_attention_norm)
    yield Weight(f"{prefix}.self_attn.qkv_proj.weight", "fp8", attention.qkv_proj, attention.shape.chunks)
    yield Weight(f"{prefix}.self_attn.o_proj.weight", "bf16", attention.o_proj)
    if attention.sink is not None:
        yield Weight(f"{prefix}.self_attn.attention_sink_bias", "bf16", attention.sink)


def moe_weights(moe: Moe, prefix: str) -> Iterator[Weight]:
    yield Weight(f"{prefix}.gate.weight", "bf16", moe.router)
    yield Weight(f"{prefix}.gate.e_score_correction_bias", "f32", moe.bias)
    for e in range(moe.bias.numel()):
        parts = {"gate": moe.gate_up[e, 0], "up": moe.gate_up[e, 1], "down": moe.down[e]}
        for part, weight in parts.items():
            yield Weight(f"{prefix}.experts.{e}.{part}_proj.weight", "mxfp4", weight)


def tower_weights(tower: Tower) -> Iterator[Weight]:
    yield Weight("visual.patch_embed.proj.weight", "bf16", tower.patch_embed.view(-1, *PATCH_SHAPE))
    for i, block in enumerate(tower.blocks):
        prefix = f"visual.blocks.{i}"
        yield Weight(f"{prefix}.norm1.weight", "bf16", block.norm1)
        yield Weight(f"{prefix}.norm2.weight", "bf16", block.norm2)
        for part, stored in TOWER_LINEARS.items():
            yield Weight(f"{prefix}.{stored}.weight", "bf16", getattr(block, part))
            yield Weight(f"{prefix}.{stored}.bias", "bf16", getattr(block, f"{part}_bias"))
        if block.sinks is not None:
            yield Weight(f"{prefix}.attn.sinks", "bf16", block.sinks)
    yield Weight("visual.merger.ln_q.weight", "bf16", tower.ln_q)
    yield Weight("visual.merger.mlp.0.weight", "bf16", tower.merge_in)
    yield Weight("visual.merger.mlp.2.weight", "bf16", tower.merge_out)


def check(net: Network, directory: Path) -> int:
    """Hold every weight that the engine reads from the files against what training used, bit for bit; their number.

    Raises ValueError naming the tensor.
    """
    checkpoint, count = Checkpoint.open(directory), 0
    for weight in weights(net):
        found = np.ascontiguousarray(weight.stored(checkpoint), np.float32)
        if not np.array_equal(found, weight.trained().numpy()):
            raise ValueError(f"{directory}: {weight.name}: not what training used")
        count += found.size
    return count
