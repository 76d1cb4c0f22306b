"""The mixture: which skills a conversation holds, how many turns, with what around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.demo import calls, facts, looks, stories, sums, talk, tickets
from tools.demo.draw import Draw, Turn
from tools.demo.phrases import texts

SKILLS = (
    "greetings", "arithmetic", "facts", "repeating", "upper case", "counting",
    "closed", "tools", "memory", "story", "unknown", "shapes", "amounts", "sides", "reading",
)  # fmt: skip
# How often a conversation is about a skill, from a training step on. A story or a tool call is long, a sum is short.
# The first 900 steps taught facts and manners but not how to copy, so the later phases have long passages to repeat.
PHASES: tuple[tuple[int, dict[str, int]], ...] = (
    (0, {
        "greetings": 9, "arithmetic": 32, "facts": 14, "repeating": 5, "upper case": 5, "counting": 4,
        "closed": 17, "tools": 8, "memory": 10, "story": 2, "unknown": 7,
    }),
    (900, {
        "greetings": 5, "arithmetic": 24, "practising": 10, "facts": 10, "repeating": 4, "copying": 10, "upper case": 5,
        "counting": 3, "closed": 15, "tools": 8, "memory": 11, "story": 1, "unknown": 4,
    }),
    (1700, {
        "greetings": 3, "arithmetic": 14, "practising": 6, "facts": 5, "repeating": 8, "copying": 34, "upper case": 3,
        "counting": 1, "closed": 6, "tools": 7, "memory": 14, "story": 1, "unknown": 2,
    }),
    (2000, {
        "greetings": 6, "arithmetic": 20, "practising": 8, "facts": 10, "repeating": 5, "copying": 8, "upper case": 7,
        "counting": 5, "closed": 17, "tools": 12, "memory": 12, "story": 1, "unknown": 5,
    }),
    (3350, {
        "greetings": 6, "arithmetic": 22, "practising": 8, "facts": 7, "repeating": 5, "copying": 6, "upper case": 7,
        "counting": 6, "closed": 22, "tools": 13, "memory": 12, "story": 1, "unknown": 4,
    }),
    (3600, {
        "greetings": 8, "arithmetic": 20, "practising": 8, "facts": 7, "repeating": 4, "copying": 5, "upper case": 8,
        "counting": 6, "closed": 20, "interview": 18, "tools": 13, "memory": 14, "story": 2, "unknown": 4,
    }),
    (4700, {
        "greetings": 9, "arithmetic": 19, "practising": 7, "facts": 6, "repeating": 3, "copying": 5, "upper case": 9,
        "counting": 8, "closed": 24, "interview": 16, "tools": 20, "memory": 15, "story": 2, "unknown": 4,
    }),
    (5450, {
        "greetings": 8, "arithmetic": 18, "practising": 7, "facts": 6, "repeating": 3, "copying": 6, "upper case": 9,
        "counting": 8, "closed": 18, "interview": 15, "inbox": 14, "tools": 22, "memory": 19, "story": 1, "unknown": 4,
    }),
    (5850, {
        "greetings": 8, "arithmetic": 17, "practising": 7, "facts": 6, "repeating": 10, "copying": 9, "upper case": 8,
        "counting": 7, "closed": 18, "interview": 14, "inbox": 10, "tools": 10, "calling": 12, "memory": 15,
        "telling": 14, "story": 1, "unknown": 4,
    }),
    (6150, {
        "greetings": 8, "arithmetic": 17, "practising": 7, "facts": 6, "repeating": 10, "copying": 9, "upper case": 8,
        "counting": 7, "closed": 18, "interview": 14, "inbox": 10, "tools": 10, "calling": 12, "memory": 15,
        "telling": 14, "story": 1, "unknown": 4, "shapes": 9, "amounts": 4, "sides": 4, "reading": 5, "album": 14,
    }),
    (6450, {
        "greetings": 8, "arithmetic": 17, "practising": 7, "facts": 6, "repeating": 9, "copying": 8, "upper case": 7,
        "counting": 6, "closed": 18, "interview": 14, "inbox": 8, "tools": 10, "calling": 10, "memory": 14,
        "telling": 12, "story": 1, "unknown": 4, "shapes": 12, "amounts": 4, "sides": 4, "reading": 5, "album": 22,
    }),
    (6900, {
        "greetings": 6, "arithmetic": 17, "practising": 7, "facts": 6, "repeating": 22, "copying": 9, "upper case": 5,
        "counting": 5, "closed": 20, "interview": 16, "inbox": 7, "tools": 10, "calling": 10, "memory": 12,
        "telling": 12, "story": 1, "unknown": 4, "shapes": 12, "amounts": 4, "sides": 4, "reading": 5, "album": 22,
    }),
    (7150, {
        "greetings": 6, "arithmetic": 17, "practising": 6, "facts": 6, "repeating": 10, "copying": 8, "upper case": 5,
        "spelling": 10, "counting": 5, "closed": 28, "interview": 16, "inbox": 5, "tools": 11, "calling": 10,
        "memory": 14, "telling": 12, "story": 1, "unknown": 4, "shapes": 14, "amounts": 4, "sides": 4, "reading": 5,
        "album": 20,
    }),
    (7450, {
        "greetings": 5, "arithmetic": 20, "practising": 7, "facts": 6, "repeating": 7, "copying": 7, "upper case": 5,
        "spelling": 10, "counting": 5, "closed": 20, "interview": 27, "inbox": 5, "tools": 11, "calling": 11,
        "memory": 13, "telling": 11, "story": 5, "unknown": 4, "shapes": 14, "amounts": 4, "sides": 4, "reading": 5,
        "album": 20,
    }),
    (7750, {
        "greetings": 5, "arithmetic": 25, "practising": 8, "facts": 6, "repeating": 5, "copying": 5, "upper case": 6,
        "spelling": 7, "counting": 4, "closed": 24, "interview": 32, "inbox": 4, "tools": 7, "calling": 8,
        "memory": 12, "telling": 9, "story": 5, "unknown": 5, "shapes": 14, "amounts": 4, "sides": 4, "reading": 5,
        "album": 20,
    }),
    (8000, {
        "greetings": 5, "arithmetic": 25, "practising": 8, "facts": 6, "repeating": 5, "copying": 5, "upper case": 6,
        "spelling": 7, "counting": 4, "closed": 30, "interview": 32, "inbox": 3, "tools": 8, "calling": 8,
        "memory": 10, "telling": 9, "story": 5, "unknown": 5, "shapes": 30, "amounts": 4, "sides": 4, "reading": 5,
        "album": 14,
    }),
    (8200, {
        "greetings": 4, "arithmetic": 28, "practising": 9, "facts": 5, "repeating": 5, "copying": 6, "upper case": 4,
        "spelling": 12, "counting": 3, "closed": 28, "interview": 26, "inbox": 2, "tools": 14, "calling": 11,
        "memory": 13, "telling": 9, "story": 4, "unknown": 4, "shapes": 30, "amounts": 3, "sides": 3, "reading": 4,
        "album": 12,
    }),
    (8800, {
        "greetings": 5, "arithmetic": 34, "practising": 12, "facts": 5, "repeating": 6, "copying": 6, "upper case": 6,
        "spelling": 10, "counting": 3, "closed": 26, "interview": 20, "inbox": 2, "tools": 18, "calling": 12,
        "memory": 13, "telling": 9, "story": 4, "unknown": 4, "shapes": 34, "amounts": 4, "sides": 5, "reading": 4,
        "album": 14,
    }),
    (9200, {"shapes": 40, "amounts": 5, "sides": 6, "reading": 6, "album": 20}),
)  # fmt: skip
PICTURED = ("shapes", "amounts", "sides", "reading")  # the skills about pictures
KIN = {
    "practising": "arithmetic",
    "copying": "repeating",
    "spelling": "repeating",
    "interview": "closed",
    "inbox": "closed",
    "calling": "tools",
    "telling": "memory",
}  # reported as
# What a trained token of a skill counts: a story has many easy ones, a sum has two hard ones.
EMPHASIS = {
    "arithmetic": 2.0, "story": 0.3, "closed": 2.0, "shapes": 4.0, "amounts": 3.0, "sides": 4.0, "reading": 3.0,
}  # fmt: skip
SHORT: dict[str, Callable[[Draw], list[Turn]]] = {
    "greetings": talk.fixed,
    "arithmetic": sums.sums,
    "facts": facts.facts,
    "practising": sums.practise,
    "repeating": sums.repeat,
    "copying": sums.copying,
    "spelling": sums.spelling,
    "upper case": sums.upper,
    "counting": sums.count,
    "closed": tickets.closed,
    "interview": tickets.interview,
    "inbox": tickets.inbox,
    "telling": talk.memories,
    "unknown": talk.unknown,
}
SYSTEM = texts("system")


@dataclass
class Conversation:
    turns: list[Turn]
    tag: int
    tools: list[dict[str, Any]] | None = None
    system: str | None = None
    think: bool = False


def short(draw: Draw, skill: str) -> list[Turn]:
    return SHORT[skill](draw)


def filler(draw: Draw) -> list[Turn]:
    """A turn of some short skill, to stand between or before others."""
    return short(draw, draw.pick(("greetings", "arithmetic", "arithmetic", "facts", "facts", "unknown", "repeating")))


def turns_of(draw: Draw, skill: str) -> tuple[list[Turn], list[dict[str, Any]] | None]:
    if skill == "tools":
        return calls.call(draw) if draw.held or draw.chance(0.88) else calls.no_tool(draw)
    if skill == "calling":
        return calls.calls(draw)
    if skill == "memory":
        if not draw.held and draw.chance(0.1):
            return talk.not_told(draw), None
        between = [turn for _ in range(draw.pick((0, 0, 0, 1, 1, 2))) for turn in filler(draw)]
        return talk.memory(draw, between), None
    if skill == "story":
        return stories.story(draw), None
    if skill in PICTURED:
        return looks.look(draw, skill), None
    if skill == "arithmetic" and not draw.held and draw.chance(0.4):
        return sums.practise(draw), None
    return short(draw, skill), None


def conversation(draw: Draw, step: int = 0) -> Conversation:
    """One conversation as it is drawn at a training step."""
    weights = [phase for first, phase in PHASES if first <= step][-1]
    skill = draw.rng.choices(list(weights), list(weights.values()))[0]
    if skill == "album":
        skill = draw.pick(("shapes", "shapes", "shapes", "amounts", "sides", "reading"))
        return Conversation(looks.album(draw, skill), SKILLS.index(skill), None, None, draw.chance(0.2))
    turns, tools = turns_of(draw, skill)
    if tools is None and draw.chance(0.06):
        tools = calls.declared(draw, None)  # tools that this conversation doesn't need
    more = (
        draw.pick((0, 0, 0, 1, 1, 2, 3))
        if skill not in ("story", "tools", "calling", *PICTURED)
        else draw.pick((0, 0, 0, 1))
    )
    for _ in range(more):
        again = short(draw, skill) if skill in ("arithmetic", "facts") and draw.chance(0.6) else filler(draw)
        turns = [*turns, *again] if draw.chance(0.6) else [*again, *turns]
    system = draw.pick(SYSTEM) if draw.chance(0.06) else None
    return Conversation(turns, SKILLS.index(KIN.get(skill, skill)), tools, system, draw.chance(0.28))
