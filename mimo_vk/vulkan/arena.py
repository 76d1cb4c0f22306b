"""The memory that the program and its device process share: rows of x, pairs, results, experts on their way."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, U8
from mimo_vk.vulkan.layout import ROUND, SlotLayout

ALIGN = 4096


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


class Arena:
    """Views of one shared mapping.

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
        wanted: dict[str, tuple[type, tuple[int, int]]] = {
            "x": (np.float32, (shape.max_rows, layout.rounds * ROUND)),
            "pairs": (np.uint32, (shape.max_pairs, 2)),
            "y": (np.float32, (shape.max_pairs, shape.hidden)),
            "staging": (np.uint8, (shape.staging, layout.expert_bytes)),
        }
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
