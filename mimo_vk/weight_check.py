"""A pass over the dense weights for what no checkpoint may hold: NaN codes, and numbers that aren't finite.

It reads as fast as memory does, in blocks that stay in a core's cache, and says where it found something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PIECE = 16 << 20  # bytes that a thread takes at a time
BLOCK = 1 << 19  # items; 512 KiB of FP8 and 1 MiB of BF16 fit a core's second-level cache

Progress = Callable[[str, int, int], None]


class Checked(NamedTuple):
    """A tensor to look through: FP8 codes (uint8), bfloat16 (uint16) or float32, as stored."""

    where: str  # file and tensor, for the message
    array: NDArray[Any]
    ranges: list[tuple[int, int]]  # bytes of the array that are stored; the rest are zeros that nobody wrote


def first_bad(flat: NDArray[Any]) -> int | None:
    """The first index that holds a NaN code (uint8: e4m3fn), or isn't finite (uint16: bfloat16; float32)."""
    if flat.dtype == np.float32:
        bad = np.flatnonzero(~np.isfinite(flat))
        return int(bad[0]) if bad.size else None
    mask, limit = (0x7F, 0x7F) if flat.dtype == np.uint8 else (0x7FFF, 0x7F80)
    magnitude = np.empty(min(BLOCK, flat.size), flat.dtype)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        found = np.bitwise_and(block, flat.dtype.type(mask), out=magnitude[: block.size])
        if found.max() >= limit:
            return start + int(np.argmax(found >= limit))
    return None


def describe(tensor: Checked, index: int) -> str:
    """One line: file, tensor, place, and what stands there."""
    array = tensor.array
    place = np.unravel_index(index, array.shape)
    at = f"row {place[0]}, column {place[1]}" if len(place) == 2 else "element " + ", ".join(map(str, place))
    value = array[place]
    if array.dtype == np.float32:
        return f"{tensor.where}: {at}: expected a finite number, found {value}"
    kind, digits = ("FP8 code", 2) if array.dtype == np.uint8 else ("bfloat16", 4)
    meaning = "NaN" if array.dtype == np.uint8 or value & 0x7F else "infinite"
    return f"{tensor.where}: {at}: {kind} 0x{value:0{digits}X} is {meaning}"


def check_tensors(tensors: list[Checked], threads: int = 2, progress: Progress | None = None) -> list[str]:
    """Look through all of them: a line for the first bad place of each faulty tensor."""
    pieces = list(_pieces(tensors))
    total, done = sum(flat.nbytes for _, _, flat in pieces), 0
    found: dict[int, int] = {}
    with ThreadPoolExecutor(threads) as pool:
        for (tensor, start, flat), bad in zip(pieces, pool.map(lambda piece: first_bad(piece[2]), pieces), strict=True):
            if bad is not None:
                found.setdefault(tensor, start + bad)
            done += flat.nbytes
            if progress is not None:
                progress("checking the dense weights", done, total)
    return [describe(tensors[tensor], index) for tensor, index in found.items()]


def _pieces(tensors: list[Checked]) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(tensor, first item, items) of each stored stretch, cut to pieces."""
    for number, tensor in enumerate(tensors):
        flat = tensor.array.reshape(-1)
        size = flat.itemsize
        for begin, end in tensor.ranges:
            first, last = begin // size, -(-end // size)  # a hole may begin inside an item
            for start in range(first, last, PIECE // size):
                yield number, start, flat[start : min(start + PIECE // size, last)]
