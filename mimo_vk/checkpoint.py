"""A directory of safetensors files becomes one checked table of tensors; knows no model.

Which file holds a tensor is told by ``model.safetensors.index.json``; a file is looked for beside it and then in
the further directories. Everything wrong with any file is found at the start and said at once, a line each.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_vk.config import read_json
from mimo_vk.errors import CheckpointError, ReadError
from mimo_vk.safetensors_header import HeaderFault, TensorInfo, capped, quoted, read_header

__all__ = ["OPTIONAL_FILES", "Checkpoint", "TensorInfo"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OPTIONAL_FILES = ("model_mtp.safetensors", "dflash/*", "audio_tokenizer/*")  # a complete download may lack them
_NUMPY = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "U16": np.uint16, "I16": np.int16, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "I32": np.int32,
    "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64, "C64": np.complex64,
}  # fmt: skip
_NUMBER = re.compile(r"\d+")
_READ_SIZE = 1 << 30  # the kernel takes at most 2 GiB a call


class Checkpoint:
    """All tensors of a checkpoint by name, and their bytes."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, Any] = {}
        self.files: list[Path] = []
        self.absent: dict[str, str] = {}  # tensors the index puts in an optional file that can't be used: its name
        self.optional: set[str] = set()  # tensors of the optional files that are there
        self.notes: list[str] = []  # a line per optional file that can't be used
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(
        cls, model_dir: Path, extra_dirs: Sequence[Path] = (), optional: Sequence[str] = OPTIONAL_FILES
    ) -> Checkpoint:
        """Read and check every header. ``optional``: patterns of files that may be missing.

        Errors: CheckpointError with a line per faulty file or tensor.
        """
        if not model_dir.is_dir():
            raise CheckpointError(f"{model_dir}: no such directory")
        missing_dirs = [f"{path}: no such directory" for path in extra_dirs if not path.is_dir()]
        if missing_dirs:
            raise CheckpointError(missing_dirs)
        checkpoint = cls(model_dir)
        with _no_gc():
            _Opening(checkpoint, extra_dirs, optional).run()
        return checkpoint

    def mapped(self, name: str) -> NDArray[Any]:
        """A read-only view of the file's own bytes (a copy only where the file doesn't align the items).

        BF16 comes as uint16, the 8-bit floats as uint8. Errors: ReadError.
        """
        info = self.tensors[name]
        assert info.dtype in _NUMPY, f"{name}: {info.dtype} has no numpy dtype"
        dtype = np.dtype(_NUMPY[info.dtype])
        if info.nbytes == 0 or info.offset % dtype.itemsize:
            array = self.read(name)
            array.flags.writeable = False
            return array
        flat = np.frombuffer(self._map(info.path), dtype, info.nbytes // dtype.itemsize, info.offset)
        return flat.reshape(info.shape)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ReadError(f"{path}: can't be mapped: {error}") from error
        return self._maps[path]

    def read(self, name: str) -> NDArray[Any]:
        """A private copy of a tensor, dtypes as ``mapped``. Errors: ReadError naming file, tensor and offset."""
        info = self.tensors[name]
        return self._read_into(info, np.empty(info.shape, _NUMPY[info.dtype]), info.offset)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """A private copy of rows start..stop-1 of a tensor's first dimension."""
        info = self.tensors[name]
        row = info.nbytes // info.shape[0]
        out = np.empty((stop - start, *info.shape[1:]), _NUMPY[info.dtype])
        return self._read_into(info, out, info.offset + start * row)

    def data_ranges(self, name: str) -> list[tuple[int, int]]:
        """The byte ranges of a tensor that its file stores, counted from the tensor's start.

        The rest are holes of a sparse file: they read as zeros and need no look. Errors: ReadError.
        """
        info = self.tensors[name]
        end, ranges = info.offset + info.nbytes, []
        try:
            with info.path.open("rb", buffering=0) as file:
                at = info.offset
                while at < end:
                    start = _seek(file.fileno(), at, os.SEEK_DATA)
                    if start is None or start >= end:
                        break
                    at = min(_seek(file.fileno(), start, os.SEEK_HOLE) or end, end)
                    ranges.append((start - info.offset, at - info.offset))
        except OSError as error:
            raise ReadError(f"{info.path}: {info.name}: {error.strerror}") from error
        return ranges

    def _read_into(self, info: TensorInfo, out: NDArray[Any], offset: int) -> NDArray[Any]:
        view, done = out.reshape(-1).view(np.uint8), 0
        try:
            with info.path.open("rb", buffering=0) as file:
                while done < len(view):
                    count = os.preadv(file.fileno(), [view[done : done + _READ_SIZE].data], offset + done)
                    if count == 0:
                        wanted = f"expected {len(view)} bytes at {offset}"
                        raise ReadError(f"{info.path}: {info.name}: {wanted}, found {done}")
                    done += count
        except OSError as error:
            raise ReadError(f"{info.path}: {info.name}: at {offset + done}: {error.strerror}") from error
        return out


def _seek(fd: int, offset: int, whence: int) -> int | None:
    """lseek to data or to a hole; None where there is none from the offset on."""
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


@contextmanager
def _no_gc() -> Iterator[None]:
    """The tables are many and acyclic: the collector's passes over them would only cost time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Opening:
    """One pass over index and headers, collecting faults."""

    def __init__(self, checkpoint: Checkpoint, extra_dirs: Sequence[Path], optional: Sequence[str]) -> None:
        self.checkpoint = checkpoint
        self.dirs = [checkpoint.model_dir, *extra_dirs]
        self.optional = optional
        self.faults: list[str] = []
        self.lost: list[tuple[str, Path, str]] = []  # files whose size no header tells: shard, path, fault
        self.short_bytes = 0  # what the headers of short files describe

    def run(self) -> None:
        where = self._read_index()
        held: dict[str, str] = {}  # tensor: the file that holds it
        usable: set[str] = set()
        for shard in sorted(set(where.values())) if where else [SINGLE]:
            self._open(shard, held, usable)
        self._check_index(where, held, usable)
        self._say_lost(where)
        if self.faults:
            raise CheckpointError(self.faults)

    def _read_index(self) -> dict[str, str]:
        """weight_map, or nothing where one file holds the whole model."""
        path = self.checkpoint.model_dir / INDEX
        if not path.exists():
            if (self.checkpoint.model_dir / SINGLE).exists():
                return {}
            raise CheckpointError(f"{path}: missing: expected it beside the shards (or one {SINGLE})")
        raw = read_json(path)
        where, metadata = raw.get("weight_map"), raw.get("metadata", {})
        if not isinstance(where, dict) or not where or set(map(type, where.values())) != {str}:
            raise CheckpointError(f"{path}: weight_map: expected an object of tensor names and file names")
        if not isinstance(metadata, dict):
            raise CheckpointError(f"{path}: metadata: expected an object, found {type(metadata).__name__}")
        self.checkpoint.metadata = metadata
        return where

    def _find(self, shard: str) -> Path:
        """The file in the first directory that has it (a broken link counts as having it, so that it's named)."""
        for directory in self.dirs:
            path = directory / shard
            if path.exists() or path.is_symlink():
                return path
        return self.dirs[0] / shard

    def _open(self, shard: str, held: dict[str, str], usable: set[str]) -> None:
        pure = PurePosixPath(shard)
        if pure.is_absolute() or ".." in pure.parts or not shard.isprintable() or not pure.name:
            self.faults.append(f"{self.dirs[0] / INDEX}: weight_map: not a file name: {quoted(shard)}")
            return
        path = self._find(shard)
        try:
            header = read_header(path)
        except HeaderFault as fault:
            self._note_fault(shard, path, fault)
            return
        usable.add(shard)
        if self._is_optional(shard):
            self.checkpoint.optional.update(info.name for info in header.tensors)
        self.checkpoint.files.append(path)
        found, tensors = {info.name: info for info in header.tensors}, self.checkpoint.tensors
        twice = sorted(tensors.keys() & found.keys())
        self.faults += capped(
            [f"{path}: tensor {quoted(n)}: also in {tensors[n].path}: expected in one file" for n in twice]
        )
        tensors.update(found)
        held.update(dict.fromkeys(found, shard))

    def _is_optional(self, shard: str) -> bool:
        return any(fnmatchcase(shard, pattern) for pattern in self.optional)

    def _note_fault(self, shard: str, path: Path, fault: HeaderFault) -> None:
        if self._is_optional(shard):
            self.checkpoint.notes.append(f"{path}: {fault} (not needed)")
        elif fault.lines[0].startswith(("missing", "empty", "can't be read")):
            self.lost.append((shard, path, fault.lines[0]))
        else:
            self.faults += [f"{path}: {line}" for line in fault.lines]
            self.short_bytes += fault.nbytes

    def _check_index(self, where: dict[str, str], held: dict[str, str], usable: set[str]) -> None:
        """Each tensor of the index is where the index says, unless that file was refused already."""
        wrong = [(n, s) for n, s in where.items() if held.get(n) != s]
        lines = []
        for name, shard in wrong:
            if shard in usable or name in held:
                found = f"which {held[name]} holds" if name in held else "which no file holds"
                lines.append(f"{self._find(shard)}: expected tensor {quoted(name)} (by the index), {found}")
            elif self._is_optional(shard):
                self.checkpoint.absent[name] = shard
        self.faults += capped(lines)

    def _say_lost(self, where: dict[str, str]) -> None:
        """A line per file without a header: what the index puts there, sized by its like in the other files."""
        if not self.lost:
            return
        sizes: dict[str, set[int]] = {}
        for info in self.checkpoint.tensors.values():
            sizes.setdefault(_NUMBER.sub("N", info.name), set()).add(info.nbytes)
        unsized = False
        for shard, path, line in self.lost:
            names = [name for name, file in where.items() if file == shard]
            if not names:  # one file holds the whole model, and no index says what
                self.faults.append(f"{path}: {line}")
                continue
            alike = [sizes.get(_NUMBER.sub("N", name), set()) for name in names]
            if all(len(found) == 1 for found in alike):
                line += f": {sum(map(sum, alike))} bytes missing"
            else:
                unsized = True
            self.faults.append(f"{path}: {line} ({len(names)} tensors by the index)")
        total = self.checkpoint.metadata.get("total_size")
        held = sum(info.nbytes for info in self.checkpoint.tensors.values()) + self.short_bytes
        if unsized and type(total) is int and total > held and not self.checkpoint.notes:
            files = "the file above" if len(self.lost) == 1 else f"the {len(self.lost)} files above"
            self.faults.append(f"{self.dirs[0]}: {total - held} bytes missing with {files}, by total_size {total}")
