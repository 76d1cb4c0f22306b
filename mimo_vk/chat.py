"""``mimo-vk chat``: a conversation on a terminal, or an answer for each line that is piped in."""

from __future__ import annotations

import argparse
import io
import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from mimo_vk.conversation import ContextFull
from mimo_vk.decide import read_options
from mimo_vk.engine import Engine
from mimo_vk.errors import Cancelled, MimoError, UsageError
from mimo_vk.output import report
from mimo_vk.picture_paths import naming, read_picture, split_line
from mimo_vk.progress import READING, Progress, Report, ticking, watchers
from mimo_vk.settings import Settings
from mimo_vk.stream import Content, Event, Reasoning
from mimo_vk.talk import Local, Talk

HELP = """\
/reset   forget the conversation
/think   let the model think before it answers, or stop that
/decide  /decide A | B | C: the next lines are questions, answered with how likely each is; /decide alone goes back
/stats   where the time went
/quit    leave (so does Ctrl-D); Ctrl-C stops an answer
/help    this list
A line that begins with a picture's path (dragged in, quoted, or as it is) sends the picture."""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
PROMPT, DECIDE_PROMPT = "> ", "decide> "
# What a terminal would act on: control characters but tab and newline.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


def main(settings: Settings, args: argparse.Namespace) -> int:
    """Chat until the input ends. 0, or the status of the last piped line that could not be answered."""
    if args.attach is not None:
        from mimo_vk.attach import Remote  # an HTTP client: nobody else waits for its import

        if args.model is not None:
            raise UsageError("--attach and --model: the server has its model already")
        with Remote(args.attach, settings) as remote:
            return run(remote, settings)
    if args.api_key is not None:
        raise UsageError("--api-key: only of use with --attach")
    with Progress() as progress, Engine.open(settings, progress) as engine:
        progress.clear()
        for notice in engine.notices:
            report(notice)
        for warning in engine.warnings:
            report(f"warning: {warning}")
        return run(Local(engine, settings), settings)


def run(talk: Talk, settings: Settings) -> int:
    """A conversation with whoever it is, on whatever standard input is."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    screen = Screen(sys.stdout or io.StringIO())  # Python has none where the caller closed it
    chat = Chat(talk, screen, think=settings.think)
    if terminal and screen.terminal:
        screen.note(f"{talk.banner()}\n/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    return chat.converse() if terminal else chat.answer_lines()


class Chat:
    """The commands and turns of one conversation."""

    def __init__(self, talk: Talk, screen: Screen, *, think: bool = False) -> None:
        self.think = think
        self._talk = talk
        self._screen = screen
        self._options: tuple[str, ...] = ()  # of a decision; none: lines are turns

    def converse(self) -> int:
        """Read turns from a terminal. Ctrl-C twice in a row at the prompt, or Ctrl-D, leaves."""
        _use_readline()
        hinted = False
        while True:
            try:
                prompt = DECIDE_PROMPT if self._options else PROMPT
                line = input(prompt if self._screen.terminal else "")
                hinted = False
                if not self.line(line, terminal=True):
                    return 0
            except EOFError:
                self._screen.end_line(force=True)
                return 0
            except KeyboardInterrupt:
                self._screen.end_line(force=True)
                if hinted:
                    return 0
                hinted = True
                self._screen.note("Ctrl-C again or Ctrl-D leaves")
            except MimoError as error:
                self._screen.end_line()
                report(str(error))

    def answer_lines(self) -> int:
        """Answer each line of a pipe or file."""
        status = 0
        for line in _lines(sys.stdin):
            try:
                if not self.line(line, terminal=False):
                    break
            except MimoError as error:
                self._screen.end_line()
                report(str(error))
                status = error.exit_code
        return status

    def line(self, line: str, terminal: bool) -> bool:
        """Do what one line asks; False to leave."""
        line = line.strip()
        command = re.fullmatch(r"/(\w*)(\s.*)?", line)
        if not line:
            return True
        if command:
            return self._command(command[1], (command[2] or "").strip())
        answer = self._decide if self._options else self._answer
        try:
            if terminal:
                with Interruptible() as stopped:
                    answer(line, stopped)
            else:
                answer(line, None)
        except ContextFull as error:
            raise ContextFull(f"{error}; /reset starts afresh" if self._talk.begun else str(error)) from None
        return True

    def _command(self, name: str, rest: str) -> bool:
        if name == "quit":
            return False
        if name in ("help", ""):
            self._screen.note(HELP)
        elif name == "reset":
            self._talk.reset()
            self._screen.note("forgotten")
        elif name == "think":
            self.think = not self.think
            self._screen.note("thinking is on" if self.think else "thinking is off")
        elif name == "stats":
            self._screen.note("\n".join(self._talk.stats()))
        elif name == "decide":
            self._options = read_options(rest) if rest or not self._options else ()
            chosen = " | ".join(self._options)
            self._screen.note(f"each line is a question now: {chosen}" if chosen else "lines are turns again")
        else:
            self._screen.note(f"unknown command /{name}; /help lists them")
        return True

    def _answer(self, line: str, stopped: Interruptible | None) -> None:
        """One turn, written as it comes."""
        paths, text, how = _turn(line)
        with Progress() as progress, naming(paths), ExitStack() as reading:
            note = reading.enter_context(_shown(progress))
            for event in self._talk.ask(text, think=self.think, cancel=stopped, **how, **watchers(note)):
                reading.close()
                progress.clear()
                self._screen.event(event)
        reason = self._talk.finish_reason
        self._screen.end_line(force=reason == "cancelled")  # the terminal has put a ^C where the cursor stood
        if self._screen.terminal and reason == "cancelled":
            self._screen.note("stopped")
        elif self._screen.terminal and reason == "length":
            self._screen.note("the context is full: /reset starts afresh")

    def _decide(self, line: str, stopped: Interruptible | None) -> None:
        """One closed question."""
        try:
            paths, text, how = _turn(line)
            with Progress() as progress, naming(paths), _shown(progress) as note:
                decision = self._talk.decide(text, self._options, cancel=stopped, **how, **watchers(note))
        except Cancelled:
            self._screen.end_line(force=True)
            self._screen.note("stopped")
            return
        self._screen.lines(decision.lines(bars=self._screen.terminal))


def _turn(line: str) -> tuple[list[Path], str, dict[str, Any]]:
    """A line's pictures, its text; their bytes. Errors: UsageError for a path that leads nowhere."""
    paths, text = split_line(line)
    return paths, text, {"pictures": [read_picture(path) for path in paths]} if paths else {}


def _shown(progress: Progress) -> AbstractContextManager[Report]:
    """How far the reading of a line has come, for whoever watches."""
    watched = sys.stderr is not None and sys.stderr.isatty()
    return ticking(progress if watched else None, READING)


class Screen:
    """Where an answer is written: thinking dimmed on a terminal, nothing but the text anywhere else."""

    def __init__(self, out: TextIO) -> None:
        self.terminal = out.isatty()
        self._out = out
        self._line_open = False
        self._dimmed = False
        self._last: type[Event] | None = None

    def event(self, event: Event) -> None:
        """One piece of an answer; each kind begins on a line of its own."""
        if self._last not in (None, type(event)):
            self.end_line()
        if isinstance(event, Content | Reasoning):
            self._write(event.text, dim=isinstance(event, Reasoning))
        else:
            call = json.dumps({"name": event.name, "arguments": event.arguments}, ensure_ascii=False)
            self._write(call + "\n", dim=False)
        self._last = type(event)

    def note(self, text: str) -> None:
        """Lines of the program's own."""
        self.end_line()
        self._write(text + "\n", dim=True)
        self.end_line()

    def lines(self, lines: Iterable[str]) -> None:
        """Lines that are an answer."""
        for line in lines:
            self._write(line + "\n", dim=False)
        self.end_line()

    def end_line(self, force: bool = False) -> None:
        """End the line that is open (force: whichever the cursor stands in), and an answer."""
        if self._line_open or (force and self.terminal):
            self._write("\n", dim=False)
        self._set_dim(False)
        self._last = None
        self._out.flush()

    def _write(self, text: str, dim: bool) -> None:
        if not text:
            return
        self._set_dim(dim)
        self._out.write(text.translate(_CONTROLS) if self.terminal else text)
        self._out.flush()
        self._line_open = not text.endswith("\n")

    def _set_dim(self, dim: bool) -> None:
        if self.terminal and dim != self._dimmed:
            self._out.write(DIM if dim else PLAIN)
            self._dimmed = dim


class Interruptible:
    """Within it Ctrl-C only makes the object, called, return True."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Interruptible:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


def _use_readline() -> None:
    """Line editing and history, where Python has them: importing is all that ``input`` needs."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)


def _lines(stream: TextIO | None) -> Iterator[str]:
    """Lines as they arrive; bytes that are no text become replacement characters. A closed input has none."""
    if stream is None:
        return
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    while line := stream.readline():
        yield line
