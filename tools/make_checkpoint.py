"""Make a checkpoint in the release's own format, with random weights: the same bytes for the same seed everywhere.

tools/make_checkpoint.py OUT --geometry tiny|flash-slice|pro-slice|flash-sparse|pro-sparse [--seed N]
                         [--experts E] [--layers L]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.checkpoint import tokenizer_json as tok
from tools.checkpoint.contents import Contents
from tools.checkpoint.geometry import DATA, GEOMETRIES, Geometry, config_json, find_geometry
from tools.checkpoint.layout import TensorSpec, files


def make(out: Path, geometry: str, seed: int = 0, *, experts: int | None = None, layers: int | None = None) -> Geometry:
    """Write the checkpoint into the new or empty directory ``out``.

    Raises ValueError for a geometry, a count or a directory that can't be used.
    """
    g = find_geometry(geometry, experts, layers)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out}: not empty")
    contents = Contents(g, seed)
    weight_map: dict[str, str] = {}
    total = 0
    for file_name, specs in files(g).items():
        write_safetensors(out / file_name, specs, contents)
        weight_map.update((spec.name, file_name) for spec in specs)
        total += sum(spec.nbytes for spec in specs)
    index = {"metadata": {"total_size": total, "tp_size": g.chunks}, "weight_map": weight_map}
    _write_json(out / "model.safetensors.index.json", index)
    _write_texts(out, g)
    return g


def write_safetensors(path: Path, specs: list[TensorSpec], contents: Contents) -> None:
    """Tensors back to back in the order given; what has no contents stays a hole of the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            for at, data in contents.pieces(spec):
                file.seek(start + header[spec.name]["data_offsets"][0] + at)
                file.write(data)
        file.truncate(start + offset)


def _write_texts(out: Path, g: Geometry) -> None:
    _write_json(out / "config.json", config_json(g, tok.control_ids(g)))
    release = json.loads((DATA / "generation_config.json").read_text("utf-8"))
    _write_json(out / "generation_config.json", tok.generation_config_json(release, g))
    _write_json(out / "tokenizer.json", tok.tokenizer_json(g))
    _write_json(out / "tokenizer_config.json", tok.tokenizer_config_json(g))
    shutil.copyfile(DATA / "chat_template.jinja", out / "chat_template.jinja")
    if g.vision is not None:
        shutil.copyfile(DATA / "preprocessor_config.json", out / "preprocessor_config.json")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a checkpoint with random weights in the release's format.")
    parser.add_argument("out", type=Path, help="a new or empty directory")
    parser.add_argument("--geometry", required=True, choices=list(GEOMETRIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, help="experts per layer (default: the geometry's)")
    parser.add_argument("--layers", type=int, help="how many of the geometry's layers")
    args = parser.parse_args(argv)
    try:
        g = make(args.out, args.geometry, args.seed, experts=args.experts, layers=args.layers)
    except (ValueError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {g.name}, {g.layers} layers, {g.experts} experts, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
