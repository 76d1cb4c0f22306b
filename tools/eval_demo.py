"""Run the demonstration model's held-out list through the engine, greedily, and print a table by skill.

The prompts are tests/data/demo_heldout.jsonl: combinations kept out of training, each with an exact check.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo_vk.engine import Engine
from mimo_vk.errors import MimoError
from mimo_vk.pictures import NONE, Pictures, bare, image_part
from mimo_vk.sampling import Sampler
from mimo_vk.session import Session
from mimo_vk.settings import Settings
from mimo_vk.stream import TAGS, AnswerParser, FinishReason
from tools.demo.checks import Answer, holds
from tools.demo.heldout import entries, read
from tools.demo.pictures import png

REQUIRED = {"arithmetic", "facts", "tools", "closed", "memory", "shapes"}  # the skills that must reach 95%
LONGEST = 400


@dataclass(frozen=True)
class Outcome:
    """``logits``: the bytes of the prompt's last position's. ``ids``: what greedy decoding made of it."""

    entry: dict[str, Any]
    logits: bytes
    ids: list[int]
    answer: Answer
    right: bool


def painted(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the files of its pictures in the place of their descriptions."""
    if isinstance(message["content"], str):
        return message
    parts = [image_part(png(part["picture"])) if "picture" in part else part for part in message["content"]]
    return {**message, "content": parts}


def prompt_of(engine: Engine, entry: dict[str, Any]) -> tuple[list[int], Pictures]:
    """The prompt's ids and what stands where its pictures are."""
    assert engine.tokenizer and engine.template
    messages, files = bare([painted(message) for message in entry["messages"]])
    ids = engine.template.prompt_ids(
        engine.tokenizer, messages, tools=entry.get("tools"), enable_thinking=entry["think"]
    )
    if not files:
        return ids, NONE
    finder = engine.picture_tools
    return finder.place(ids, [finder.picture(data) for data in files])


def answer_to(engine: Engine, session: Session, entry: dict[str, Any]) -> Outcome:
    assert engine.tokenizer
    prompt, pictures = prompt_of(engine, entry)
    parser, stream = AnswerParser(entry.get("tools")), engine.tokenizer.stream(keep=TAGS)
    ids = []
    logits = session.prompt(prompt, pictures=pictures)
    for token in session.generate(logits, max_tokens=LONGEST, sampler=Sampler()):
        ids.append(token)
        parser.push(stream.push(token))
    parser.push(stream.flush())
    parser.finish(cast(FinishReason, session.finish_reason))
    answer = Answer(parser.content, parser.reasoning, parser.tool_calls, session.finish_reason == "stop")
    return Outcome(entry, logits.tobytes(), ids, answer, holds(entry["check"], answer))


def evaluate(engine: Engine, entries: Iterable[dict[str, Any]]) -> Iterator[Outcome]:
    """Each entry answered cold, one after the other."""
    session = engine.session()
    for entry in entries:
        session.reset()
        yield answer_to(engine, session, entry)


def table(outcomes: list[Outcome]) -> str:
    """Right and asked by skill; a star where 95% are required and missed."""
    asked = Counter(o.entry["skill"] for o in outcomes)
    right = Counter(o.entry["skill"] for o in outcomes if o.right)
    lines = [f"{'skill':<12} {'right':>5} {'asked':>5} {'share':>7}"]
    for skill, count in asked.items():
        missed = skill in REQUIRED and right[skill] < 0.95 * count
        lines.append(f"{skill:<12} {right[skill]:>5} {count:>5} {right[skill] / count:>7.1%}{' *' if missed else ''}")
    total = sum(right.values())
    lines.append(f"{'all':<12} {total:>5} {len(outcomes):>5} {total / max(1, len(outcomes)):>7.1%}")
    return "\n".join(lines)


def describe(outcome: Outcome) -> str:
    entry, answer = outcome.entry, outcome.answer
    said = answer.tool_calls or answer.content
    asked = entry["messages"][-1]["content"]
    if isinstance(asked, list):
        asked = " ".join(part.get("text", str(part.get("picture"))) for part in asked)
    skill = entry["skill"] + (" (thinking)" if entry["think"] else "")
    return f"{entry['id']:>3} {skill}: {asked!r} gave {said!r}, expected {entry['check']}"


@contextlib.contextmanager
def told_in_a_line(program: str) -> Iterator[None]:
    """A checkpoint that can't be used ends the program with its lines and status 2."""
    try:
        yield
    except MimoError as error:
        print("\n".join(f"{program}: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the one in the package")
    parser.add_argument("--wrong", type=int, default=0, help="print at most so many wrong answers")
    parser.add_argument("--seed", type=int, help="draw another list of the same kind instead")
    parser.add_argument("--skills", nargs="*", help="take only these")
    parser.add_argument("--every", type=int, default=1, help="take only every N-th prompt")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.every < 1:
        parser.error(f"argument --every: expected 1 or more, found {args.every}")
    drawn = read() if args.seed is None else entries(args.seed)
    skills = {entry["skill"] for entry in drawn}
    if unknown := set(args.skills or ()) - skills:
        parser.error(f"argument --skills: expected {', '.join(sorted(skills))}, found {', '.join(sorted(unknown))}")
    began = time.monotonic()
    settings = Settings(model=args.model, cpu=True, threads=args.threads, ctx=2048)
    with told_in_a_line("eval_demo"), Engine.open(settings) as engine:
        listed = [entry for entry in drawn if not args.skills or entry["skill"] in args.skills]
        outcomes = list(evaluate(engine, listed[:: args.every]))
    for outcome in [o for o in outcomes if not o.right][: args.wrong]:
        print(describe(outcome))
    print(table(outcomes))
    print(f"{sum(len(o.ids) for o in outcomes)} tokens generated, {time.monotonic() - began:.0f} seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
