"""The held-out list, tests/data/demo_heldout.jsonl: prompts of reserved combinations, each with its exact check.

300 are text alone, 72 have a picture, kept as the description that pictures.py paints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.demo import talk
from tools.demo.draw import Draw, Turn
from tools.demo.mix import turns_of
from tools.demo.render import messages_of

PATH = Path(__file__).parents[2] / "tests" / "data" / "demo_heldout.jsonl"
COUNTS = {
    "arithmetic": 60, "facts": 50, "tools": 50, "closed": 50, "memory": 30,
    "greetings": 15, "repeating": 12, "upper case": 10, "counting": 10, "unknown": 10, "story": 3,
    "shapes": 40, "amounts": 10, "sides": 10, "reading": 12,
}  # fmt: skip
THINK_ONE_IN = 4  # of these the list asks with thinking on
SEED = 20261130

Tools = list[dict[str, Any]] | None


def draw_turns(draw: Draw, skill: str, i: int) -> tuple[list[Turn], Tools]:
    """The turns of one entry. Of the tools' entries every third one continues to the tool's result."""
    if skill == "greetings" and i % 3 == 0:
        return talk.italian(draw), None
    turns, tools = turns_of(draw, skill)
    if skill == "tools" and i % 3 != 2:
        return turns[:1], tools
    return turns, tools


def entry(draw: Draw, skill: str, i: int) -> dict[str, Any]:
    turns, tools = draw_turns(draw, skill, i)
    messages = messages_of(turns, None, False)[:-1]
    think = i % THINK_ONE_IN == 1
    made: dict[str, Any] = {"skill": skill, "messages": messages, "think": think, "check": turns[-1].check}
    return made | ({"tools": tools} if tools else {})


def entries(seed: int = SEED) -> list[dict[str, Any]]:
    """The whole list, no prompt twice. Another seed gives another list of the same kind."""
    draw = Draw(seed, held=True)
    made: list[dict[str, Any]] = []
    seen: set[str] = set()
    for skill, count in COUNTS.items():
        for i in range(count):
            new = unseen(lambda skill=skill, i=i: entry(draw, skill, i), seen)  # type: ignore[misc]
            made.append({"id": len(made), **new})
    return made


def unseen(make: Callable[[], dict[str, Any]], seen: set[str]) -> dict[str, Any]:
    """An entry whose messages were not there before; greetings are few and may come twice."""
    for _ in range(100):
        new = make()
        key = json.dumps(new["messages"])
        if key not in seen:
            break
    seen.add(key)
    return new


def write(path: Path = PATH) -> int:
    made = entries()
    path.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in made), encoding="utf-8")
    return len(made)


def read(path: Path = PATH) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    print(f"{PATH}: {write()} prompts")
