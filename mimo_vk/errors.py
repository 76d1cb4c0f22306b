"""One family of errors. The command line prints each as one line; the exit status is the class's."""

from __future__ import annotations

from collections.abc import Iterable


class MimoError(Exception):
    """Anything that the world, rather than a bug of ours, can cause."""

    exit_code = 1


class UsageError(MimoError):
    """A bad call: a flag, a prompt, an id or a size that can't be served."""

    exit_code = 2


class ImageError(UsageError):
    """A picture that can't be used: its format, size, proportions or data."""


class CheckpointError(MimoError):
    """A checkpoint that can't be run: one line per faulty file, tensor or field."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ReadError(MimoError):
    """Bytes of a tensor that could not be read, or that hold what no checkpoint may hold (a NaN scale).

    The request that needed them fails; the session stays usable.
    """


class Cancelled(MimoError):
    """The caller asked for the work to stop; what was computed so far is kept consistent."""
