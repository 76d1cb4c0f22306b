"""The command line: flags to Settings, a lazily imported module per command, and the edge where errors become lines."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from mimo_vk import __version__
from mimo_vk.errors import MimoError, UsageError
from mimo_vk.output import Output, OutputError, report
from mimo_vk.settings import SHARED, resolve

COMMANDS = {
    "chat": "an interactive conversation; piped lines are answered one by one",
    "run": "one prompt, one answer",
    "serve": "an HTTP server that speaks OpenAI's API",
    "web": "serve, with a web page to chat on opened in a browser",
    "plan": "what each part costs in memory and on disk, and what fits, before loading",
    "doctor": "what this machine has, and what to do about what it lacks",
    "bench": "how fast prompts are read and tokens come, and where the time goes",
}
INTERRUPTED = 130  # 128 + SIGINT
WORDS = (  # argparse's messages, and ours
    (r"^argument (--[\w-]+): expected one argument$", r"\1: a value is missing (one that begins with - as \1=-...)"),
    (r"^argument (--[\w-]+): ignored explicit argument .*$", r"\1: takes no value"),
    (r"^argument (--[\w-]+): not allowed with argument (.*)$", r"\1 and \2: only one of them can be meant"),
    (r"^argument COMMAND: invalid choice: (\S+).*$", rf"\1 is no command: expected {', '.join(COMMANDS)}"),
    (r"^the following arguments are required: COMMAND$", f"expected a command: {', '.join(COMMANDS)}"),
)
BROKEN_PIPE = 141  # 128 + SIGPIPE: what a Unix filter ends with when its reader has gone


class Parser(argparse.ArgumentParser):
    """argparse, but a bad call is one line and no usage text, which names what is unknown."""

    def error(self, message: str) -> NoReturn:
        for pattern, said in WORDS:
            message = re.sub(pattern, said, message)
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command doesn't know is its own error: argparse would pass it on to the parser above."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest[0].partition("=")[0]))
        return found, rest

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected {word!r}: whatever is said to this command stands behind a flag"
        known = [flag.removeprefix("--") for flag in self._option_string_actions]
        close = difflib.get_close_matches(word.lstrip("-"), known, n=1)
        return f"unknown flag {word}" + (f"; --{close[0]} was meant?" if close else "")


def build_parser() -> Parser:
    """The parser of every command. Shared flags are kept as the text given: ``settings.resolve`` reads them."""
    parser = Parser(prog="mimo-vk", description="Run MiMo-V2.6 from the released checkpoint.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mimo-vk {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        if name == "run":
            add_run_flags(command)
        elif name == "chat":
            add_chat_flags(command)
        elif name in ("serve", "web"):
            add_serve_flags(command)
        elif name == "bench":
            add_bench_flags(command)
        elif name == "plan":
            command.add_argument("--json", action="store_true", help="print one object of JSON instead")
        add_shared_flags(command)
    return parser


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """What only ``run`` takes."""
    prompt = parser.add_argument_group("the prompt, one of these").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt as it is; special tokens written in it count")
    prompt.add_argument("--ids", metavar='"1 2 3"', help="the prompt as token ids; no tokenizer is needed")
    prompt.add_argument("--chat", metavar="TEXT", help="a user's message, put into the chat template")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        help="a picture, before the text of --chat, or where --prompt or --ids has its placeholder; repeats",
    )
    parser.add_argument("--ngen", metavar="N", default="256", help="tokens to generate at most (256); 0 only reads")
    parser.add_argument("--dump-logits", metavar="FILE.npy", help="write the logits of every prompt position, float32")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """What only ``chat`` takes."""
    parser.add_argument("--attach", metavar="URL", help="talk to a running server instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="with --attach, the server's key [MIMO_API_KEY]")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """What only ``serve`` and ``web`` take."""
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", metavar="N", default="8000", help="the port (8000); 0 takes any that is free")
    parser.add_argument("--model-id", metavar="NAME", help="the model's name in the API (the directory's)")
    parser.add_argument("--api-key", metavar="KEY", help="the key that every request must bring [MIMO_API_KEY]")
    parser.add_argument(
        "--log-prompts", action="store_true", default=None, help="log what is asked, word for word [MIMO_LOG_PROMPTS]"
    )
    parser.add_argument("--allow-host", metavar="NAME", action="append", help="a Host that requests may name; repeats")
    parser.add_argument(
        "--allow-origin", metavar="ORIGIN", action="append", help="the origin of a web page that may ask; repeats"
    )


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """What only ``bench`` takes."""
    parser.add_argument("--kernels", action="store_true", help="time the single kernels too, at the release's sizes")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Every row of the registry that has a flag."""
    group = parser.add_argument_group("shared flags (a flag beats its variable)")
    for row in SHARED:
        if row.flag is None:
            continue
        about = row.help + (f" [{row.variable}]" if row.variable else "")
        if row.metavar is None:
            group.add_argument(row.flag, dest=row.field, action="store_true", default=None, help=about)
        else:
            group.add_argument(row.flag, dest=row.field, metavar=row.metavar, help=about)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for a bad call or a bad checkpoint, 1 for the rest."""
    replace_unwritable()
    output = sys.stdout
    if output is not None:
        sys.stdout = Output(output)
    try:
        status = edge(argv)
        if not status:
            flush()
    except BrokenPipeError:
        status = BROKEN_PIPE
    except OutputError as error:
        status = 1
        report(str(error.strerror))
    finally:
        sys.stdout = output
        detach_failed_output()
    return status


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The call's flags. UsageError for one that can't be read; SystemExit after --help and --version."""
    parser = build_parser()
    given = sys.argv[1:] if argv is None else list(argv)
    for word in given:
        if not word.startswith("-"):
            break
        if word not in ("-h", "--help", "--version"):
            parser.error(f"{word.partition('=')[0]} before the command: flags stand behind it")
    return parser.parse_args(given)


def edge(argv: Sequence[str] | None) -> int:
    """Dispatch, with every error but standard output's own turned into lines and a status."""
    debug = False
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = interrupt_again
    try:
        args = parse(argv)
        settings, warnings = resolve(vars(args))
        debug = settings.log_level == "debug"
        start_log(settings.log_level)
        for warning in warnings:
            report(f"warning: {warning}")
        command = importlib.import_module(f"mimo_vk.{args.command}")
        return int(command.main(settings, args))
    except SystemExit as leave:  # argparse after --help and --version
        return leave.code if isinstance(leave.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BrokenPipeError, OutputError):
        raise
    except MimoError as error:
        if debug:
            logging.getLogger("mimo_vk").debug("raised here", exc_info=True)
        report(str(error))
        return error.exit_code
    except Exception as error:
        if debug:
            logging.getLogger("mimo_vk").debug("raised here", exc_info=True)
        detail = " ".join(str(error).split()) or "no message"
        report(
            f"{type(error).__name__}: {detail}" + ("" if debug else "; run with --log-level debug for the traceback")
        )
        return 1


def interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that falls into a weak reference's callback, of which imports have many, is dropped: send it again."""
    if lost.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident
        # Not from here, where it would be dropped as well; and a real signal, which ends a wait for the disk.
        again = threading.Timer(0.01, signal.pthread_kill, (main_thread, signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(lost)


class LineHandler(logging.Handler):
    """Log records as lines of the program's own, on whatever standard error is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        report(f"{record.levelname.lower()}: {self.format(record)}")


def start_log(level: str) -> None:
    """Log to standard error from ``level`` on."""
    root = logging.getLogger()
    if not any(isinstance(handler, LineHandler) for handler in root.handlers):
        root.addHandler(LineHandler())
    for name in ("mimo_vk", "cpu_fallback"):
        logging.getLogger(name).setLevel(level.upper())


def replace_unwritable() -> None:
    """Text that a terminal's encoding lacks is replaced rather than fatal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def detach_failed_output() -> None:
    """Point outputs that can't be flushed at the null device, so that Python's own flush at exit says nothing more."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
