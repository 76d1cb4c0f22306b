"""The header of one safetensors file, read and checked before any of its tensors is.

Format (https://github.com/huggingface/safetensors, README "Format"): 8 bytes of length, little-endian; that many
bytes of JSON, ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` with offsets counted from the header's
end; then the data, which the tensors cover without holes or overlaps.

A release has 160,000 tensors, so what holds for all of them is checked in bulk, and only a header with
something wrong in it is walked tensor by tensor to say what.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MOST_LINES = 20  # of one sort of fault
MAX_HEADER = 100_000_000  # the format's own limit
MAX_SIZE = 2**60  # of a dimension, an offset, or a tensor in bits
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where a tensor's bytes are: ``offset`` counts from the start of the file; ``dtype`` is safetensors' name."""

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """A file's tensors and its ``__metadata__``."""

    tensors: list[TensorInfo]
    metadata: dict[str, str]


class HeaderFault(Exception):
    """What is wrong with one file, a line each (without the file's name).

    ``nbytes``: the tensors' bytes by its header, where that much could be read; else 0.
    """

    def __init__(self, *lines: str, nbytes: int = 0) -> None:
        super().__init__("; ".join(lines))
        self.lines, self.nbytes = lines, nbytes


def quoted(name: object) -> str:
    """A name that can be printed on one line, whatever bytes the file had."""
    text = name if isinstance(name, str) else repr(name)
    return text if text.isascii() and text.isprintable() and len(text) < 300 else ascii(text)[:300]


def capped(lines: list[str]) -> list[str]:
    """The first of many lines of one sort, and how many there are."""
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"... and {more} more like these, {len(lines)} in all"]


def read_header(path: Path) -> Header:
    """The file's checked header. Errors: HeaderFault, saying what was expected and what was found."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise HeaderFault("can't be read: not a regular file")
        with path.open("rb", buffering=0) as file:
            return _parse(path, file.fileno(), status.st_size)
    except FileNotFoundError:
        target = f": a link to {os.readlink(path)}, which isn't there" if path.is_symlink() else ""
        raise HeaderFault(f"missing{target}") from None
    except OSError as error:
        raise HeaderFault(f"can't be read: {error.strerror}") from error


def _parse(path: Path, fd: int, size: int) -> Header:
    if size == 0:
        raise HeaderFault("empty: found 0 bytes, expected a safetensors header and data")
    if size < 8:
        raise HeaderFault(f"short: expected at least 8 bytes, found {size}: {8 - size} missing")
    length = int.from_bytes(_pread(fd, 8, 0), "little")
    if not 2 <= length <= MAX_HEADER:
        raise HeaderFault(f"not a safetensors file: a header length of 2 to {MAX_HEADER} expected, found {length}")
    start = 8 + length
    if start > size:
        raise HeaderFault(f"short: expected at least {start} bytes (the header), found {size}: {start - size} missing")
    text = _pread(fd, length, 8)
    try:
        raw = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise HeaderFault(f"the header isn't JSON: {quoted(str(error))}") from error
    if not isinstance(raw, dict):
        raise HeaderFault(f"the header isn't a JSON object but {type(raw).__name__}")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderFault("__metadata__: expected an object of strings")
    if text.count(b'"data_offsets"') > len(raw):
        _find_repeated(text)
    return Header(_check(path, raw, start, size), metadata)


def _pread(fd: int, count: int, offset: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) != count:
        raise HeaderFault(f"short: expected {count} bytes at {offset}, found {len(data)}")
    return data


def _find_repeated(text: bytes) -> None:
    """json keeps the last of two equal keys: look again for them, name by name."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                repeated.append(f"tensor {quoted(key)}: named twice in the header")
            seen.add(key)

    json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    if repeated:
        raise HeaderFault(*capped(repeated))


class _Sizes(dict[tuple[str, tuple[int, ...]], int]):
    """Bytes by (dtype, shape), -1 where there is no such size: a release has a few dozen distinct pairs."""

    def __missing__(self, key: tuple[str, tuple[int, ...]]) -> int:
        size = tensor_bytes(*key)
        self[key] = size
        return size


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; -1 for an unknown dtype, a negative dimension, part of a byte, or 2^57 and more."""
    bits = ITEM_BITS.get(dtype, -1)
    for dim in shape:
        if not (0 <= dim < MAX_SIZE and 0 <= bits < MAX_SIZE):  # at each step, or a long list would take for ever
            return -1
        bits *= dim
    return bits // 8 if 0 <= bits < MAX_SIZE and bits % 8 == 0 else -1


def _check(path: Path, raw: dict[str, Any], start: int, size: int) -> list[TensorInfo]:
    """All tensors of one header, checked in bulk: types, sizes, bounds, overlaps, holes, the file's size."""
    try:
        dtypes = [entry["dtype"] for entry in raw.values()]
        shapes = [tuple(entry["shape"]) for entry in raw.values()]
        pairs = [tuple(entry["data_offsets"]) for entry in raw.values()]
        numbers = set(map(type, chain.from_iterable(shapes))) | set(map(type, chain.from_iterable(pairs)))
        sizes = _Sizes()
        expected = np.array([sizes[key] for key in zip(dtypes, shapes, strict=True)], dtype=np.int64)
        offsets = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        well_formed = numbers <= {int} and set(map(len, pairs)) <= {2} and set(map(type, dtypes)) <= {str}
    except (TypeError, KeyError, ValueError, OverflowError):
        well_formed = False
    if not well_formed:
        raise HeaderFault(*capped(_name_faults(raw)))
    begin, end = offsets[:, 0], offsets[:, 1]
    if (expected < 0).any() or (begin < 0).any() or (end - begin != expected).any():
        raise HeaderFault(*capped(_name_faults(raw)))
    _check_cover(list(raw), begin, end, start, size)
    infos = zip(raw, repeat(path), (begin + start).tolist(), expected.tolist(), dtypes, shapes)
    return list(map(TensorInfo._make, infos))


def _check_cover(names: list[str], begin: Any, end: Any, start: int, size: int) -> None:
    """The tensors follow one another from 0 to the file's end."""
    order = np.lexsort((end, begin))
    begin, end = begin[order], end[order]
    before = np.concatenate([[0], end[:-1]]).astype(np.int64)
    wrong = np.flatnonzero(begin != before)
    if wrong.size:
        lines = []
        for i in wrong[:MOST_LINES]:
            what = "overlaps the tensor before it" if begin[i] < before[i] else "leaves a hole before it"
            name = quoted(names[order[i]])
            lines.append(f"tensor {name}: {what}: expected to begin at {before[i]}, found {begin[i]}")
        raise HeaderFault(*lines)
    expected = start + (int(end[-1]) if end.size else 0)
    if size < expected:
        text = f"short: expected {expected} bytes, found {size}: {expected - size} missing"
        raise HeaderFault(text, nbytes=expected - start)
    if size > expected:
        raise HeaderFault(f"too long: expected {expected} bytes, found {size}: {size - expected} belong to no tensor")


def _name_faults(raw: dict[str, Any]) -> list[str]:
    return [f"tensor {quoted(name)}: {fault}" for name, entry in raw.items() if (fault := _entry_fault(entry))]


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < MAX_SIZE for v in value)


def _entry_fault(entry: object) -> str | None:
    """What is wrong with one tensor's entry, None if nothing is."""
    if not isinstance(entry, dict):
        return f"expected an object with dtype, shape and data_offsets, found {type(entry).__name__}"
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        return f"dtype: expected one of {' '.join(ITEM_BITS)}, found {quoted(dtype)}"
    if not isinstance(shape, list) or not _is_counts(shape):
        return f"shape: expected a list of sizes, found {quoted(shape)}"
    if not isinstance(offsets, list) or not _is_counts(offsets) or len(offsets) != 2:
        return f"data_offsets: expected two offsets, found {quoted(offsets)}"
    nbytes, found = tensor_bytes(dtype, shape), offsets[1] - offsets[0]
    if nbytes < 0:
        return f"shape: {dtype} {shape} isn't a whole number of bytes under 2^57"
    if found != nbytes:
        return f"data_offsets: {dtype} {shape} takes {nbytes} bytes, found {found} ({offsets[0]} to {offsets[1]})"
    return None
