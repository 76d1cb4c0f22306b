"""The tower's start: its rows learn to be like the words for what a picture shows, before the language model sees them.

For each picture the mean of the tower's rows, times the embedding, should be large for the pieces of the words that
describe it. So the rows begin as something the language model can already read.
"""

from __future__ import annotations

import time

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
from tools.demo.tower import Tower

SKILLS = ("shapes", "shapes", "amounts", "sides", "reading", "reading")
PICTURES = 24  # a step


def sights(tokenizer: Tokenizer, seed: int, step: int) -> tuple[list[Patches], Tensor, Tensor]:
    """Pictures, and for each piece of their descriptions: the picture it belongs to, its id."""
    draw = Draw(seed * 1_000_003 + step)
    pictures, which, ids = [], [], []
    for i in range(PICTURES):
        picture, seen, _ = SIGHTS[draw.pick(SKILLS)](draw)
        pictures.append(patches_of(paint(picture)))
        pieces = set(tokenizer.encode(" " + seen, add_special_tokens=False).ids)
        which += [i] * len(pieces)
        ids += sorted(pieces)
    return pictures, torch.tensor(which), torch.tensor(ids)


def described(tower: Tower, embed: Tensor, found: tuple[list[Patches], Tensor, Tensor]) -> Tensor:
    """How badly the pictures' rows tell the pieces of their descriptions, all pieces of a picture alike."""
    pictures, which, ids = found
    rows = tower(pictures, lambda weight: weight)
    mean = torch.stack([part.mean(0) for part in rows.split([p.tokens for p in pictures])])
    logits = (mean @ embed.T).log_softmax(-1)
    share = 1.0 / torch.bincount(which, minlength=len(pictures)).float()
    return -(logits[which, ids] * share[which]).sum() / len(pictures)


def first_sight(net: Network, tokenizer: Tokenizer, seed: int, steps: int = 1800) -> Tower:
    """A tower for ``net``, trained by itself; ``net`` stays as it is."""
    tower = Tower(net.shape.hidden_size)
    alone = Network(net.shape, tower)
    optimiser = Muon(alone, only="tower.")
    embed, began = net.embed.detach(), time.monotonic()
    for step in range(steps):
        loss = described(tower, embed, sights(tokenizer, seed, step))
        for parameter in tower.parameters():
            parameter.grad = None
        loss.backward()
        optimiser.step(min(1.0, (step + 1) / 50, (steps - step) / (steps / 2)))
        if step % 50 == 49:
            print(f"first sight {step + 1}: {float(loss.detach()):.3f}, {time.monotonic() - began:.0f}s", flush=True)
    return tower
