"""Write the trained demonstration model as a checkpoint in the release's format (needs torch).

The bytes come from the very rounding that training used, so the stored model is the trained one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.checkpoint import layout
from tools.checkpoint.geometry import DATA
from tools.checkpoint.layout import TensorSpec
from tools.demo.bpe import control_ids
from tools.demo.network import DenseMlp, Layer, Moe, Network, restored
from tools.demo.patches import preprocessor_json
from tools.demo.rounding import fp8_codes, mxfp4_codes
from tools.demo.shape import as_geometry, config_json, generation_config_json
from tools.demo.tower import Tower
from tools.make_checkpoint import write_safetensors

PATCH_SHAPE = (3, 2, 16, 16)  # channels, times, y, x
TOWER_LINEARS = {
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Stored:
    """Each tensor's bytes as they go into the file."""

    def __init__(self, net: Network) -> None:
        self.tensors = dict(stored_tensors(net))

    def pieces(self, spec: TensorSpec) -> Iterator[tuple[int, bytes]]:
        tensor = self.tensors[spec.name]
        assert tuple(tensor.shape) == spec.shape, (spec, tensor.shape)
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert len(data) == math.prod(spec.shape) * layout.ITEM_BYTES[spec.dtype], spec
        yield 0, data


def stored_tensors(net: Network) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", net.embed.bfloat16()
    yield "model.norm.weight", net.norm.bfloat16()
    yield "lm_head.weight", net.lm_head.bfloat16()
    for i, layer in enumerate(net.layers):
        prefix = f"model.layers.{i}"
        yield from attention_tensors(layer, prefix)
        if isinstance(layer.mlp, DenseMlp):
            for part in ("gate", "up", "down"):
                yield from fp8(f"{prefix}.mlp.{part}_proj", getattr(layer.mlp, part))
        else:
            yield from moe_tensors(layer.mlp, f"{prefix}.mlp")
    assert net.tower is not None
    yield from tower_tensors(net.tower)


def attention_tensors(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    attention = layer.attention
    yield f"{prefix}.input_layernorm.weight", layer.input_norm.bfloat16()
    yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_norm.bfloat16()
    yield from fp8(f"{prefix}.self_attn.qkv_proj", attention.qkv_proj, attention.shape.chunks)
    yield f"{prefix}.self_attn.o_proj.weight", attention.o_proj.bfloat16()
    if attention.sink is not None:
        yield f"{prefix}.self_attn.attention_sink_bias", attention.sink.bfloat16()


def moe_tensors(moe: Moe, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}.gate.weight", moe.router.bfloat16()
    yield f"{prefix}.gate.e_score_correction_bias", moe.bias
    for e in range(moe.bias.numel()):
        parts = {"gate": moe.gate_up[e, 0], "up": moe.gate_up[e, 1], "down": moe.down[e]}
        for part, weight in parts.items():
            codes, scales = mxfp4_codes(weight)
            yield f"{prefix}.experts.{e}.{part}_proj.weight", codes
            yield f"{prefix}.experts.{e}.{part}_proj.weight_scale", scales


def tower_tensors(tower: Tower) -> Iterator[tuple[str, Tensor]]:
    yield "visual.patch_embed.proj.weight", tower.patch_embed.bfloat16().view(-1, *PATCH_SHAPE)
    for i, block in enumerate(tower.blocks):
        prefix = f"visual.blocks.{i}"
        yield f"{prefix}.norm1.weight", block.norm1.bfloat16()
        yield f"{prefix}.norm2.weight", block.norm2.bfloat16()
        for part, stored in TOWER_LINEARS.items():
            yield f"{prefix}.{stored}.weight", getattr(block, part).bfloat16()
            yield f"{prefix}.{stored}.bias", getattr(block, f"{part}_bias").bfloat16()
        if block.sinks is not None:
            yield f"{prefix}.attn.sinks", block.sinks.bfloat16()
    yield "visual.merger.ln_q.weight", tower.ln_q.bfloat16()
    yield "visual.merger.mlp.0.weight", tower.merge_in.bfloat16()
    yield "visual.merger.mlp.2.weight", tower.merge_out.bfloat16()


def fp8(name: str, weight: Tensor, chunks: int = 1) -> Iterator[tuple[str, Tensor]]:
    codes, scales = fp8_codes(weight, chunks)
    yield f"{name}.weight", codes
    yield f"{name}.weight_scale_inv", scales


@torch.no_grad()
def export(training: Path, out: Path) -> int:
    """Write the checkpoint into the new or empty directory ``out``; the number of its bytes."""
    net = restored(torch.load(training / "state.pt")["net"])
    tokenizer_path = training / "tokenizer.json"
    ids = control_ids(Tokenizer.from_file(str(tokenizer_path)))
    g = as_geometry(net.shape, min(ids.values()))
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out}: not empty")
    stored, total = Stored(net), 0
    weight_map: dict[str, str] = {}
    for file_name, specs in layout.files(g).items():
        write_safetensors(out / file_name, specs, stored)  # type: ignore[arg-type]
        weight_map.update((spec.name, file_name) for spec in specs)
        total += sum(spec.nbytes for spec in specs)
    assert set(weight_map) == set(stored.tensors)
    write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total, "tp_size": g.chunks}, "weight_map": weight_map},
    )
    write_json(out / "config.json", config_json(net.shape, ids))
    write_json(out / "generation_config.json", generation_config_json(ids))
    write_json(out / "preprocessor_config.json", preprocessor_json())
    write_json(out / "tokenizer_config.json", tokenizer_config(g.max_positions))
    shutil.copyfile(tokenizer_path, out / "tokenizer.json")
    shutil.copyfile(DATA / "chat_template.jinja", out / "chat_template.jinja")
    return sum(path.stat().st_size for path in out.iterdir())


def tokenizer_config(longest: int) -> dict[str, object]:
    return {
        "add_bos_token": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": longest,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    print(f"{args.out}: {export(args.training, args.out)} bytes")


if __name__ == "__main__":
    main()
