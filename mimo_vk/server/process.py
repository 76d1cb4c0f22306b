"""The model's process: opens the engine, then runs the jobs that come through the pipe, one at a time."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from mimo_vk.cli import replace_unwritable, start_log
from mimo_vk.engine import Engine
from mimo_vk.errors import Cancelled, MimoError
from mimo_vk.output import report
from mimo_vk.progress import Progress
from mimo_vk.server.errors import INTERNAL, InternalError
from mimo_vk.server.jobs import Job
from mimo_vk.session import Session
from mimo_vk.settings import Settings

log = logging.getLogger("mimo_vk")


@dataclass(frozen=True)
class Ready:
    """The engine is open."""

    backend: str
    warnings: list[str]


@dataclass(frozen=True)
class Failed:
    """The engine could not be opened."""

    error: MimoError


@dataclass(frozen=True)
class Emitted:
    """One object of the running job."""

    item: object


@dataclass(frozen=True)
class Done:
    """The running job's end: its result, or its error; and the engine's counters (``Stats`` as a dict)."""

    result: object
    error: BaseException | None
    stats: dict[str, Any]


def main(pipe: Connection, cancelled: Any, settings: Settings, parent: int) -> None:
    """The process's whole life. ``cancelled.value`` is the number of a job to stop; ``parent`` the server's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches this process too: the server decides
    replace_unwritable()
    start_log(settings.log_level)
    try:
        engine = _open(settings, parent)
    except Exception as error:
        _send(pipe, Failed(_for_the_caller(error)))
        return
    with engine:
        session = engine.session()
        for notice in engine.notices:
            report(notice)
        try:
            pipe.send(Ready(engine.backend, engine.warnings))
            while True:
                pipe.send(_next(engine, session, pipe, cancelled, parent))
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the server closed the pipe, or is gone
            return


def _open(settings: Settings, parent: int) -> Engine:
    with Progress() as progress:

        def on_progress(what: str, done: int, total: int) -> None:
            if os.getppid() != parent:
                raise Cancelled("the server is gone")
            progress(what, done, total)

        return Engine.open(settings, on_progress)


def _next(engine: Engine, session: Session, pipe: Connection, cancelled: Any, parent: int) -> Done:
    """Wait for a job and run it."""
    try:
        number, job = pipe.recv()
    except (EOFError, OSError):
        raise
    except Exception as error:  # a job that pickles and can't be read again is a bug of its route
        return Done(None, _for_the_caller(error), asdict(engine.snapshot_stats()))
    return _run(job, number, engine, session, pipe, cancelled, parent)


def _run(
    job: Job, number: int, engine: Engine, session: Session, pipe: Connection, cancelled: Any, parent: int
) -> Done:
    def emit(item: object) -> None:
        pipe.send(Emitted(item))

    def cancel() -> bool:
        return bool(cancelled.value == number) or os.getppid() != parent

    result, error = None, None
    try:
        result = job.run(engine, session, emit, cancel)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as raised:
        error = _for_the_caller(raised)
    return Done(result, error, asdict(engine.snapshot_stats()))


def _for_the_caller(error: Exception) -> MimoError:
    """An error that can be shown and sent; the text of any other goes to the log only."""
    if isinstance(error, MimoError) and _can_be_sent(error):
        return error
    log.error("in the model's process: %s", error, exc_info=error)
    return InternalError(INTERNAL)


def _can_be_sent(value: object) -> bool:
    """Whether the server's process gets the value as it is."""
    try:
        return type(pickle.loads(pickle.dumps(value))) is type(value)
    except Exception:
        return False


def _send(pipe: Connection, message: object) -> None:
    try:
        pipe.send(message)
    except OSError:
        return


Target = Callable[[Connection, Any, Settings, int], None]
