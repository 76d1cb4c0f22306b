"""Sequences of token ids to a Batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tools.demo.groups import make_group
from tools.demo.network import Batch
from tools.demo.render import Example


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
    predict, targets, tags, places, row = [], [], [], [], 0
    for example in examples:
        for i in range(1, len(example.ids)):
            if example.counts[i]:
                predict.append(row + i - 1)
                targets.append(example.ids[i])
                tags.append(example.tag)
        places += [row + place for place in example.places]
        row += len(example.ids)
    return Batch(
        torch.tensor([i for e in examples for i in e.ids]),
        torch.cat([torch.arange(length) for length in lengths]),
        groups,
        torch.tensor(predict, dtype=torch.long),
        torch.tensor(targets, dtype=torch.long),
        torch.tensor(tags, dtype=torch.long),
        [picture for example in examples for picture in example.pictures],
        torch.tensor(places, dtype=torch.long),
        [ids for example in examples for ids in example.seen],
    )
