"""Sequences of token ids to a Batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tools.demo.network import Batch, Group
from tools.demo.render import Example


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


def cut(lengths: Sequence[int], waste: float = 1.25) -> list[tuple[int, int]]:
    """Split sorted lengths into runs in which the longest is at most ``waste`` times the shortest (plus 8)."""
    runs, first = [], 0
    for i, length in enumerate(lengths):
        if length > lengths[first] * waste + 8:
            runs.append((first, i))
            first = i
    return [*runs, (first, len(lengths))]


def make_batch(examples: Sequence[Example]) -> Batch:
    examples = sorted(examples, key=lambda e: len(e.ids))
    lengths = [len(e.ids) for e in examples]
    groups, start = [], 0
    for first, last in cut(lengths):
        group = make_group(start, lengths[first:last])
        groups.append(group)
        start = group.end
    predict, targets, tags, row = [], [], [], 0
    for example in examples:
        for i in range(1, len(example.ids)):
            if example.counts[i]:
                predict.append(row + i - 1)
                targets.append(example.ids[i])
                tags.append(example.tag)
        row += len(example.ids)
    return Batch(
        torch.tensor([i for e in examples for i in e.ids]),
        torch.cat([torch.arange(length) for length in lengths]),
        groups,
        torch.tensor(predict, dtype=torch.long),
        torch.tensor(targets, dtype=torch.long),
        torch.tensor(tags, dtype=torch.long),
    )
