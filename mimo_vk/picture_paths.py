"""Pictures that a typed line begins with: paths as people type them, and as file managers and terminals paste them.

A path may stand in quotes, have its spaces escaped, be a ``file://`` address, begin with ``~``, or hold plain spaces,
where it is as long as a file of that name goes. Several may follow each other. A first word that only happens to be a
file's name is text, unless the file is a picture.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mimo_vk.errors import ImageError, UsageError
from mimo_vk.image_formats import SUFFIXES, SUPPORTED, sniff

MAX_FILE_BYTES = 100 << 20
_WORD = re.compile(r"""(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s\\'"])+(?=\s|$)""")  # as a shell cuts it
_URI = re.compile(r"file://\S+")
_EXPLICIT = ("/", "./", "../", "~/")  # what begins so is meant as a path


def split_line(line: str) -> tuple[list[Path], str]:
    """The pictures that a line begins with, and the text behind them.

    Errors: UsageError where what is written as a picture's path leads to no file.
    """
    found: list[Path] = []
    rest = line.strip()
    while rest:
        hit = next(((path, end) for path, end in _candidates(rest) if _is_picture(path)), None)
        if hit is None:
            _check_missing(rest)
            break
        found.append(hit[0])
        rest = rest[hit[1] :].lstrip()
    return found, rest


def read_picture(path: Path) -> bytes:
    """A file's bytes. Errors: ImageError names the file that can't be read, is no file, or is too large."""
    try:
        if not path.is_file():
            raise ImageError(f"{path}: " + ("not a file" if path.exists() else "no such file"))
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ImageError(f"{path}: {reason or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ImageError(f"{path}: a picture's file may have {MAX_FILE_BYTES >> 20} MiB at most")
    return data


@contextmanager
def naming(paths: Sequence[Path]) -> Iterator[None]:
    """What turns out to be wrong with a picture once it is decoded is told with the names of the files."""
    try:
        yield
    except ImageError as error:
        names = ", ".join(map(str, paths))
        raise ImageError(f"{names}: {error}" if names else str(error)) from None


def _candidates(text: str) -> Iterator[tuple[Path, int]]:
    """Paths that the text may begin with, the likeliest first, and where each ends."""
    if match := _URI.match(text):
        path = _uri_path(match[0])
        if path is not None:
            yield path, match.end()
        return
    if text[0] in "'\"":
        yield from _word(text)
        return
    ends = [match.start() for match in re.finditer(r"\s+", text)] + [len(text)]
    for end in reversed(ends):  # plain spaces: the longest name that there is
        if end <= 4096:
            yield _path(text[:end]), end
    yield from _word(text)


def _word(text: str) -> Iterator[tuple[Path, int]]:
    """The first word, its quotes and backslashes undone."""
    if match := _WORD.match(text):
        words = shlex.split(match[0])
        if len(words) == 1 and words[0]:
            yield _path(words[0]), match.end()


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))


def _uri_path(text: str) -> Path | None:
    """The local file of a ``file://`` address; None where it is another machine's."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    if parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path))


def _is_picture(path: Path) -> bool:
    """A file whose name or content is a picture's."""
    try:
        if not path.is_file():
            return False
        if path.suffix.lower() in SUFFIXES:
            return True
        with path.open("rb") as file:
            return sniff(file.read(64)) in SUPPORTED
    except (OSError, ValueError):  # a name too long, or one with a zero byte
        return False


def _check_missing(text: str) -> None:
    """Say so where a picture's path leads nowhere, rather than have the model guess."""
    if not (text.startswith(("file://", *_EXPLICIT)) or text[0] in "'\""):
        return
    path = next(_first_word(text), None)
    if path is not None and path.suffix.lower() in SUFFIXES:
        raise UsageError(f"{path}: no such file")


def _first_word(text: str) -> Iterator[Path]:
    found = _candidates(text) if text.startswith("file://") else _word(text)
    return (path for path, _ in found)
