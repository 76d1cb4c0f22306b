"""The picture tower used in training: the release's, tiny. Sinks are added to the first key's score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimo_vk.image import Patches
from tools.checkpoint.geometry import ENCODER_HEAD_DIM, Vision
from tools.demo.groups import Group, Take, Untake, make_group, rope
from tools.demo.patches import MERGE
from tools.demo.shape import VISION, VISION_WINDOW

EPS = 1e-6
UNIT_ROWS = MERGE * MERGE
PATCH_NUMBERS = 3 * 2 * 16 * 16
Rounded = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where the joined rows of several pictures stand."""

    group: Group
    seen: Tensor  # [pictures, 1, L, L] True where a row (patch) may look at a column, padding apart
    near: Tensor  # the same within the window
    by_column: Tensor  # the rows in the column order of the merge units
    by_row: Tensor  # the inverse of it
    angles: Tensor  # [rows, 1, 32]

    @staticmethod
    def of(pictures: Sequence[Patches]) -> Layout:
        lengths = [len(p.pixels) for p in pictures]
        group = make_group(0, lengths)
        place = torch.arange(group.shape[1])
        filled = place[None, :] < torch.tensor(lengths)[:, None]
        seen = filled[:, None, None, :].expand(-1, 1, len(place), -1)
        near = seen & ((place[:, None] - place[None, :]).abs() <= VISION_WINDOW)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        by_column = torch.cat([column_order(p.grid) + start for p, start in zip(pictures, starts, strict=False)])
        angles = torch.cat([turns(p.grid) for p in pictures]).unsqueeze(1)
        return Layout(group, seen, near, by_column, torch.argsort(by_column), angles)


def column_order(grid: tuple[int, int]) -> Tensor:
    """Rows of a picture by columns of merge units; the four rows of a unit stay together."""
    units = torch.arange(grid[0] * grid[1] // UNIT_ROWS).view(grid[0] // MERGE, -1).T.reshape(-1, 1)
    return (units * UNIT_ROWS + torch.arange(UNIT_ROWS)).view(-1)


def turns(grid: tuple[int, int]) -> Tensor:
    """[rows, 32]: each patch's row and column times the 16 frequencies, in the order of the merge units."""
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    quarter = ENCODER_HEAD_DIM // 4
    inv_freq = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    ordered = [
        place.view(grid[0] // MERGE, MERGE, grid[1] // MERGE, MERGE).transpose(1, 2).reshape(-1, 1)
        for place in (row, column)
    ]
    return torch.cat([place.float() * inv_freq.float() for place in ordered], 1)


class Block(nn.Module):
    def __init__(self, v: Vision, kind: int) -> None:
        super().__init__()
        self.v, self.kind = v, kind
        h, q = v.hidden, v.heads * ENCODER_HEAD_DIM
        self.norm1, self.norm2 = nn.Parameter(torch.ones(h)), nn.Parameter(torch.ones(h))
        self.qkv, self.qkv_bias = linear(q + 2 * v.kv_heads * ENCODER_HEAD_DIM, h)
        self.proj, self.proj_bias = linear(h, q, 0.3)
        self.gate, self.gate_bias = linear(v.intermediate, h)
        self.up, self.up_bias = linear(v.intermediate, h)
        self.down, self.down_bias = linear(h, v.intermediate, 0.3)
        self.sinks = nn.Parameter(torch.zeros(v.heads)) if kind != -1 else None

    def qkv_parts(self) -> list[Tensor]:
        """The rows of Q, of K and of V."""
        kv = self.v.kv_heads * ENCODER_HEAD_DIM
        return list(torch.arange(len(self.qkv)).split([self.v.heads * ENCODER_HEAD_DIM, kv, kv]))

    def attention(self, x: Tensor, layout: Layout, cos: Tensor, sin: Tensor, r: Rounded) -> Tensor:
        v, n, group = self.v, len(x), layout.group
        sizes = [v.heads * ENCODER_HEAD_DIM, v.kv_heads * ENCODER_HEAD_DIM, v.kv_heads * ENCODER_HEAD_DIM]
        q, k, value = F.linear(x, r(self.qkv), r(self.qkv_bias)).split(sizes, 1)
        q, k = (rope(t.view(n, -1, ENCODER_HEAD_DIM), cos, sin).reshape(n, -1) for t in (q, k))
        rows = (Take.apply(t, group.to_padded, group.to_joined, 1) for t in (q, k, value))
        q, k, value = (t.view(*group.shape, -1, ENCODER_HEAD_DIM).transpose(1, 2) for t in rows)
        repeat = v.heads // v.kv_heads
        k, value = k.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scores = q @ k.mT * ENCODER_HEAD_DIM**-0.5
        if self.sinks is not None:
            first = F.one_hot(torch.tensor(0), group.shape[1])
            scores = scores + r(self.sinks).view(-1, 1, 1) * first
        hidden = ~(layout.seen if self.sinks is None else layout.near)
        out = scores.masked_fill(hidden, -1e30).softmax(-1) @ value
        out = Untake.apply(out.transpose(1, 2).flatten(2).flatten(0, 1), group.to_joined, group.to_padded)
        return F.linear(out, r(self.proj), r(self.proj_bias))

    def forward(self, x: Tensor, layout: Layout, cos: Tensor, sin: Tensor, r: Rounded) -> Tensor:
        x = x + self.attention(F.rms_norm(x, x.shape[1:], r(self.norm1), EPS), layout, cos, sin, r)
        y = F.rms_norm(x, x.shape[1:], r(self.norm2), EPS)
        inner = F.silu(F.linear(y, r(self.gate), r(self.gate_bias))) * F.linear(y, r(self.up), r(self.up_bias))
        return x + F.linear(inner, r(self.down), r(self.down_bias))


def linear(rows: int, columns: int, scale: float = 1.0) -> tuple[nn.Parameter, nn.Parameter]:
    """A random matrix and its bias of zeros."""
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5 * scale), nn.Parameter(torch.zeros(rows))


class Tower(nn.Module):
    """Patches to rows that stand in the language model for the embedding rows of the picture's tokens."""

    def __init__(self, out_size: int, vision: Vision = VISION) -> None:
        super().__init__()
        self.vision = vision
        merged = vision.hidden * UNIT_ROWS
        self.patch_embed = nn.Parameter(torch.randn(vision.hidden, PATCH_NUMBERS) * PATCH_NUMBERS**-0.5)
        self.blocks = nn.ModuleList(Block(vision, kind) for kind in vision.window_types)
        self.ln_q = nn.Parameter(torch.ones(vision.hidden))
        self.merge_in = nn.Parameter(torch.randn(merged, merged) * merged**-0.5)
        self.merge_out = nn.Parameter(torch.randn(out_size, merged) * merged**-0.5)

    def forward(self, pictures: Sequence[Patches], r: Rounded) -> Tensor:
        """[tokens of all pictures, out_size], one picture after the other."""
        layout = Layout.of(pictures)
        x = F.linear(torch.from_numpy(np.concatenate([p.pixels for p in pictures])), r(self.patch_embed))
        cos, sin = layout.angles.cos(), layout.angles.sin()
        turned = (cos[layout.by_column], sin[layout.by_column])
        columns = False
        for block in self.blocks:
            if (block.kind == 1) != columns:
                x = x[layout.by_row if columns else layout.by_column]
                columns = not columns
            x = block(x, layout, *(turned if columns else (cos, sin)), r)
        x = x[layout.by_row] if columns else x
        y = F.layer_norm(x, x.shape[1:], r(self.ln_q), None, EPS)
        y = F.gelu(F.linear(y.view(-1, UNIT_ROWS * y.shape[1]), r(self.merge_in)))
        return F.linear(y, r(self.merge_out))
