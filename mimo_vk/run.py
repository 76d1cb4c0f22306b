"""``mimo-vk run``: one prompt, one answer, streamed; its logits to a file and its figures as JSON if asked for."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimo_vk.conversation import Answer
from mimo_vk.engine import Engine
from mimo_vk.errors import ImageError, UsageError
from mimo_vk.formats import F32
from mimo_vk.npy import NpyFile
from mimo_vk.output import report, to_stderr
from mimo_vk.picture_paths import naming, read_picture
from mimo_vk.pictures import NONE, Picture, Pictures, bare, user_message
from mimo_vk.progress import READING, Progress, ticking, watchers
from mimo_vk.room import advice, ways
from mimo_vk.sampling import Sampler
from mimo_vk.session import Session
from mimo_vk.settings import Settings, whole
from mimo_vk.stream import Content, Event, Reasoning
from mimo_vk.tokenizer import lone_surrogate


@dataclass
class RawAnswer:
    """What was generated where there is no tokenizer: ids alone, in the terms of ``Answer``."""

    ids: list[int] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""


def main(settings: Settings, args: argparse.Namespace) -> int:
    """Run one prompt. Errors: UsageError before anything is loaded where the call alone shows it."""
    if args.prompt is None and args.ids is None and args.chat is None:
        raise UsageError("a prompt is needed: --chat, --prompt or --ids (see mimo-vk run --help)")
    ngen = read_ngen(args.ngen)
    given = None if args.ids is None else read_ids(args.ids)
    files = [(path, read_picture(path)) for path in map(Path, args.image or ())]
    with NpyFile(args.dump_logits) as dump, Progress() as progress, Engine.open(settings, progress) as engine:
        progress.clear()
        for notice in engine.notices:
            report(notice)
        for warning in engine.warnings:
            report(f"warning: {warning}")
        ids, pictures = read_prompt(engine, args, given, files, settings.think)
        check_room(engine, len(ids), ngen, pictures)
        session = engine.session()
        with naming([path for path, _ in files]):
            logits = read(engine, session, ids, pictures, dump, progress)
        sampler = Sampler(settings.temperature or 0.0, 1.0 if settings.top_p is None else settings.top_p, settings.seed)
        answer = generate(engine, session, ids, logits, ngen, sampler)
        if args.json:
            print(json.dumps(result(engine, ids, answer), ensure_ascii=False))
    return 0


def read_ngen(text: str) -> int:
    """The number of tokens to generate at most."""
    try:
        return whole(0)(text)
    except ValueError as error:
        raise UsageError(f"--ngen: expected {error}, found {text!r}") from None


def read_ids(text: str) -> list[int]:
    """Token ids separated by spaces or commas. UsageError for anything else."""
    parts = text.replace(",", " ").split()
    bad = next((part for part in parts if not re.fullmatch(r"[0-9]{1,18}", part)), None)
    if bad is not None:
        raise UsageError(f"--ids: expected whole numbers such as 1 2 3, found {bad!r}")
    if not parts:
        raise UsageError("--ids: expected at least one token id, found none")
    return [int(part) for part in parts]


def read_prompt(
    engine: Engine, args: argparse.Namespace, ids: list[int] | None, files: list[tuple[Path, bytes]], think: bool
) -> tuple[list[int], Pictures]:
    """The prompt's ids and where its pictures stand. ids: those of --ids. Errors: UsageError, ImageError."""
    pictures = [_picture(engine, path, data) for path, data in files]
    if ids is not None:
        return ids, engine.picture_tools.find(ids, pictures) if pictures else NONE
    ids = prompt_ids(engine, args, [picture.data for picture in pictures], think)
    return engine.picture_tools.place(ids, pictures) if pictures else (ids, NONE)


def _picture(engine: Engine, path: Path, data: bytes) -> Picture:
    try:
        return engine.picture_tools.picture(data)
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None


def prompt_ids(engine: Engine, args: argparse.Namespace, files: list[bytes], think: bool) -> list[int]:
    """The ids of --prompt or --chat, a placeholder for each picture.

    UsageError where the checkpoint lacks the files that it takes.
    """
    name = "--prompt" if args.chat is None else "--chat"
    if engine.tokenizer is None:
        raise UsageError(f"{name}: there is no tokenizer.json in {engine.model_dir}; give the prompt as --ids")
    text = args.prompt if args.chat is None else args.chat
    if found := lone_surrogate(text):
        raise UsageError(f"{name}: the text is not UTF-8: {found}")
    if args.chat is None:
        ids = engine.tokenizer.encode(args.prompt, special=True)
    elif engine.template is None:
        raise UsageError(f"{name}: there is no chat template in {engine.model_dir}; use --prompt or --ids")
    else:
        messages, _ = bare([user_message(args.chat, files)])
        ids = engine.template.prompt_ids(engine.tokenizer, messages, enable_thinking=think)
    if not ids:
        raise UsageError(f"{name}: the prompt is empty")
    return ids


def check_room(engine: Engine, count: int, ngen: int, pictures: Pictures = NONE) -> None:
    """Refuse what the context can't hold, saying what would make room."""
    if count + ngen <= engine.ctx:
        return
    found = [f"--ngen {engine.ctx - count}"] if count < engine.ctx else []
    found += ways(count, ngen, engine.ctx, engine.config.max_position_embeddings, pictures)
    asked = f"{count} prompt tokens{pictures.share} and --ngen {ngen}"
    raise UsageError(f"{asked} are more than the context of {engine.ctx}{advice(found)}")


def read(
    engine: Engine, session: Session, ids: list[int], pictures: Pictures, dump: NpyFile, progress: Progress
) -> F32:
    """Read the prompt, every position's logits into the file where one is wanted; the last one's [1, V]."""
    with ticking(progress, READING) as note:
        logits = _read(engine, session, ids, pictures, dump, watchers(note))
    progress.clear()
    return logits


def _read(
    engine: Engine, session: Session, ids: list[int], pictures: Pictures, dump: NpyFile, watchers: dict[str, Any]
) -> F32:
    if not dump.wanted:
        return session.prompt(ids, pictures=pictures, **watchers)
    last: F32 | None = None

    def blocks() -> Iterator[F32]:
        nonlocal last
        for block in session.prompt_blocks(ids, pictures=pictures, **watchers):
            last = block[-1:]
            yield block

    dump.save(blocks(), (len(ids), engine.config.vocab_size))
    assert last is not None
    return last


def generate(
    engine: Engine, session: Session, ids: list[int], logits: F32, ngen: int, sampler: Sampler
) -> Answer | RawAnswer:
    """Generate what follows the prompt; print as it comes: content (without a tokenizer ids) to stdout, reasoning to
    stderr."""
    printer = Printer()
    how: Any = {"sampler": sampler, "max_tokens": ngen, "stop_ids": engine.stop_ids}
    if engine.tokenizer is None:
        raw = RawAnswer()
        for token in session.generate(logits, **how):
            raw.ids.append(token)
            printer.content(f"{token} ")
        raw.finish_reason = session.finish_reason
        printer.close()
        return raw
    answer = Answer(session, engine.tokenizer, ids, logits=logits, **how)
    for event in answer.events():
        printer.event(event)
    printer.close()
    return answer


class Printer:
    """Writes an answer as it comes, and ends each stream's last line."""

    def __init__(self) -> None:
        self._open = {"stdout": False, "stderr": False}  # whether a line was begun

    def event(self, event: Event) -> None:
        if isinstance(event, Content):
            self.content(event.text)
        elif isinstance(event, Reasoning):
            self._write("stderr", event.text)
        else:
            self._end("stdout")
            self.content(json.dumps({"name": event.name, "arguments": event.arguments}, ensure_ascii=False) + "\n")

    def content(self, text: str) -> None:
        if self._open["stderr"] and text:
            self._end("stderr")
        self._write("stdout", text)

    def close(self) -> None:
        self._end("stderr")
        self._end("stdout")

    def _write(self, name: str, text: str) -> None:
        if text:
            if name == "stderr":
                to_stderr(text)
            else:
                print(text, end="", flush=True)
            self._open[name] = not text.endswith("\n")

    def _end(self, name: str) -> None:
        if self._open[name]:
            self._write(name, "\n")


def result(engine: Engine, ids: list[int], answer: Answer | RawAnswer) -> dict[str, Any]:
    """The object of --json."""
    stats = engine.snapshot_stats()
    seconds = {"load": stats.load_seconds, "prefill": stats.prefill_seconds, "decode": stats.decode_seconds}
    return {
        "prompt_ids": ids,
        "ids": answer.ids,
        "text": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": answer.tool_calls,
        "finish_reason": answer.finish_reason,
        "seconds": seconds | stats.parts,
        "stats": stats.as_dict(),
    }
