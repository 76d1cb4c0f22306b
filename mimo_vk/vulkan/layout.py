"""How an expert lies in a slot of a slab, and a row of x beside it, so that neighbouring loads are neighbouring bytes.

Units: a word is 4 bytes (8 codes), an item 16 bytes (the words of 4 neighbouring lanes, a lane quad), a round 32 words,
one a lane (256 columns). Columns and rounds that a matrix lacks are zeros, which change no sum. 8 invocations share a
tile of 32 rows, 4 rows each, so that they read neighbouring items: a matrix [N, K] is stored as [tile][lane quad in the
tree's order][round][row of 4][invocation] items, its scales as [tile][lane quad, same order][round][invocation][row of
4] bytes; a row of x as [round][lane quad][column of the word][lane of the quad] floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, U8, Expert, MatrixMXFP4

ROUND = 256  # columns
TILE = 32  # rows
ROWS = 4  # of an invocation
TREE_ORDER = (0, 4, 2, 6, 1, 5, 3, 7)  # so that a stack of partial sums gives the tree's order
SLOT_ALIGN = 64
ITEM = np.complex128  # any type of 16 bytes: numpy moves it as a whole


def rounds_of(columns: int) -> int:
    """Rounds of 256 columns, the last one possibly short."""
    return -(-columns // ROUND)


@dataclass(frozen=True)
class SlotLayout:
    """Where an expert's matrices lie in a slot, for gate and up [inner, hidden] and down [hidden, inner]."""

    hidden: int
    inner: int

    def __post_init__(self) -> None:
        assert self.hidden % 32 == 0 and self.inner % 32 == 0, (self.hidden, self.inner)

    @property
    def rounds(self) -> int:
        """Of gate's and up's columns."""
        return rounds_of(self.hidden)

    @property
    def act_rounds(self) -> int:
        """Of down's columns."""
        return rounds_of(self.inner)

    @property
    def gate_items(self) -> int:
        return self.inner * self.rounds * 8

    @property
    def down_items(self) -> int:
        return self.hidden * self.act_rounds * 8

    @property
    def code_bytes(self) -> int:
        """Gate's, up's and down's codes, in that order; the scales of the three follow."""
        return 16 * (2 * self.gate_items + self.down_items)

    @property
    def slot_bytes(self) -> int:
        """The whole slot."""
        used = self.code_bytes + 2 * self.gate_items + self.down_items
        return -(-used // SLOT_ALIGN) * SLOT_ALIGN

    @property
    def expert_bytes(self) -> int:
        """The expert's six arrays as stored in a file, without padding."""
        return 3 * self.hidden * self.inner // 32 * 17

    def gate_up_push(self) -> dict[str, int]:
        """The constants of expert_gate_up_mxfp4, by name."""
        scales = self.code_bytes // 4
        return {
            "rounds": self.rounds,
            "tiles": self.inner // TILE,
            "act_rounds": self.act_rounds,
            "slot_stride": self.slot_bytes // 16,
            "gate_codes": 0,
            "up_codes": self.gate_items,
            "gate_scales": scales,
            "up_scales": scales + self.gate_items // 4,
        }

    def down_push(self) -> dict[str, int]:
        """The constants of expert_down_mxfp4, by name."""
        return {
            "rounds": self.act_rounds,
            "tiles": self.hidden // TILE,
            "slot_stride": self.slot_bytes // 16,
            "down_codes": 2 * self.gate_items,
            "down_scales": self.code_bytes // 4 + self.gate_items // 2,
        }

    def parts(self, stored: U8) -> Expert:
        """Views of ``stored`` [expert_bytes] as an expert: gate, up, down, each codes before scales."""
        at, matrices = 0, []
        for rows, columns in ((self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)):
            codes = stored[at : at + rows * columns // 2].reshape(rows, columns // 2)
            at += codes.nbytes
            scales = stored[at : at + rows * columns // 32].reshape(rows, columns // 32)
            at += scales.nbytes
            matrices.append(MatrixMXFP4(codes, scales))
        return Expert(*matrices)

    def store(self, expert: Expert, stored: U8) -> None:
        """Copy an expert's six arrays into ``stored`` [expert_bytes], for ``parts``."""
        for to, source in zip(_arrays(self.parts(stored)), _arrays(expert), strict=True):
            np.copyto(to, source)

    def pack(self, expert: Expert, slot: U8) -> None:
        """Write an expert into ``slot`` [slot_bytes] in the order that the shaders read."""
        codes, scales = slot[: self.code_bytes].view(ITEM), slot[self.code_bytes :]
        at = 0
        for matrix in (expert.gate, expert.up, expert.down):
            rows, columns = matrix.shape
            count = rows * rounds_of(columns) * 8
            interleave(_items(matrix.codes), codes[at : at + count], (0, 3, 2, 1))
            interleave(matrix.scales, scales[at : at + count], (0, 3, 1, 2))
            at += count


def _arrays(expert: Expert) -> list[U8]:
    return [a for m in (expert.gate, expert.up, expert.down) for a in (m.codes, m.scales)]


def _items(codes: U8) -> NDArray[np.complex128]:
    """Codes [N, K/2] as items [N, K/32]; a view."""
    return codes.view(ITEM)


def interleave(source: NDArray, out: NDArray, axes: tuple[int, int, int, int]) -> None:
    """source [N, K/32], one element a lane quad, to the slot's order in ``out``, flat; missing quads become zeros.

    ``axes``: the order of (tile, invocation, row, round) within a lane quad.
    """
    rows, quads = source.shape
    rounds = -(-quads // 8)
    if quads != rounds * 8:
        padded = np.zeros((rows, rounds * 8), source.dtype)
        padded[:, :quads] = source
        source = padded
    grouped = source.reshape(rows // TILE, TILE // ROWS, ROWS, rounds, 8)
    flat = out.reshape(rows // TILE, 8, -1)
    for place, quad in enumerate(TREE_ORDER):
        ordered = grouped[..., quad].transpose(axes)
        flat[:, place].reshape(ordered.shape)[...] = ordered
    assert np.shares_memory(flat, out)


def permute_rows(x: F32, out: F32) -> None:
    """Rows of x [n, hidden] to the shaders' order in ``out`` [n, rounds*256]; missing columns become zeros."""
    n, columns = x.shape
    rounds = rounds_of(columns)
    if columns != rounds * ROUND:
        padded = np.zeros((n, rounds * ROUND), np.float32)
        padded[:, :columns] = x
        x = padded
    out.reshape(n, rounds, 8, 8, 4)[...] = x.reshape(n, rounds, 8, 4, 8).transpose(0, 1, 2, 4, 3)
