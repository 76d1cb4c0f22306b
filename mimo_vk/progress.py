"""Progress of long work on standard error: nothing for the first two seconds, a line in place on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

QUIET_SECONDS = 2.0
TERMINAL_SECONDS = 0.2  # between two updates of the line
PIPED_SECONDS = 30.0  # between two lines in a log


Report = Callable[[str, int, int], None]  # what is done, how far it is, of how much: 0 where that isn't known


@contextlib.contextmanager
def ticking(progress: Report | None, what: str) -> Iterator[Report]:
    """Tell ``progress`` twice a second, from a thread beside the work, what goes on: the seconds count even where the
    work hasn't said yet how far it is, or says so seldom. Yields what takes note of how far it is."""
    done, state = threading.Event(), [(what, 0, 0)]

    def tick() -> None:
        while progress is not None and not done.wait(0.5):
            progress(*state[-1])

    def note(what: str, part: int, whole: int) -> None:
        state[:] = [(what, part, whole)]
        if progress is not None:
            progress(what, part, whole)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        done.set()
        thread.join()


READING, SEEING = "reading the prompt", "seeing the picture"


def watchers(note: Report) -> dict[str, Any]:
    """What a session tells how far it has come with a prompt."""
    return {"on_progress": partial(_unfinished, note, READING), "on_picture": partial(_unfinished, note, SEEING)}


def _unfinished(note: Report, what: str, done: int, total: int) -> None:
    if done < total:  # at its end there is nothing to wait for
        note(what, done, total)


class Progress:
    """Callable as ``progress(what, done, total)``; as a context manager it wipes its line at the end."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + QUIET_SECONDS
        self._shown = False
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far ``what`` has come, if it is time to."""
        now = time.monotonic()
        if now < self._next or sys.stderr is None:
            return
        self._next = now + (TERMINAL_SECONDS if self._terminal else PIPED_SECONDS)
        share = f": {done / total:.0%} ({done} of {total})" if total else ""
        self._write(f"{what}{share}, {now - self._began:.0f} s")

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(
                f"\r\x1b[K{line}" if self._terminal else line,
                end="" if self._terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
        self._shown = True

    def clear(self) -> None:
        """Wipe the line: other text comes next."""
        if self._shown and self._terminal:
            with contextlib.suppress(OSError, ValueError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
