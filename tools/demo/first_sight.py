"""The tower's start: its rows learn to be like the words for what a picture shows, before the language model sees them.

For each picture the mean of the tower's rows, times the embedding, should be large for the pieces of the words that
describe it. So the rows begin as something the language model can already read; and the same loss goes on holding
them there while both are trained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mimo_vk.image import Patches
from tools.demo.draw import Draw
from tools.demo.looks import SIGHTS
from tools.demo.muon import Muon
from tools.demo.network import Network
from tools.demo.patches import patches_of
from tools.demo.pictures import paint
from tools.demo.render import pieces
from tools.demo.tower import Tower

SKILLS = ("shapes", "shapes", "amounts", "sides", "reading", "reading")
PICTURES = 24  # a step


def sights(tokenizer: Tokenizer, seed: int, step: int) -> tuple[list[Patches], list[list[int]]]:
    """Pictures, and the pieces of what is on each."""
    draw = Draw(seed * 1_000_003 + step)
    made = [SIGHTS[draw.pick(SKILLS)](draw) for _ in range(PICTURES)]
    return [patches_of(paint(sight[0])) for sight in made], [
        pieces(tokenizer, f"{sight[1]} {sight[3]}") for sight in made
    ]


def described(rows: Tensor, pictures: Sequence[Patches], seen: Sequence[Sequence[int]], embed: Tensor) -> Tensor:
    """How badly the tower's rows tell the pieces of the descriptions, all pieces of a picture alike."""
    mean = torch.stack([part.mean(0) for part in rows.split([p.tokens for p in pictures])])
    logits = (mean @ embed.T).log_softmax(-1)
    which = torch.tensor([i for i, ids in enumerate(seen) for _ in ids])
    share = torch.tensor([1.0 / len(ids) for ids in seen for _ in ids])
    return -(logits[which, torch.tensor([piece for ids in seen for piece in ids])] * share).sum() / len(seen)


def first_sight(net: Network, tokenizer: Tokenizer, seed: int, steps: int = 1800) -> Tower:
    """A tower for ``net``, trained by itself; ``net`` stays as it is."""
    tower = Tower(net.shape.hidden_size)
    optimiser = Muon(Network(net.shape, tower), only="tower.")
    embed, began = net.embed.detach(), time.monotonic()
    for step in range(steps):
        pictures, seen = sights(tokenizer, seed, step)
        loss = described(tower(pictures, lambda weight: weight), pictures, seen, embed)
        for parameter in tower.parameters():
            parameter.grad = None
        loss.backward()
        optimiser.step(min(1.0, (step + 1) / 50, (steps - step) / (steps / 2)))
        if step % 50 == 49:
            print(f"first sight {step + 1}: {float(loss.detach()):.3f}, {time.monotonic() - began:.0f}s", flush=True)
    return tower
