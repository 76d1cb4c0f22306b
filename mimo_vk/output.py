"""Standard output, whose errors say that they are its own, and lines on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class OutputError(OSError):
    """Standard output can't be written; a closed pipe stays a BrokenPipeError."""


class Output:
    """Stands in for ``sys.stdout``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _named():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, f"standard output: {error.strerror or error}") from None


def report(text: str) -> None:
    """Each line of the text to standard error, with the program's name."""
    for line in text.splitlines():
        to_stderr(f"mimo-vk: {line}\n")


def to_stderr(text: str) -> None:
    """Write to standard error as it is; one that's gone is no error (and ``print`` would take standard output then)."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
