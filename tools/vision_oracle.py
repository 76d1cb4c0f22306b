"""The picture tower written a second time, in torch, to hold the project's against. Needs torch and safetensors.

    tools/vision_oracle.py OUT.npz [--seed N]

Makes the tiny checkpoint and stores, for each of ``vision_cases.CASES`` and both readings of the sinks, the rows that
the merger gives (float32), and how far they are from the same tower in float64.

Nothing here comes from the engine, and where the same result can be had by another road, that road is taken: tokens
never change their order (attention doesn't mind: a column block only measures distances in column order), rotation is
a product of complex numbers, a sink in the denominator is one more key with a value of zero.

Source of the behaviour: the published readings of the tower in llama.cpp (tools/mtmd/models/mimovl.cpp), SGLang
(srt/models/mimo_vl.py) and vLLM (models/mimo_v2_omni.py). vLLM's gives the merger an RMSNorm and leaves the sinks out;
the other two have a LayerNorm and the sinks, which is what the checkpoint's own code does.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.make_checkpoint import make
from tools.vision_cases import CASES, SINKS, Case

Sink = Literal["key0", "denominator"]
PREFIX = "visual."
EPS = 1e-6  # of all norms; no key of config.json says so
THETA = 10000.0  # likewise


def read_tensors(model: Path) -> dict[str, Tensor]:
    """The tower's tensors, without their prefix, as stored."""
    index = json.loads((model / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    tensors = {}
    for file in {index[name] for name in index if name.startswith(PREFIX)}:
        with safe_open(model / file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a dict)
                if name.startswith(PREFIX):
                    tensors[name.removeprefix(PREFIX)] = stored.get_tensor(name)
    return tensors


def positions(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, in the processor's order: unit by unit, and row by row inside a unit."""
    places = [
        (top + y, left + x)
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for y in range(merge)
        for x in range(merge)
    ]
    row, column = torch.tensor(places, dtype=torch.float64).T
    return row, column


def column_ranks(rows: int, columns: int, merge: int) -> Tensor:
    """Each patch's place when the units are counted column by column; inside a unit the order stays."""
    units_down, units_across = rows // merge, columns // merge
    unit = torch.arange(units_down * units_across).repeat_interleave(merge * merge)
    within = torch.arange(merge * merge).repeat(units_down * units_across)
    down, across = unit // units_across, unit % units_across
    return (across * units_down + down) * merge * merge + within


def turns(rows: int, columns: int, merge: int, head_dim: int) -> Tensor:
    """Unit complex numbers [patches, head_dim / 2]: a quarter of the head turns by the row, a quarter by the column."""
    quarter = head_dim // 4
    frequency = THETA ** (-2.0 * torch.arange(quarter, dtype=torch.float64) / (head_dim // 2))
    row, column = positions(rows, columns, merge)
    angle = torch.cat((row[:, None] * frequency, column[:, None] * frequency), dim=1)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x [heads, patches, head_dim]: number i and number i + head_dim / 2 are the two parts of a complex number."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * turn.to(torch.complex(x, x).dtype)
    return torch.cat((turned.real, turned.imag), dim=-1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight


@dataclass(frozen=True)
class Oracle:
    """The tower of one checkpoint, in the precision of its weights."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    sink: Sink

    @property
    def head_dim(self) -> int:
        """Of the stored rows; hidden_size / num_heads would be another number."""
        heads = self.config["num_heads"] + 2 * self.config["num_key_value_heads"]
        rows = self.weights["blocks.0.attn.qkv.weight"].shape[0]
        assert rows % heads == 0, (rows, heads)
        return int(rows // heads)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def embed(self, pixels: Tensor) -> Tensor:
        kernel = self.weights["patch_embed.proj.weight"]
        return F.conv3d(pixels.reshape(-1, *kernel.shape[1:]), kernel).flatten(1)

    def attention(self, x: Tensor, block: int, turn: Tensor, ranks: Tensor) -> Tensor:
        """``ranks``: each patch's place in the block's order of tokens."""
        name, kind = f"blocks.{block}.attn", self.config["vit_window_attn_types"][block]
        heads, kv = self.config["num_heads"], self.config["num_key_value_heads"]
        parts = self.linear(x, f"{name}.qkv").split([heads * self.head_dim, kv * self.head_dim, kv * self.head_dim], 1)
        q, k, v = (part.unflatten(1, (-1, self.head_dim)).transpose(0, 1) for part in parts)
        q = rotate(q, turn)
        k = rotate(k, turn).repeat_interleave(heads // kv, dim=0)
        v = v.repeat_interleave(heads // kv, dim=0)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.head_dim)
        if kind != -1:
            far = (ranks[:, None] - ranks[None, :]).abs() > self.config["visual_token_window_size"]
            scores, v = self.add_sinks(scores, v, self.weights[f"{name}.sinks"], ranks)
            scores[:, :, : len(ranks)].masked_fill_(far, -math.inf)
        out = torch.softmax(scores, dim=-1) @ v
        return self.linear(out.transpose(0, 1).flatten(1), f"{name}.proj")

    def add_sinks(self, scores: Tensor, v: Tensor, sinks: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [heads, patches, keys] and values with the sinks in them; the window is still to be cut out."""
        if self.sink == "key0":
            first = (ranks == 0).to(scores.dtype)  # its patch takes the sink wherever the window lets it be seen
            return scores + sinks[:, None, None] * first, v
        extra = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat((scores, extra), dim=-1), torch.cat((v, torch.zeros_like(v[:, :1])), dim=1)

    def mlp(self, x: Tensor, block: int) -> Tensor:
        name = f"blocks.{block}.mlp"
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def merge(self, x: Tensor) -> Tensor:
        unit = self.config["spatial_merge_size"] ** 2
        norm = F.layer_norm(x, x.shape[-1:], self.weights["merger.ln_q.weight"], None, EPS)
        hidden = norm.reshape(-1, unit * x.shape[-1]) @ self.weights["merger.mlp.0.weight"].T
        return F.gelu(hidden) @ self.weights["merger.mlp.2.weight"].T

    @torch.no_grad()
    def forward(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Pixels [patches, 1536] in the processor's order, rows and columns of patches: [patches / 4, out_hidden]."""
        merge = self.config["spatial_merge_size"]
        assert len(pixels) == grid[0] * grid[1] and grid[0] % merge == grid[1] % merge == 0, (pixels.shape, grid)
        x = self.embed(pixels)
        turn = turns(*grid, merge, self.head_dim)
        by_column = column_ranks(*grid, merge)
        for block, kind in enumerate(self.config["vit_window_attn_types"]):
            ranks = by_column if kind == 1 else torch.arange(len(x))
            x = x + self.attention(rms_norm(x, self.weights[f"blocks.{block}.norm1.weight"]), block, turn, ranks)
            x = x + self.mlp(rms_norm(x, self.weights[f"blocks.{block}.norm2.weight"]), block)
        return self.merge(x)


def open_oracle(
    model: Path, sink: Sink, settings: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> Oracle:
    """The tower stored in ``model``, with ``settings`` in place of the same keys of its vision_config."""
    config = json.loads((model / "config.json").read_text("utf-8"))["vision_config"] | dict(settings or {})
    kinds = config["vit_window_attn_types"]
    assert config["use_sink"] and config["hidden_act"] == "silu" and len(kinds) == config["depth"]
    assert [block for block, kind in enumerate(kinds) if kind == -1] == config["fullatt_block_indexes"]
    weights = {name: tensor.to(dtype) for name, tensor in read_tensors(model).items()}
    return Oracle(config, weights, sink)


def rows(
    model: Path, case: Case, sink: Sink, dtype: torch.dtype = torch.float32
) -> NDArray[np.float32] | NDArray[np.float64]:
    oracle = open_oracle(model, sink, case.settings, dtype)
    out: NDArray[np.float32] = oracle.forward(torch.from_numpy(case.pixels()).to(dtype), case.grid).numpy()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="The picture tower's rows for the tiny checkpoint, from torch.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    saved: dict[str, NDArray[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make(model, "tiny", args.seed)
        for case in CASES:
            for sink in SINKS:
                key = f"{case.name}_{sink}"
                got, exact = rows(model, case, sink), rows(model, case, sink, torch.float64)
                assert got.dtype == np.float32 and exact.dtype == np.float64
                error = np.abs(got - exact).max()
                saved[f"rows_{key}"], saved[f"error_{key}"] = got, np.array(error)
                print(f"{key}: {got.shape}, {got.min():.2f}..{got.max():.2f}, error {error / np.ptp(exact):.1e}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, **saved)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
