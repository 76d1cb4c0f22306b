"""The one way that this package compiles a function with numba.

Every compiled function follows IEEE-754 to the letter (no fastmath, so no fused multiply-add), releases the GIL and is
cached on disk: beside the package, else in the user's cache directory, else (a read-only install) not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile


@functools.cache
def sources_digest() -> bytes:
    """Of every source file of this package: numba alone looks only at the file of the function itself, and would keep
    serving code into which an older version of another file's function was inlined."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


class PackageCacheFile(IndexDataCacheFile):
    """numba's cache of one function, stale as soon as any file of the package changes."""

    def __init__(self, cache: Any) -> None:
        stamp = (cache._impl.locator.get_source_stamp(), sources_digest())
        super().__init__(cache_path=cache.cache_path, filename_base=cache._impl.filename_base, source_stamp=stamp)

    def save(self, key: Any, data: Any) -> None:
        # On a full disk the code runs all the same, and is compiled again next time.
        with contextlib.suppress(OSError):
            super().save(key, data)


def jit(*signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit with this package's settings; ``signatures`` (a list, or none) compile at once."""
    settings = {"error_model": "numpy", "fastmath": False, "nogil": True, **options}

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**settings)(function)
        try:
            dispatcher.enable_caching()
        except RuntimeError:  # no directory is writable: numba finds no place for the code
            pass
        else:
            dispatcher._cache._cache_file = PackageCacheFile(dispatcher._cache)
        for signature in signatures:
            dispatcher.compile(signature)
        return dispatcher

    return decorate
