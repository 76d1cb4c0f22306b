"""Exact bytes at any offset of a file, read past the page cache (O_DIRECT) where the file system allows it.

O_DIRECT moves whole aligned blocks into aligned memory, so a range is read as its aligned superset, and the wanted
bytes are a slice of it. At the end of a file the last block is short. Where O_DIRECT is refused, on opening or on the
first read, the same spans are read through the page cache instead, and dropped from it afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
import threading
from pathlib import Path

from mimo_vk.errors import ReadError

BLOCK = 4096  # alignment of offsets, lengths and memory; a file system that asks for more is read buffered

# Linux's generic value; the mmap module names it from Python 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

# statx(2): struct statx has stx_mask at 0 and stx_dio_mem_align, stx_dio_offset_align at 152 and 156.
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_DIO_MEM_ALIGN = 152
_DIO_OFFSET_ALIGN = 156

_log = logging.getLogger("mimo_vk")


def aligned_span(offset: int, length: int) -> tuple[int, int]:
    """The smallest range of whole blocks, [start, end), that covers ``length`` bytes from ``offset``."""
    return offset // BLOCK * BLOCK, -(-(offset + length) // BLOCK) * BLOCK


def span_capacity(length: int) -> int:
    """Bytes that hold the aligned span of any range of ``length`` bytes, wherever it starts; whole blocks."""
    return -(-length // BLOCK) * BLOCK + BLOCK


def allocate(nbytes: int) -> mmap.mmap:
    """Block-aligned zeroed memory, in huge pages where there are any. What is never touched is never resident."""
    memory = mmap.mmap(-1, max(nbytes, BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    # open(2): O_DIRECT reads into private memory and fork(2) corrupt data, unless the child gets none of the memory.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def dio_alignment(fd: int) -> int:
    """The alignment that the file system asks of O_DIRECT, as statx reports it; BLOCK where it doesn't say."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    fields = ctypes.create_string_buffer(256)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, fields) != 0:
        return BLOCK

    def word(at: int) -> int:
        return int.from_bytes(fields.raw[at : at + 4], "little" if ctypes.c_uint16(1).value == 1 else "big")

    if not word(0) & _STATX_DIOALIGN:
        return BLOCK
    return max(word(_DIO_MEM_ALIGN), word(_DIO_OFFSET_ALIGN))


class DataFile:
    """One file open for reading. Threads may share it: every read carries its own offset."""

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self._files = files
        self._lock = threading.Lock()
        self._retired: list[int] = []
        self.direct = files.direct
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ReadError(f"{path}: can't be opened: it is not a file")
            self._fd = self._open()
        except OSError as error:
            raise ReadError(f"{path}: can't be opened: {error.strerror}") from error

    def _open(self) -> int:
        if self.direct:
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refused("open: Invalid argument")
            else:
                need = dio_alignment(fd)
                if 0 < need <= BLOCK and BLOCK % need == 0:
                    return fd
                os.close(fd)
                self._refused(f"alignment {need}")
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def _refused(self, why: str) -> None:
        self.direct = False
        self._files.warn_buffered(self.path, why)

    def read_exact(self, offset: int, length: int, buffer: memoryview) -> memoryview:
        """The ``length`` bytes from ``offset``, as a slice of ``buffer``.

        ``buffer`` starts on a block of memory and holds the range's aligned span; all of it may be overwritten.
        Raises ReadError, with the file, the offset and the bytes expected and got.
        """
        start, end = aligned_span(offset, length)
        lead = offset - start
        try:
            got = self._fill(buffer[: end - start], start, lead + length) - lead
        except OSError as error:
            raise ReadError(
                f"{self.path}: reading {length} bytes at offset {offset} failed: {error.strerror}"
            ) from error
        if got < length:
            size = os.fstat(self._fd).st_size
            raise ReadError(
                f"{self.path}: expected {length} bytes at offset {offset}, got {max(got, 0)}: the file has {size} bytes"
            )
        if not self.direct:
            os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)
        return buffer[lead : lead + length]

    def _fill(self, view: memoryview, start: int, wanted: int) -> int:
        """Read until ``wanted`` bytes are there or the file ends; how many are. (Python itself retries on EINTR.)"""
        got = best = 0
        while best < wanted:
            got += self._pread(view[got:], start + got)
            if got <= best:
                return best
            best = got
            got -= got % BLOCK  # O_DIRECT continues on a block only: a broken one is read again
        return best

    def _pread(self, view: memoryview, offset: int) -> int:
        fd = self._fd
        try:
            return os.preadv(fd, [view], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._replaced(fd):
                raise
        return os.preadv(self._fd, [view], offset)

    def _replaced(self, refused: int) -> bool:
        """Whether a descriptor without O_DIRECT stands in for the one that was refused; made here by the first to ask.

        The old one stays open until the end: another thread may be reading on it.
        """
        with self._lock:
            if self._fd == refused and self.direct:
                self._refused("read: Invalid argument")
                self._retired.append(refused)
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            return self._fd != refused

    def close(self) -> None:
        """Close every descriptor; no read may be under way."""
        for fd in (*self._retired, self._fd):
            os.close(fd)


class Files:
    """Files opened once each, at their first use, and closed together."""

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self._open: dict[Path, DataFile] = {}
        self._lock = threading.Lock()
        self._warned = False

    def get(self, path: Path) -> DataFile:
        """The open file; ReadError if it can't be opened (it is tried again the next time)."""
        file = self._open.get(path)
        if file is None:
            with self._lock:
                file = self._open.get(path)
                if file is None:
                    file = self._open[path] = DataFile(path, self)
        return file

    def warn_buffered(self, path: Path, why: str) -> None:
        """Say once that reads go through the page cache."""
        if not self._warned:
            self._warned = True
            _log.warning("%s: O_DIRECT is refused here (%s); weights are read through the page cache", path, why)

    def close(self) -> None:
        """Close all of them; no read may be under way."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()
