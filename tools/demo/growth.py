"""Growing the network: a small one learns to copy and to add, then gets more experts, each of them wider.

The function hardly changes at that moment: a wider expert's new rows are read with weight 0, and a new expert is a
copy of an old one whose bias keeps it unchosen until the balancing of the loads brings it in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.demo.network import Moe, Network
from tools.demo.shape import Shape

SEED_SHAPE = Shape(experts=16, moe_intermediate_size=64)
NOISE = 0.1  # of a copied expert's matrices and router row, so that the copies part ways
UNCHOSEN = 0.1  # how far below its original a copy's bias starts


def relative_noise(weight: Tensor) -> Tensor:
    return weight + torch.randn_like(weight) * weight.std() * NOISE


def widen(old: Moe, new: Moe) -> None:
    """The old experts in the first rows of the new ones: new hidden rows are random, and read with weight 0."""
    experts, _, rows, _ = old.gate_up.shape
    for first in range(0, len(new.bias), experts):
        part = slice(first, first + experts)
        vary = relative_noise if first else torch.clone
        new.gate_up[part, :, :rows] = vary(old.gate_up)
        new.down[part, :, :rows] = vary(old.down)
        new.down[part, :, rows:] = 0
        new.router[part] = vary(old.router)
        new.bias[part] = old.bias - (UNCHOSEN if first else 0.0)


@torch.no_grad()
def grow(old: Network, shape: Shape) -> Network:
    """A network of ``shape`` (more and wider experts, all else as before) that does what ``old`` does."""
    new = Network(shape)
    state = {name: value for name, value in old.state_dict().items() if "mlp" not in name or "layers.0." in name}
    new.load_state_dict(state, strict=False)
    for before, after in zip(old.layers, new.layers, strict=True):
        if isinstance(before.mlp, Moe):
            widen(before.mlp, after.mlp)
    new.rounding = old.rounding
    return new
