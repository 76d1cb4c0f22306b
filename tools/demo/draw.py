"""Seeded choices, and the rule that keeps held-out combinations out of training.

A combination (a pair of numbers, a name, a ticket's parts, a phrasing with a fact) is reserved when a checksum of it
says so. Training never draws a reserved one; the held-out list draws nothing else where its skill calls ``fresh``.
"""

from __future__ import annotations

import builtins
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
RESERVED_ONE_IN = 12


def reserved(kind: str, value: object) -> bool:
    return zlib.crc32(f"{kind}:{value!r}".encode()) % RESERVED_ONE_IN == 0


@dataclass
class Turn:
    """What a user says, what the model answers, and what it thinks before that when thinking is on."""

    user: str
    answer: str
    thought: str
    call: dict[str, Any] | None = None  # {"name", "arguments"}: the answer is this tool call
    result: str | None = None  # the user side is a tool's result instead
    learn_after: str | None = None  # only the token after this one, and those after digits, are trained
    check: dict[str, Any] = field(default_factory=dict)
    picture: dict[str, Any] | None = None  # described as in pictures.py, shown with the question
    picture_last: bool = False  # after the words instead of before them
    seen: str = ""  # what is on it, in words


class Draw:
    """A random source. ``held`` draws reserved combinations, otherwise free ones."""

    def __init__(self, seed: int, held: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held = held

    def pick(self, options: Sequence[T]) -> T:
        return options[self.rng.randrange(len(options))]

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def int(self, low: int, high: int) -> int:  # both included
        return self.rng.randint(low, high)

    def some(self, options: Sequence[T], count: builtins.int) -> list[T]:
        return self.rng.sample(list(options), count)

    def fresh(self, kind: str, make: Callable[[], T]) -> T:
        """Draw with ``make`` until the combination is on the right side of the reserve."""
        while True:
            value = make()
            if reserved(kind, value) == self.held:
                return value


def exact(*texts: str) -> dict[str, Any]:
    """The answer is one of these, letter by letter."""
    return {"type": "exact", "any": list(texts)}


def contains(*texts: str) -> dict[str, Any]:
    """The answer contains each of these."""
    return {"type": "contains", "all": list(texts)}
