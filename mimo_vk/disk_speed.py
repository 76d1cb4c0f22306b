"""How fast a file reads: past the page cache, in order, by several readers at once."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mimo_vk.direct_io import Files, allocate

PIECE = 8 << 20  # bytes of one read, near an expert's size
LIMIT = 256 << 20  # bytes read at most


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes read in so many seconds; ``direct`` is whether the page cache was passed by."""

    path: Path
    nbytes: int
    seconds: float
    direct: bool

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


def measure(path: Path, readers: int, direct: bool = True) -> DiskSpeed:
    """Read the first 256 MiB of a file, or all of a smaller one. ReadError where it can't be read."""
    files = Files(direct)
    try:
        file = files.get(path)
        size = min(os.path.getsize(path), LIMIT)
        memory = [memoryview(allocate(PIECE)) for _ in range(readers)]

        def read(reader: int) -> None:
            for start in range(reader * PIECE, size, readers * PIECE):
                file.read_exact(start, min(PIECE, size - start), memory[reader])

        with ThreadPoolExecutor(readers) as pool:
            began = time.perf_counter()
            list(pool.map(read, range(readers)))
            seconds = time.perf_counter() - began
        return DiskSpeed(path, size, max(seconds, 1e-9), file.direct)
    finally:
        files.close()
