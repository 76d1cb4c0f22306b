"""Values out of one JSON object: typed, every fault collected with its place, unknown keys told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mimo_vk.errors import CheckpointError

NO_LIMIT = 1e30  # for numbers that have none of their own; well inside float32


def shown(value: object) -> str:
    """The value as JSON, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=True, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def same(found: object, expected: object) -> bool:
    """Equal in value and in JSON type: True isn't 1."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


class Fields:
    """One JSON object: takes typed values out of it, and collects the faults and the keys that were used."""

    def __init__(self, where: str, raw: dict[str, Any], faults: list[str], prefix: str = "") -> None:
        self.where, self.raw, self.faults, self.prefix = where, raw, faults, prefix
        self.used: set[str] = set()
        self.faulty: set[str] = set()

    def fault(self, key: str, expected: str) -> None:
        """Note a key's first fault; what follows from it would only be noise."""
        if key in self.faulty:
            return
        self.faulty.add(key)
        found = f"found {shown(self.raw[key])}" if key in self.raw else "it is missing"
        self.faults.append(f"{self.where}: {self.prefix}{key}: expected {expected}, {found}")

    def take(self, key: str) -> Any:
        self.used.add(key)
        return self.raw.get(key)

    def integer(self, key: str, minimum: int = 1, optional: bool = False) -> int:
        """The integer, or ``minimum`` after noting a fault, so that reading goes on and finds the rest."""
        value = self.take(key)
        if value is None and optional:
            return minimum
        if type(value) is int and minimum <= value < 2**31:
            return value
        self.fault(key, f"an integer of {minimum} or more (under 2^31)")
        return minimum

    def number(self, key: str, low: float, high: float, null: float | None = None, *, low_too: bool = False) -> float:
        """A number with low < value <= high (``low_too``: or low itself); null reads as ``null`` where that's given."""
        value = self.take(key)
        if value is None and null is not None and key in self.raw:
            return null
        if type(value) in (int, float) and (low < value <= high or (low_too and value == low)):  # false for NaN
            return float(value)
        bounds = f"a number {'from' if low_too else 'above'} {low:g}" + (
            f", at most {high:g}" if high < NO_LIMIT else ""
        )
        self.fault(key, bounds + (" or null" if null is not None else ""))
        return high if high < NO_LIMIT else 1.0

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            self.fault(key, "true or false")
        return value is True

    def flags(self, key: str, length: int) -> list[int]:
        """A list of ``length`` zeros and ones."""
        value = self.take(key)
        if isinstance(value, list) and len(value) != length:
            if "num_hidden_layers" not in self.faulty:
                self.fault(key, f"{length} entries (num_hidden_layers), not {len(value)}")
        elif not isinstance(value, list) or any(type(v) is not int or v not in (0, 1) for v in value):
            self.fault(key, f"a list of {length} entries, each 0 or 1")
        else:
            return value
        return [0] * length

    def fixed(self, expected: dict[str, Any], may_be_absent: frozenset[str] = frozenset()) -> None:
        for key, value in expected.items():
            if key not in self.raw and key in may_be_absent:
                continue
            if not same(self.take(key), value) or key not in self.raw:
                self.fault(key, f"{shown(value)} (no other value is supported)")

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """An id or a list of ids below ``vocab``."""
        vocab = 2**31 if "vocab_size" in self.faulty else vocab
        value = self.take(key)
        ids = value if isinstance(value, list) else [value]
        if not ids or any(type(v) is not int or not 0 <= v < vocab for v in ids):
            self.fault(key, f"a token id from 0 to {vocab - 1}, or a list of them")
            return ()
        return tuple(dict.fromkeys(ids))

    def inner(self, key: str, expected: str = "an object") -> Fields | None:
        value = self.take(key)
        if isinstance(value, dict):
            return Fields(self.where, value, self.faults, f"{self.prefix}{key}.")
        self.fault(key, expected)
        return None

    def unknown(self, ignored: dict[str, str]) -> list[str]:
        keys = [k for k in self.raw if k not in self.used and k not in ignored]
        return [f"{self.where}: {self.prefix}{k}: unknown key, not used" for k in keys]


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object. Errors: CheckpointError naming the file."""
    try:
        raw = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {shown(raw)}")
    return raw
