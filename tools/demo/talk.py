"""Greetings, who the model is and what it can do, memory, and what it does not know. English and Italian."""

from __future__ import annotations

from typing import Any

from tools.demo.draw import Draw, Turn, contains, exact
from tools.demo.facts import UNKNOWN_COUNTRIES
from tools.demo.phrases import PHRASES, texts
from tools.demo.words import ANIMALS, COLOURS, WORDS, city, invented, name, proper

FIXED: list[dict[str, Any]] = PHRASES["fixed"]  # what the user says, the answer, the thought
MEMORIES: list[dict[str, Any]] = PHRASES["memories"]  # {} in them is the thing remembered
NOT_TOLD: list[dict[str, Any]] = PHRASES["not_told"]
ASK_UNKNOWN, UNKNOWN = texts("ask_unknown"), str(PHRASES["unknown"])
CHIEDI, NON_SO = texts("ask_unknown_italian"), str(PHRASES["unknown_italian"])


def fixed(draw: Draw) -> list[Turn]:
    user, answer, thought = draw.fresh("fixed", lambda: _fixed(draw))
    return [Turn(user, answer, thought, check=exact(answer))]


def _fixed(draw: Draw) -> tuple[str, str, str]:
    group = draw.pick(FIXED)
    return draw.pick(group["says"]), group["answer"], group["thought"]


def italian(draw: Draw) -> list[Turn]:
    while True:
        turns = fixed(draw)
        if "Italian" in turns[0].thought:
            return turns


def remembered(draw: Draw, what: str) -> str:
    if what == "colour":
        return draw.pick(COLOURS)
    return city(draw) if what == "city" else name(draw)


def memories(draw: Draw) -> list[Turn]:
    """Several things told, then asked in another order."""
    kinds = draw.some([draw.pick(MEMORIES[:2]), *MEMORIES[2:]], draw.int(2, 3))  # the first two are the name's
    pairs = [memory(draw, [], kind) for kind in kinds]
    asked = [pair[1] for pair in draw.some(pairs, len(pairs))]
    return [*(pair[0] for pair in pairs), *asked]


def memory(draw: Draw, between: list[Turn], kind: dict[str, Any] | None = None) -> list[Turn]:
    """Two turns of memory, with other turns between them."""
    kind = kind or draw.pick((*MEMORIES, MEMORIES[0], MEMORIES[0]))
    what, animal = kind["what"], draw.pick(ANIMALS)
    thing = remembered(draw, what)
    say, ask = (draw.pick(x).replace("{animal}", animal).replace("{}", thing) for x in (kind["says"], kind["asks"]))
    told = Turn(say, kind["reply"].replace("{}", thing), f"The user tells me something: {thing}.")
    final = kind["answer"].replace("{animal}", animal).replace("{}", thing)
    return [told, *between, Turn(ask, final, f"The user told me: {thing}.", check=contains(thing))]


def not_told(draw: Draw) -> list[Turn]:
    kind = draw.pick(NOT_TOLD)
    return [Turn(draw.pick(kind["asks"]), kind["answer"], "The user has not told me.", check=exact(kind["answer"]))]


def unknown_country(draw: Draw) -> str:
    return draw.pick(UNKNOWN_COUNTRIES) if draw.chance(0.7) else proper(draw, 2, 4)


def unknown(draw: Draw) -> list[Turn]:
    asks, answer = (CHIEDI, NON_SO) if draw.chance(0.1) else (ASK_UNKNOWN, UNKNOWN)

    def make() -> str:
        thing = invented(draw, 2, 4) if draw.chance(0.5) else f"the {draw.pick(WORDS)}"
        fill = {
            "thing": thing,
            "Thing": proper(draw, 1, 2),
            "word": draw.pick(WORDS),
            "name": name(draw),
            "place": proper(draw),
            "unknown": unknown_country(draw),
            "city": city(draw),
            "city2": city(draw),
            "colour": draw.pick(COLOURS),
            "animal": draw.pick(ANIMALS),
            "big": str(draw.int(2, 999)),
            "small": str(draw.int(2, 9)),
            "year": str(draw.int(1400, 2030)),
        }
        return draw.pick(asks).format(**fill)

    user = draw.fresh("unknown", make)
    return [Turn(user, answer, "I have not learnt this.", check={"type": "starts", "text": answer.split(".")[0]})]
