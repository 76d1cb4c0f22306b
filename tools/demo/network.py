"""The forward pass used in training: the same mathematics as the engine, batched over sequences of unequal length.

Linear layers run on the joined tokens of all sequences without padding; only attention pads, within
groups of sequences of similar length. The experts run one after another on the rows routed to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimo_vk.image import Patches
from tools.demo.groups import Group, Take, Untake, rope
from tools.demo.rounding import bf16_round, fp8_round, mxfp4_round
from tools.demo.shape import Shape
from tools.demo.tower import Tower


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [n]
    positions: Tensor  # [n]
    groups: list[Group]
    predict: Tensor  # rows whose next token counts
    targets: Tensor  # that next token
    tags: Tensor  # the skill of each of these, for reports
    pictures: list[Patches] = field(default_factory=list)
    places: Tensor | None = None  # rows that the pictures' tokens take, in their order
    seen: list[list[int]] = field(default_factory=list)  # the pieces of what is on each picture


class RoundTo(torch.autograd.Function):
    """Rounded forward, straight through backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: str, chunks: int) -> Tensor:
        if kind == "mxfp4":
            return mxfp4_round(weight)
        return fp8_round(weight, chunks) if kind == "fp8" else bf16_round(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.kv = shape, shape.kv_heads(layer)
        self.window = shape.window if shape.pattern[layer] else None
        self.theta = shape.window_theta if self.window else shape.full_theta
        self.qkv_proj = nn.Parameter(torch.randn(shape.qkv_rows(layer), shape.hidden_size) * shape.hidden_size**-0.5)
        width = shape.num_heads * shape.v_head_dim
        self.o_proj = nn.Parameter(torch.randn(shape.hidden_size, width) * width**-0.5 * 0.3)
        self.sink = nn.Parameter(torch.zeros(shape.num_heads)) if self.window else None

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Undo the chunks [Q_0|K_0|V_0|Q_1|...] of the fused rows."""
        s, n = self.shape, qkv.shape[0]
        parts = qkv.view(n, s.chunks, -1)
        heads, kv = s.num_heads // s.chunks, self.kv // s.chunks
        sizes = [heads * s.head_dim, kv * s.head_dim, kv * s.v_head_dim]
        q, k, v = parts.split(sizes, dim=2)
        return (
            q.reshape(n, s.num_heads, s.head_dim),
            k.reshape(n, self.kv, s.head_dim),
            v.reshape(n, self.kv * s.v_head_dim) * s.value_scale,
        )

    def causal(self, length: int) -> Tensor:
        """Added to the scores of a full layer: 0 where a query (row) sees a key (column), else -inf."""
        place = torch.arange(length)
        return torch.zeros(length, length).masked_fill(place[:, None] < place[None, :], float("-inf"))

    def bias(self, blocks: int, size: int, sink: Tensor) -> Tensor:
        """Added to a window layer's scores: [blocks, heads, size, window + size + 1], the last column for the sink."""
        assert self.window
        key = torch.arange(-self.window, size)
        distance = torch.arange(size)[:, None] - key[None, :]
        hidden = ((distance < 0) | (distance >= self.window)).repeat(blocks, 1, 1, 1)
        hidden[0] |= key < 0  # nothing stands before the first block
        heads = self.shape.num_heads
        seen = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")).expand(-1, heads, -1, -1)
        return torch.cat((seen, sink.view(-1, 1, 1).expand(blocks, heads, size, 1)), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, L, heads*hd], k [b, L, kv*hd], v [b, L, kv*vd] to [b, L, heads*vd]. Causal over all of L."""
        s = self.shape
        b, length = q.shape[:2]
        repeat = s.num_heads // self.kv
        q = q.view(b, length, self.kv, repeat, s.head_dim).permute(0, 2, 3, 1, 4).reshape(b, self.kv, -1, s.head_dim)
        k = k.view(b, length, self.kv, s.head_dim).permute(0, 2, 3, 1)
        v = v.view(b, length, self.kv, s.v_head_dim).transpose(1, 2)
        scores = (q * s.head_dim**-0.5 @ k).view(b, s.num_heads, length, length)
        weights = scores.add_(self.causal(length)).softmax(-1)
        out = weights.view(b, self.kv, repeat * length, length) @ v
        return out.view(b, self.kv, repeat, length, s.v_head_dim).permute(0, 3, 1, 2, 4).reshape(b, length, -1)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        """The same within the window: blocks of ``window`` rows, each against its keys and those of the block before.

        A key and a value of zeros close each block: their score is the bias's last column, the sink.
        """
        s, w = self.shape, self.window
        assert w
        b, length = q.shape[:2]
        size = min(w, length)
        blocks, repeat = -(-length // size), s.num_heads // self.kv
        q, k, v = (F.pad(t, (0, 0, 0, blocks * size - length)) for t in (q, k, v))
        q = (
            q.view(b, blocks, size, self.kv, repeat, s.head_dim)
            .permute(0, 1, 3, 4, 2, 5)
            .reshape(b, blocks, self.kv, -1, s.head_dim)
        )
        k, v = (self.with_previous(t.view(b, blocks, size, self.kv, -1).permute(0, 1, 3, 2, 4), w) for t in (k, v))
        scores = (q * s.head_dim**-0.5 @ k.mT).view(b, blocks, s.num_heads, size, w + size + 1)
        weights = scores.add_(self.bias(blocks, size, sink)).softmax(-1)
        out = weights.view(b, blocks, self.kv, repeat * size, -1) @ v
        out = (
            out.view(b, blocks, self.kv, repeat, size, s.v_head_dim)
            .permute(0, 1, 4, 2, 3, 5)
            .reshape(b, blocks * size, -1)
        )
        return out[:, :length]

    @staticmethod
    def with_previous(x: Tensor, window: int) -> Tensor:
        """x [b, blocks, kv, size, d] to [b, blocks, kv, window + size + 1, d]: what came before, x, a row of zeros."""
        before = torch.zeros_like(x[:, :1, :, :1]).expand(-1, -1, -1, window, -1)
        if x.shape[1] > 1:
            before = torch.cat((before, x[:, :-1]), 1)
        return torch.cat((before, x, torch.zeros_like(x[:, :, :, :1])), 3)

    def forward(self, x: Tensor, batch: Batch, net: Network) -> Tensor:
        s, n = self.shape, x.shape[0]
        q, k, v = self.split(F.linear(x, net.rounded(self.qkv_proj, "fp8", s.chunks)))
        cos, sin = net.tables(self.theta, batch.positions)
        q, k = rope(q, cos, sin).view(n, -1), rope(k, cos, sin).view(n, -1)
        sink = None if self.sink is None else net.rounded(self.sink, "bf16")
        outs = []
        sizes = [group.end - group.start for group in batch.groups]
        for group, *rows in zip(batch.groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            q_, k_, v_ = (Take.apply(t, group.to_padded, group.to_joined, 1).view(*group.shape, -1) for t in rows)
            out = self.attend(q_, k_, v_) if sink is None else self.attend_window(q_, k_, v_, sink)
            outs.append(Untake.apply(out.flatten(0, 1), group.to_joined, group.to_padded))
        return F.linear(torch.cat(outs), net.rounded(self.o_proj, "bf16"))


class DenseMlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, i = shape.hidden_size, shape.intermediate_size
        self.gate = nn.Parameter(torch.randn(i, h) * h**-0.5)
        self.up = nn.Parameter(torch.randn(i, h) * h**-0.5)
        self.down = nn.Parameter(torch.randn(h, i) * i**-0.5 * 0.3)

    def forward(self, x: Tensor, net: Network) -> Tensor:
        gate, up, down = (net.rounded(w, "fp8") for w in (self.gate, self.up, self.down))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Moe(nn.Module):
    bias: Tensor
    load: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, i, e = shape.hidden_size, shape.moe_intermediate_size, shape.experts
        self.top_k = shape.experts_per_token
        self.router = nn.Parameter(torch.randn(e, h) * h**-0.5)
        self.gate_up = nn.Parameter(torch.randn(e, 2, i, h) * h**-0.5)
        self.down = nn.Parameter(torch.randn(e, h, i) * i**-0.5 * 0.3)
        self.register_buffer("bias", torch.zeros(e))
        self.register_buffer("load", torch.zeros(e), persistent=False)

    def route(self, x: Tensor, net: Network) -> tuple[Tensor, Tensor]:
        """Experts [n, k], best first, and their weights: the chosen scores, without the bias, over their sum."""
        scores = torch.sigmoid(F.linear(x, net.rounded(self.router, "bf16")))
        chosen = torch.topk(scores.detach() + self.bias, self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20)

    def forward(self, x: Tensor, net: Network) -> Tensor:
        n, h = x.shape
        chosen, weights = self.route(x, net)
        order = torch.argsort(chosen.view(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        counts = torch.bincount(chosen.view(-1), minlength=self.bias.numel())
        self.load = counts.float()
        gate_up, down = net.rounded(self.gate_up, "mxfp4"), net.rounded(self.down, "mxfp4")
        parts = Take.apply(x, order // self.top_k, inverse, self.top_k).split(counts.tolist())
        outs = []
        for part, into, out in zip(parts, gate_up.flatten(1, 2).unbind(0), down.unbind(0), strict=True):
            gate, up = F.linear(part, into).chunk(2, -1)
            outs.append(F.linear(F.silu(gate) * up, out))
        y = Take.apply(torch.cat(outs), inverse, order, 1).view(n, self.top_k, h)
        return (weights.unsqueeze(1) @ y).squeeze(1)


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.eps = shape.eps
        self.input_norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.attention = Attention(shape, layer)
        self.post_attention_norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.mlp: DenseMlp | Moe = Moe(shape) if shape.is_moe(layer) else DenseMlp(shape)

    def forward(self, x: Tensor, batch: Batch, net: Network) -> Tensor:
        x = x + self.attention(rms_norm(x, net.rounded(self.input_norm, "bf16"), self.eps), batch, net)
        return x + self.mlp(rms_norm(x, net.rounded(self.post_attention_norm, "bf16"), self.eps), net)


class Network(nn.Module):
    """``rounding`` decides whether weights take part as they will be stored."""

    def __init__(self, shape: Shape, tower: Tower | None = None) -> None:
        super().__init__()
        self.shape, self.rounding = shape, False
        self.tower = tower
        self.sights: Tensor | None = None  # the tower's rows of the last pass
        self.embed = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.lm_head = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.02)

    def rounded(self, weight: Tensor, kind: str, chunks: int = 1) -> Tensor:
        return RoundTo.apply(weight, kind, chunks) if self.rounding else weight

    def tables(self, theta: float, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [n, 1, d/2]."""
        d = self.shape.rope_dim
        inv_freq = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angle = positions[:, None].float() * inv_freq.float()
        return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)

    def hidden(self, batch: Batch) -> Tensor:
        x = F.embedding(batch.ids, self.rounded(self.embed, "bf16"))
        if batch.pictures:
            assert self.tower is not None and batch.places is not None
            self.sights = self.tower(batch.pictures, lambda weight: self.rounded(weight, "bf16"))
            x = x.index_copy(0, batch.places, self.sights)
        for layer in self.layers:
            x = layer(x, batch, self)
        return rms_norm(x, self.rounded(self.norm, "bf16"), self.shape.eps)

    def logits(self, batch: Batch, rows: Tensor) -> Tensor:
        return F.linear(self.hidden(batch).index_select(0, rows), self.rounded(self.lm_head, "bf16"))


def restored(weights: dict[str, Tensor]) -> Network:
    """The grown network with these weights, with its tower if they have one."""
    shape = Shape()
    net = Network(shape, Tower(shape.hidden_size) if any(name.startswith("tower.") for name in weights) else None)
    net.load_state_dict(weights)
    return net
