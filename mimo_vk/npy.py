"""A .npy file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from mimo_vk.errors import MimoError, UsageError
from mimo_vk.formats import F32


class NpyFile:
    """Opens a temporary file beside ``path`` at once, so that a path that can't be written fails before the work.

    ``save`` fills it and renames it into place; leaving the context without that removes it. Without a path it does
    nothing.
    """

    def __init__(self, path: str | None) -> None:
        self.wanted = path is not None
        self._path = Path(path).resolve() if path is not None else Path()
        self._scratch: Path | None = None
        self._file: BinaryIO | None = None
        if path is not None:
            try:
                self._open()
            except OSError as error:
                raise UsageError(f"--dump-logits {path}: {error.strerror or error}") from None

    def _open(self) -> None:
        if self._path.exists() and not self._path.is_file():  # a device or a pipe is written to, never replaced
            self._file = open(self._path, "wb")  # noqa: SIM115  (closed by save or __exit__)
            return
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        self._file = open(scratch, "wb")  # noqa: SIM115
        self._scratch = scratch

    def save(self, blocks: Iterable[F32], shape: tuple[int, int]) -> None:
        """Write float32 rows as they come and put the file in its place. MimoError where that fails (a full disk)."""
        assert self._file is not None
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        try:
            np.lib.format.write_array_header_1_0(self._file, header)
            for block in blocks:
                self._file.write(np.ascontiguousarray(block, "<f4").data)
            self._file.close()
            if self._scratch is not None:
                os.replace(self._scratch, self._path)
                self._scratch = None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise MimoError(f"{self._path}: the logits could not be written: {error.strerror or error}") from None

    def __enter__(self) -> NpyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._scratch is not None:
            self._scratch.unlink(missing_ok=True)
