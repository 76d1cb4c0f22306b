"""The server's side of the model's process: a bounded queue of jobs, one of them running, and a restart if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal

from mimo_vk.errors import MimoError
from mimo_vk.server import process
from mimo_vk.server.errors import INTERNAL, InternalError, QueueFull, Unavailable
from mimo_vk.server.jobs import Job
from mimo_vk.settings import Settings

log = logging.getLogger("mimo_vk")
QUEUE_LIMIT = 32
STOP_SECONDS = 5.0  # for the process to leave by itself
State = Literal["loading", "ready", "restarting", "down", "stopped"]
_END = object()
LOADING = "the model is being loaded: try again in a moment"
DIED = "the model's process died while it worked on this request; it is being started again"
DOWN = "the model's process died twice in a row and is not started again: see the server's log"
STOPPING = "the server is stopping"


class Task:
    """A job in the queue or running; see ``mimo_vk.server.jobs`` for its use. Iterate it once."""

    def __init__(self, worker: Worker, number: int, job: Job) -> None:
        self.number, self.job = number, job
        self.result: Any = None
        self._worker = worker
        self._items: asyncio.Queue[object] = asyncio.Queue()
        self._error: BaseException | None = None

    async def __aenter__(self) -> Task:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (item := await self._items.get()) is not _END:
            yield item
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Nobody waits any more; nothing happens to a job that has ended."""
        self._worker._cancel(self)

    def push(self, item: object) -> None:
        self._items.put_nowait(item)

    def end(self, result: object, error: BaseException | None) -> None:
        self.result, self._error = result, error
        self._items.put_nowait(_END)


class Worker:
    """The model's process and the queue before it. All methods belong to one event loop.

    A process that dies is started again once; one that dies again before it has finished a job stays down.
    """

    def __init__(
        self, settings: Settings, *, queue_limit: int = QUEUE_LIMIT, target: process.Target = process.main
    ) -> None:
        self.state: State = "loading"
        self.queue_limit = queue_limit
        self.backend = ""
        self.counters: dict[str, float] = {}  # the engine's, over all the processes there have been
        self.restarts = 0
        self._settings, self._target = settings, target
        self._waiting: deque[Task] = deque()
        self._running: Task | None = None
        self._number = 0
        self._may_restart = True
        self._spawn = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection | None = None
        self._cancelled: Any = None
        self._before: dict[str, float] = {}  # counters of the processes before this one
        self._loaded: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] | None = None

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return self._running is not None

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process and wait for the engine. The error that kept it from opening is raised."""
        self._loaded = asyncio.get_running_loop().create_future()
        self._launch()
        await self._loaded

    def submit(self, job: Job) -> Task:
        """Put a job into the queue. QueueFull; Unavailable while loading, after a second death, while stopping."""
        refused = {"loading": LOADING, "down": DOWN, "stopped": STOPPING}.get(self.state)
        if refused:
            raise Unavailable(refused)
        if len(self._waiting) >= self.queue_limit:
            raise QueueFull(f"{self.queue_limit} requests are waiting already: try again later")
        self._number += 1
        task = Task(self, self._number, job)
        self._waiting.append(task)
        self._next()
        return task

    async def call(self, job: Job) -> Any:
        """The result of a job whose emitted objects don't matter."""
        async with self.submit(job) as task:
            async for _ in task:
                pass
            return task.result

    async def stop(self) -> None:
        """End every job with Unavailable and the process with them."""
        self.state = "stopped"
        self._end_all(Unavailable(STOPPING))
        if self._loaded is not None and not self._loaded.done():
            self._loaded.cancel()
        if self._process is None:
            return
        assert self._pipe is not None
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(b"")  # wakes an idle process, whose unpickling ends with EOFError
        await asyncio.to_thread(_end, self._process)

    def _launch(self) -> None:
        ours, theirs = self._spawn.Pipe()
        self._cancelled = self._spawn.RawValue(ctypes.c_uint64, 0)
        self._process = self._spawn.Process(
            target=self._target,
            args=(theirs, self._cancelled, self._settings, os.getpid()),
            name="mimo-vk model",
            daemon=True,
        )
        self._process.start()
        theirs.close()  # so that the process's end is the end of the pipe
        self._pipe = ours
        loop = asyncio.get_running_loop()
        threading.Thread(target=_listen, args=(ours, loop, self._on_message), daemon=True).start()

    def _on_message(self, pipe: Connection, message: object) -> None:
        """In the event loop: a message of the process, or None for its end."""
        if pipe is not self._pipe or self.state == "stopped":
            return
        if message is None:
            self._on_death()
        elif isinstance(message, process.Ready):
            self._on_ready(message)
        elif isinstance(message, process.Failed):
            self._on_failed(message.error)
        elif isinstance(message, process.Emitted):
            if self._running is not None:
                self._running.push(message.item)
        elif isinstance(message, process.Done):
            self._count(message.stats)
            self._may_restart = True
            task, self._running = self._running, None
            if task is not None:
                task.end(message.result, message.error)
            self._next()

    def _on_ready(self, message: process.Ready) -> None:
        self.backend = message.backend
        for warning in message.warnings if not self.restarts else ():
            log.warning("%s", warning)
        self.state = "ready"
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)
        self._next()

    def _on_failed(self, error: MimoError) -> None:
        self._may_restart = False
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(error)
        else:
            log.error("the model could not be opened again: %s", error)

    def _on_death(self) -> None:
        self._process.join(0.5)
        self._process.kill()  # it can't be understood any more, or takes its time to go
        self._process.join()
        code = self._process.exitcode
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(MimoError(f"the model's process died while it was loading (status {code})"))
        self._before = dict(self.counters)
        task, self._running = self._running, None
        if task is not None:
            task.end(None, Unavailable(DIED))
        if not self._may_restart or self.state == "loading":
            log.error("the model's process died (status %s) and is not started again", code)
            self.state = "down"
            self._end_all(Unavailable(DOWN))
            return
        log.error("the model's process died (status %s): starting it again", code)
        self._may_restart = False
        self.restarts += 1
        self.state = "restarting"
        self._launch()

    def _next(self) -> None:
        """Hand the next job over, if the process is free."""
        while self.state == "ready" and self._running is None and self._waiting:
            task = self._waiting.popleft()
            assert self._pipe is not None
            self._running = task
            try:
                self._pipe.send((task.number, task.job))
            except OSError:
                return  # the process has just died: its listener reports it, with this task as the running one
            except Exception as error:  # a job that can't be pickled is a bug of its route
                log.error("a job could not be sent: %s", error, exc_info=error)
                self._running = None
                task.end(None, InternalError(INTERNAL))

    def _cancel(self, task: Task) -> None:
        if task is self._running:
            self._cancelled.value = task.number
        else:
            with contextlib.suppress(ValueError):
                self._waiting.remove(task)

    def _end_all(self, error: MimoError) -> None:
        tasks = [*([self._running] if self._running else []), *self._waiting]
        if self._running is not None and self._cancelled is not None:
            self._cancelled.value = self._running.number
        self._running = None
        self._waiting.clear()
        for task in tasks:
            task.end(None, error)

    def _count(self, stats: dict[str, Any]) -> None:
        """Counters never go back, though a new process counts from 0."""
        flat = {key: value for key, value in stats.items() if isinstance(value, int | float)}
        self.counters = {key: self._before.get(key, 0) + value for key, value in flat.items()}


def _listen(pipe: Connection, loop: asyncio.AbstractEventLoop, on_message: Any) -> None:
    """In a thread: every message to the event loop, then None."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                break
            except Exception as error:  # what follows could not be told apart any more
                log.error("a message of the model's process could not be read: %s", error, exc_info=error)
                pipe.close()
                break
            loop.call_soon_threadsafe(on_message, pipe, message)
        loop.call_soon_threadsafe(on_message, pipe, None)


def _end(child: Any) -> None:
    """Wait for a process that was told to leave, then insist."""
    for insist in (None, child.terminate, child.kill):
        if insist is not None:
            insist()
        child.join(STOP_SECONDS)
        if child.exitcode is not None:
            return
