"""Write the trained demonstration model as a checkpoint in the release's format (needs torch).

The bytes come from the very rounding that training used; they are read again by the engine's code and held against it.
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

from tools.checkpoint import layout
from tools.checkpoint.geometry import DATA
from tools.checkpoint.layout import TensorSpec
from tools.demo.bpe import control_ids
from tools.demo.network import Network, restored
from tools.demo.patches import preprocessor_json
from tools.demo.shape import as_geometry, config_json, generation_config_json
from tools.demo.stored import check, weights
from tools.make_checkpoint import write_safetensors


class Stored:
    """Each tensor's bytes as they go into the file."""

    def __init__(self, net: Network) -> None:
        self.tensors = dict(tensor for weight in weights(net) for tensor in weight.tensors())

    def pieces(self, spec: TensorSpec) -> Iterator[tuple[int, bytes]]:
        tensor = self.tensors[spec.name]
        assert tuple(tensor.shape) == spec.shape, (spec, tensor.shape)
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert len(data) == math.prod(spec.shape) * layout.ITEM_BYTES[spec.dtype], spec
        yield 0, data


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
    print(f"{check(net, out)} weights are stored as training used them")
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
