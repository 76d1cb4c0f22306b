"""One expert's way from its files into a slot of memory, on a pool of reader threads.

An expert whose six tensors lie back to back is read straight into its slot, in pieces that several readers take;
otherwise each tensor is read through a reader's bounce buffer and packed. The matrices are views of the slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from mimo_vk.direct_io import BLOCK, DataFile, Files, allocate, span_capacity
from mimo_vk.errors import ReadError
from mimo_vk.expert_table import ExpertLocation
from mimo_vk.formats import MXFP4_BLOCK, U8, Expert, MatrixMXFP4
from mimo_vk.safetensors_header import TensorInfo

PIECE = 2 << 20  # bytes read at once: several readers share an expert, so the first is there six times sooner
SCRATCH = 2 << 20  # bytes of a reader's bounce buffer
_PART_ALIGN = 64  # where tensors are packed, each starts on a cache line
_NAN_SCALE = 255


def slot_bytes(expert_bytes: int) -> int:
    """Memory of one slot: an expert's bytes, and what the alignment of an O_DIRECT read or the packing can add."""
    return span_capacity(expert_bytes)


def expert_bytes(location: ExpertLocation) -> int:
    """The bytes of an expert's six tensors."""
    return sum(part.nbytes for part in location.parts)


class ReaderPool:
    """Threads that do jobs until ``close``. A job's failure is kept in its ExpertRead; no thread dies of it."""

    def __init__(self, count: int, direct: bool) -> None:
        self.files = Files(direct)
        self.queue: SimpleQueue[Job | None] = SimpleQueue()  # of pieces to read, in order; None ends a thread
        self._threads = [
            threading.Thread(target=_work, args=(self.queue, self.files), name=f"reader-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait for the queued jobs, end the threads, close the files."""
        for _ in self._threads:
            self.queue.put(None)
        for thread in self._threads:
            thread.join()
        self.files.close()


class ExpertRead:
    """One expert on its way into a slot. The reader that ends its last piece puts it on ``done``, read or failed."""

    def __init__(self, name: str, location: ExpertLocation, slot: U8, done: SimpleQueue[ExpertRead]) -> None:
        self.nbytes = expert_bytes(location)
        self.expert: Expert | None = None  # when it has arrived
        self.error: BaseException | None = None  # the first error of its pieces
        self.cancelled = False  # pieces that have not begun are skipped
        self.ended = False  # nothing is written to the slot any more
        self._name = name
        self._location = location
        self._slot = slot
        self._done = done
        self._starts = _part_starts(location)
        assert self._starts[-1] + location.parts[-1].nbytes <= len(slot), "all experts have one size"
        self._skipped = False
        self._left = 0
        self._lock = threading.Lock()

    def jobs(self) -> list[Job]:
        """The pieces to read. To be called once, before the first of them runs."""
        parts = self._location.parts
        if self._location.contiguous:
            pieces = _pieces(parts[0].offset, self.nbytes)
            jobs = [Job(self, parts, offset, length, at, False) for offset, length, at in pieces]
        else:
            jobs = [
                Job(self, (part,), part.offset, part.nbytes, start, True)
                for part, start in zip(parts, self._starts, strict=True)
            ]
        self._left = len(jobs)
        return jobs

    def run(self, job: Job, files: Files, scratch: _Scratch) -> None:
        """Do one piece, on a reader thread; what goes wrong is kept for ``result``."""
        try:
            if self.cancelled or self.error is not None:
                self._skipped = True
            else:
                job.read(files.get(job.path), self._slot.data, scratch)
        except ReadError as error:
            self.error = ReadError(f"{self._name} ({job.names()}): {error}")
        except BaseException as error:
            self.error = error
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._finish()
            self.ended = True
            self._done.put(self)

    def _finish(self) -> None:
        if self._skipped or self.error is not None:
            return
        try:
            self.expert = _expert(self._location, self._slot, self._starts)
        except BaseException as error:
            self.error = error

    def result(self) -> Expert:
        """The expert, once it is on ``done``; raises what went wrong (ReadError for anything that the world did)."""
        if self.error is not None:
            raise self.error
        assert self.expert is not None
        return self.expert


class Job:
    """A range of a file to be read to a place in a slot: straight where both are aligned, else through scratch."""

    __slots__ = ("_at", "_length", "_offset", "_packed", "_parts", "_read")

    def __init__(
        self, read: ExpertRead, parts: Sequence[TensorInfo], offset: int, length: int, at: int, packed: bool
    ) -> None:
        self._read = read
        self._parts = parts
        self._offset = offset
        self._length = length
        self._at = at
        self._packed = packed

    @property
    def path(self) -> Path:
        return self._parts[0].path

    def run(self, files: Files, scratch: _Scratch) -> None:
        self._read.run(self, files, scratch)

    def read(self, file: DataFile, slot: memoryview, scratch: _Scratch) -> None:
        if not self._packed:
            file.read_exact(self._offset, self._length, slot[self._at :])
            return
        for done in range(0, self._length, SCRATCH):
            count = min(SCRATCH, self._length - done)
            data = file.read_exact(self._offset + done, count, scratch.memory())
            slot[self._at + done : self._at + done + count] = data

    def names(self) -> str:
        """The tensors that the range touches."""
        end = self._offset + self._length
        return ", ".join(p.name for p in self._parts if p.offset < end and p.offset + p.nbytes > self._offset)


class _Scratch:
    """A reader's bounce buffer, made when it is first needed."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def memory(self) -> memoryview:
        if self._memory is None:
            self._memory = memoryview(allocate(span_capacity(SCRATCH)))
        return self._memory


def _work(jobs: SimpleQueue[Job | None], files: Files) -> None:
    scratch = _Scratch()
    while (job := jobs.get()) is not None:
        job.run(files, scratch)
        del job  # the loop's variable would keep the slot's views alive while it waits


def _pieces(offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """A range cut at whole blocks of the file: (offset, length, where its first block goes in the slot)."""
    start, end = offset // BLOCK * BLOCK, offset + length
    for first in range(start, end, PIECE):
        low = max(first, offset)
        yield low, min(first + PIECE, end) - low, first - start


def _part_starts(location: ExpertLocation) -> list[int]:
    """Where each tensor starts in the slot: as in the file, or packed on cache lines."""
    first = location.parts[0].offset
    at = first % BLOCK if location.contiguous else 0
    starts = []
    for part in location.parts:
        starts.append(at)
        at += part.nbytes
        if not location.contiguous:
            at = -(-at // _PART_ALIGN) * _PART_ALIGN
    return starts


def _expert(location: ExpertLocation, slot: U8, starts: Sequence[int]) -> Expert:
    """Views of the six tensors in a slot; a NaN scale is refused here."""
    views = []
    for part, start in zip(location.parts, starts, strict=True):
        view = slot[start : start + part.nbytes].reshape(part.shape)
        view.flags.writeable = False
        views.append(view)
    for part, view in zip(location.parts[1::2], views[1::2], strict=True):
        _refuse_nan(part, view)
    down, gate, up = (MatrixMXFP4(codes, scales) for codes, scales in zip(views[0::2], views[1::2], strict=True))
    return Expert(gate=gate, up=up, down=down)


def _refuse_nan(part: TensorInfo, scales: U8) -> None:
    if scales.size and scales.max() == _NAN_SCALE:
        row, block = divmod(int(np.argmax(scales)), scales.shape[1])
        raise ReadError(
            f"{part.path}: tensor {part.name}: the scale of row {row}, block {block} (columns {block * MXFP4_BLOCK} to "
            f"{block * MXFP4_BLOCK + MXFP4_BLOCK - 1}) is byte 255, NaN"
        )
