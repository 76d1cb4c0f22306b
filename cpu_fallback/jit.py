"""The one way that this package compiles a function with numba.

Every compiled function follows IEEE-754 to the letter (no fastmath, so no fused multiply-add), releases the GIL and is
cached on disk: beside the package, else in the user's cache directory, else (a read-only install) not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile


@functools.cache
def sources_digest() -> str:
    """Of numba and every source file of this package: numba alone looks only at the file of the function itself,
    and would keep serving code into which an older version of another file's function was inlined."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class PackageCacheFile(IndexDataCacheFile):
    """One function's compiled code on disk: a file per signature, named by what was compiled.

    numba numbers its files in an index. Two processes that write at once, or run different sources, can leave a number
    pointing at the code of another signature, which crashes; a name made of the contents can't.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__(cache.cache_path, cache._impl.filename_base, sources_digest())
        function = cache._impl.filename_base.split("-")[0]  # module and name; the line that follows may move
        self._prefix = f"{function}-{sources_digest()}-"
        self._older = f"{function}-*.nbc"

    def _path(self, key: Any) -> Path:
        return Path(self._cache_path) / f"{self._prefix}{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.nbc"

    def load(self, key: Any) -> Any:
        try:
            return pickle.loads(self._path(key).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def save(self, key: Any, data: Any) -> None:
        # On a full disk the code runs all the same, and is compiled again next time.
        with contextlib.suppress(OSError):
            for path in Path(self._cache_path).glob(self._older):
                if not path.name.startswith(self._prefix):
                    path.unlink(missing_ok=True)
            with self._open_for_write(str(self._path(key))) as file:
                file.write(self._dump(data))

    def flush(self) -> None:
        for path in Path(self._cache_path).glob(f"{self._prefix}*.nbc"):
            path.unlink(missing_ok=True)


def jit(*signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit with this package's settings; ``signatures``, if any, are compiled at once."""
    settings = {"error_model": "numpy", "fastmath": False, "nogil": True, **options}

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**settings)(function)
        # Where no directory is writable numba finds no place for the code, and it is compiled in every process.
        with contextlib.suppress(RuntimeError):
            dispatcher.enable_caching()
            dispatcher._cache._cache_file = PackageCacheFile(dispatcher._cache)
        for signature in signatures:
            dispatcher.compile(signature)
        return dispatcher

    return decorate
