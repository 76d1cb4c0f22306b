"""The lists that conversations draw from."""

from __future__ import annotations

from tools.demo.draw import Draw, reserved
from tools.demo.phrases import table, texts

NAMES = texts("names")
SYLLABLES = texts("syllables")
WORDS = texts("words")
CITIES = texts("cities")
COUNTRIES, CAPITALS = tuple(table("capitals")), tuple(table("capitals").values())
PLACES = tuple(dict.fromkeys(word for place in (*COUNTRIES, *CAPITALS) for word in place.split()))
COLOURS = texts("colours")
ANIMALS = texts("animals")
THINGS = texts("things")


def invented(draw: Draw, low: int = 2, high: int = 3) -> str:
    return "".join(draw.pick(SYLLABLES) for _ in range(draw.int(low, high)))


def crossed(draw: Draw) -> str:
    """The head of one word and the tail of another, so that any piece of any name gets copied, reserved ones' too."""
    head, tail = (draw.pick((*NAMES, *CITIES, *CITIES, *CAPITALS, *COUNTRIES)) for _ in range(2))
    return head[: draw.int(1, len(head) - 1)] + tail[draw.int(1, len(tail) - 1) :]


def anyone(draw: Draw, listed: list[str]) -> str:
    """One of the list; in training half of them are made up instead, so that any piece of a word gets copied."""
    if draw.held or draw.chance(0.5):
        return draw.pick(listed)
    if draw.chance(0.7):
        return crossed(draw)
    return draw.pick((*WORDS, *ANIMALS, *THINGS)).capitalize() + draw.pick(("", "", *SYLLABLES))


def proper(draw: Draw, low: int = 2, high: int = 3) -> str:
    """A made-up name of a place or a thing, which is not a reserved person's name either."""
    return draw.fresh("name", lambda: invented(draw, low, high).capitalize())


def name(draw: Draw) -> str:
    """A person's name from the list, or made of syllables, so that copying is learnt piece by piece."""
    return draw.fresh("name", lambda: invented(draw).capitalize() if draw.chance(0.4) else anyone(draw, NAMES))


def city(draw: Draw) -> str:
    return draw.fresh("name", lambda: invented(draw).capitalize() if draw.chance(0.3) else anyone(draw, CITIES))


def phrase(draw: Draw, low: int, high: int, kind: str = "phrase") -> list[str]:
    """Distinct words, a combination on the right side of the reserve (single words are never reserved)."""

    def make() -> tuple[str, ...]:
        return tuple(draw.some(WORDS, draw.int(low, high)))

    while True:
        words = make()
        if (reserved(kind, words) == draw.held) if len(words) > 1 else not draw.held:
            return list(words)
