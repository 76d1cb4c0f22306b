"""Sequences of unequal length: joined rows for the linear layers, padded places for attention, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Sequences of similar length, at rows start..end of the joined tokens."""

    start: int
    end: int
    shape: tuple[int, int]  # sequences, padded length
    to_padded: Tensor  # [sequences*length] row of the group that fills each padded place; row 0 fills what is over
    to_joined: Tensor  # [end - start] padded place of each row


def make_group(start: int, lengths: Sequence[int]) -> Group:
    width = max(lengths)
    to_padded = torch.zeros(len(lengths), width, dtype=torch.long)
    to_joined = []
    row = 0
    for i, length in enumerate(lengths):
        to_padded[i, :length] = torch.arange(row, row + length)
        to_joined.append(torch.arange(length) + i * width)
        row += length
    return Group(start, start + row, (len(lengths), width), to_padded.view(-1), torch.cat(to_joined))


class Take(torch.autograd.Function):
    """Rows ``index`` of x. Backward gathers too: ``inverse`` [n*copies] says where each row of x went."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grad.index_select(0, inverse)
        if ctx.copies > 1:
            back = back.view(-1, ctx.copies, grad.shape[1]).sum(1)
        return back, None, None, None


class Untake(torch.autograd.Function):
    """Padded places back to joined rows; the gradient of the padding is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_joined: Tensor, to_padded: Tensor) -> Tensor:
        ctx.save_for_backward(to_joined)
        ctx.places = x.shape[0]
        return x.index_select(0, to_joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (to_joined,) = ctx.saved_tensors
        back = grad.new_zeros(ctx.places, grad.shape[1])
        back.index_copy_(0, to_joined, grad)
        return back, None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, hd]; tables [n, 1, d/2]. Pairs (i, i + d/2) of the first d dims turn."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
