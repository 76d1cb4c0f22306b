"""The optimiser: Muon for the matrices inside the layers, AdamW for everything else.

Muon (Jordan and others, 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of a matrix
by a few Newton-Schulz steps. A fused qkv is cut into its Q, K and V rows first; each expert's matrices stand alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tools.demo.network import Attention, Moe, Network

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """About the nearest matrix with all singular values 1, for each matrix of [..., rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def qkv_parts(attention: Attention) -> list[Tensor]:
    """The rows of Q, of K and of V in the fused matrix."""
    shape, kv = attention.shape, attention.kv
    sizes = [shape.num_heads * shape.head_dim, kv * shape.head_dim, kv * shape.v_head_dim]
    chunk = torch.arange(attention.qkv_proj.shape[0]).view(shape.chunks, -1)
    return [part.reshape(-1) for part in chunk.split([size // shape.chunks for size in sizes], dim=1)]


def is_inner_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith(("layers.", "tower.")) and parameter.dim() > 1 and "router" not in name


class Muon:
    """Both halves, with one learning-rate factor per step. State is by parameter name, so that it can be saved.

    Of the network's parameters it takes those whose name begins with ``only``; ``tower_pace`` times the learning rate
    is the tower's.
    """

    def __init__(
        self,
        net: Network,
        lr: float = 0.02,
        adam_lr: float = 0.003,
        decay: float = 0.05,
        momentum: float = 0.95,
        only: str = "",
        tower_pace: float = 1.0,
    ) -> None:
        self.tower_pace = tower_pace
        self.lr, self.adam_lr, self.decay, self.momentum = lr, adam_lr, decay, momentum
        parameters = {n: p for n, p in net.named_parameters() if n.startswith(only)}
        self.matrices = {n: p for n, p in parameters.items() if is_inner_matrix(n, p)}
        self.others = {n: p for n, p in parameters.items() if n not in self.matrices}
        self.parts = {
            f"layers.{i}.attention.qkv_proj": qkv_parts(layer.attention) for i, layer in enumerate(net.layers)
        }
        if net.tower is not None:
            parts = [block.qkv_parts() for block in net.tower.blocks]
            self.parts |= {f"tower.blocks.{i}.qkv": part for i, part in enumerate(parts)}
        self.buffers: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        self.first: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in self.others.items()}
        self.second: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in self.others.items()}
        self.steps = 0

    def state(self) -> dict[str, object]:
        return {"buffers": self.buffers, "first": self.first, "second": self.second, "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; what it does not know yet (a tower just added) starts anew."""
        for name in ("buffers", "first", "second"):
            setattr(self, name, getattr(self, name) | state[name])
        self.steps = state["steps"]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        self.steps += 1
        for name, weight in self.matrices.items():
            if weight.grad is not None:  # the tower has none in a step without pictures
                self._muon(name, weight, self.lr * factor * self._pace(name))
        for name, weight in self.others.items():
            if weight.grad is not None:
                self._adam(name, weight, self.adam_lr * factor * self._pace(name))

    def _pace(self, name: str) -> float:
        return self.tower_pace if name.startswith("tower.") else 1.0

    def _muon(self, name: str, weight: Tensor, lr: float) -> None:
        grad = weight.grad
        assert grad is not None
        buffer = self.buffers[name]
        buffer.lerp_(grad, 1 - self.momentum)
        direction = grad.lerp(buffer, self.momentum)
        weight.mul_(1 - lr * self.decay)
        if name in self.parts:
            for rows in self.parts[name]:
                part = direction[rows]
                weight.index_add_(
                    0, rows, orthogonalise(part), alpha=-lr * max(1.0, part.shape[0] / part.shape[1]) ** 0.5
                )
            return
        weight.add_(orthogonalise(direction), alpha=-lr * max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5)

    def _adam(self, name: str, weight: Tensor, lr: float) -> None:
        grad = weight.grad
        assert grad is not None
        first, second = self.first[name], self.second[name]
        first.lerp_(grad, 0.1)
        second.lerp_(grad * grad, 0.05)
        mean, square = first / (1 - 0.9**self.steps), second / (1 - 0.95**self.steps)
        weight.addcdiv_(mean, square.sqrt() + 1e-8, value=-lr)


@torch.no_grad()
def balance(net: Network, speed: float) -> float:
    """Move each router's bias by ``speed`` towards an even load; the largest load over the mean, as a measure."""
    worst = 0.0
    for layer in net.layers:
        if isinstance(layer.mlp, Moe):
            load = layer.mlp.load
            layer.mlp.bias += speed * torch.sign(load.mean() - load)
            worst = max(worst, float(load.max() / load.mean()))
    return worst
