"""The memory that the program and its device process share: rows of x, pairs, results, weights on their way."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, U8
from mimo_vk.vision import ROWS
from mimo_vk.vulkan.dense_layout import DenseShape
from mimo_vk.vulkan.layout import ROUND, SlotLayout

ALIGN = 4096
BULK_WORDS = 1 << 22  # of dense weights on their way, at a time
HEAD_ROWS = 16  # of logits at a time

Wanted = dict[str, tuple[type, tuple[int, int]]]  # name: type, rows and columns


@dataclass(frozen=True)
class TierShape:
    """The sizes that both processes lay their memory out by."""

    hidden: int
    inner: int
    top_k: int
    max_rows: int  # of x in one step
    staging: int  # experts on their way at once

    @property
    def max_pairs(self) -> int:
        """(row, choice) pairs in one step."""
        return self.max_rows * self.top_k

    @property
    def layout(self) -> SlotLayout:
        return SlotLayout(self.hidden, self.inner)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TierShape:
        return cls(**json.loads(text))


class SharedArrays:
    """Named arrays in one mapping that both processes have; each is an attribute of the subclass."""

    def __init__(self, wanted: Wanted, fd: int | None = None) -> None:
        """Make the memory, or (with ``fd``) map what the other process made. ``fd`` is this object's from then on."""
        starts, size = [], 0
        for dtype, (rows, columns) in wanted.values():
            starts.append(size)
            size += -(-rows * columns * np.dtype(dtype).itemsize // ALIGN) * ALIGN
        if fd is None:
            fd = os.memfd_create("mimo-vk", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.fd = fd
        self.nbytes = size
        memory = mmap.mmap(fd, size)
        for (name, (dtype, dimensions)), start in zip(wanted.items(), starts, strict=True):
            count = dimensions[0] * dimensions[1]
            setattr(self, name, np.frombuffer(memory, dtype, count, start).reshape(dimensions))

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arena(SharedArrays):
    """What steps of the tier pass between the processes.

    ``x`` float32 [max_rows, rounds*256] in the shaders' order; ``pairs`` uint32 [max_pairs, 2] (slot, row);
    ``y`` float32 [max_pairs, hidden]; ``staging`` uint8 [staging, expert_bytes] as ``SlotLayout.store`` writes it.
    """

    x: F32
    pairs: NDArray[np.uint32]
    y: F32
    staging: U8

    def __init__(self, shape: TierShape, fd: int | None = None) -> None:
        """Make the memory, or (with ``fd``) map what the other process made. ``fd`` is this object's from then on."""
        layout = shape.layout
        wanted: Wanted = {
            "x": (np.float32, (shape.max_rows, layout.rounds * ROUND)),
            "pairs": (np.uint32, (shape.max_pairs, 2)),
            "y": (np.float32, (shape.max_pairs, shape.hidden)),
            "staging": (np.uint8, (shape.staging, layout.expert_bytes)),
        }
        super().__init__(wanted, fd)


class DenseArena(SharedArrays):
    """What the dense layers pass between the processes, rows first.

    ``h`` the residual, on its way in or out, and what the head takes; ``x`` the normed rows and ``scores`` the router's
    logits for the experts; ``y`` what the experts gave; ``logits``; ``bulk`` weights on their way, in two halves. The
    tower's, where it is there: ``patches`` on their way in or out; ``turns``, their angles' cosines, then their sines.
    """

    h: F32
    x: F32
    scores: F32
    y: F32
    logits: F32
    bulk: NDArray[np.uint32]
    patches: F32
    turns: F32

    def __init__(self, shape: DenseShape, fd: int | None = None) -> None:
        """As ``SharedArrays``."""
        rows, hidden = shape.max_rows, shape.hidden
        wanted: Wanted = {
            "h": (np.float32, (max(rows, HEAD_ROWS), hidden)),
            "x": (np.float32, (rows, hidden)),
            "scores": (np.float32, (rows, max(1, shape.experts))),
            "y": (np.float32, (rows, hidden)),
            "logits": (np.float32, (HEAD_ROWS, shape.vocab)),
            "bulk": (np.uint32, (2, BULK_WORDS)),
        }
        if shape.tower is not None:
            tower = shape.tower.config
            widest = max(tower.patch_values, tower.merge_unit * tower.hidden_size, tower.out_hidden_size)
            wanted |= {"patches": (np.float32, (ROWS, widest)), "turns": (np.float32, (ROWS, tower.head_dim))}
        super().__init__(wanted, fd)
