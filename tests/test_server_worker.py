"""The model's process: jobs in order, cancelled, refused, and what happens when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mimo_vk.errors import Cancelled, CheckpointError, MimoError, ReadError
from mimo_vk.server.errors import ApiError, InternalError, QueueFull, Unavailable
from mimo_vk.server.worker import Worker
from mimo_vk.settings import Settings
from tests import echo_model


@dataclass(frozen=True)
class Count:
    upto: int

    def run(self, engine: Any, session: Any, emit: Any, cancel: Any) -> str:
        for i in range(self.upto):
            emit(i)
        return f"done {os.getpid()}"


@dataclass(frozen=True)
class Spin:
    """Runs until it is cancelled."""

    def run(self, engine: Any, session: Any, emit: Any, cancel: Any) -> None:
        emit("spinning")
        while not cancel():
            time.sleep(0.005)
        raise Cancelled("stopped")


@dataclass(frozen=True)
class Die:
    def run(self, engine: Any, session: Any, emit: Any, cancel: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Fail:
    error: Exception

    def run(self, engine: Any, session: Any, emit: Any, cancel: Any) -> None:
        raise self.error


@dataclass(frozen=True)
class FailOddly:
    def run(self, engine: Any, session: Any, emit: Any, cancel: Any) -> None:
        raise Odd(1, 2)


@dataclass(frozen=True)
class NotPicklable:
    def run(self, engine: Any, session: Any, emit: Any, cancel: Any) -> None:
        emit(lambda: None)


class Odd(MimoError):
    """Pickles, and can't be read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one}{two}")


def with_worker(model: Path, use: Callable[[Worker], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        worker = Worker(Settings(model=model, cpu=True), target=echo_model.main, **options)
        try:
            await worker.start()
            await asyncio.wait_for(use(worker), 60)
        finally:
            await worker.stop()
        assert worker.pid is None or not Path(f"/proc/{worker.pid}").exists()

    asyncio.run(run())


def test_jobs_run_one_after_the_other_and_emit_in_order(tiny_checkpoint: Path) -> None:
    async def use(worker: Worker) -> None:
        seen: list[tuple[int, int]] = []

        async def run(name: int) -> None:
            async with worker.submit(Count(50)) as task:
                async for item in task:
                    seen.append((name, item))
                assert task.result.startswith("done ")

        await asyncio.gather(*(run(name) for name in range(4)))
        assert seen == [(name, i) for name in range(4) for i in range(50)]
        assert await worker.call(Count(0)) == f"done {worker.pid}" != f"done {os.getpid()}"

    with_worker(tiny_checkpoint, use)


def test_leaving_cancels_a_job_that_runs_or_waits(tiny_checkpoint: Path) -> None:
    async def use(worker: Worker) -> None:
        async with worker.submit(Spin()) as running:
            async for item in running:
                assert item == "spinning"
                async with worker.submit(Spin()):
                    assert worker.queued == 1
                assert worker.queued == 0 and worker.busy
                break
        began = time.monotonic()
        await worker.call(Count(1))  # would wait for ever behind a job that goes on
        assert time.monotonic() - began < 5

    with_worker(tiny_checkpoint, use)


def test_the_queue_has_a_bound(tiny_checkpoint: Path) -> None:
    async def use(worker: Worker) -> None:
        tasks = [worker.submit(Spin()) for _ in range(4)]  # one runs, three wait
        with pytest.raises(QueueFull, match="3 requests"):
            worker.submit(Count(1))
        for task in tasks:
            task.cancel()
        assert await worker.call(Count(0)) == f"done {worker.pid}"

    with_worker(tiny_checkpoint, use, queue_limit=3)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ReadError("shard: byte 3"), ReadError, "shard: byte 3"),
        (ApiError(422, "no", param="p", code="c"), ApiError, "no"),
        (ValueError("a secret"), InternalError, "internal error"),
    ],
)
def test_errors_reach_the_caller_and_nobody_else(
    tiny_checkpoint: Path, error: Exception, kind: type[Exception], text: str
) -> None:
    async def use(worker: Worker) -> None:
        pid = worker.pid
        with pytest.raises(kind, match=text) as caught:
            await worker.call(Fail(error))
        assert "secret" not in str(caught.value)
        if isinstance(error, ApiError):
            assert vars(caught.value) == vars(error)
        for job in (NotPicklable(), FailOddly(), Fail(Odd(1, 2))):  # the last can't even be read there
            with pytest.raises(InternalError):
                await worker.call(job)
        assert await worker.call(Count(2)) == f"done {pid}"

    with_worker(tiny_checkpoint, use)


def test_a_process_that_dies_is_started_again_once(tiny_checkpoint: Path) -> None:
    async def use(worker: Worker) -> None:
        first = worker.pid
        dying = asyncio.create_task(worker.call(Die()))
        waiting = asyncio.create_task(worker.call(Count(3)))
        with pytest.raises(Unavailable, match="died"):
            await dying
        assert await waiting == f"done {worker.pid}" != f"done {first}"  # those that waited lose nothing
        assert (worker.state, worker.restarts) == ("ready", 1)
        for _ in range(2):  # after a job that ended, one more death is forgiven, and not two in a row
            with pytest.raises(Unavailable):
                await worker.call(Die())
        with pytest.raises(Unavailable, match="twice"):
            await worker.call(Count(1))
        assert worker.state == "down"

    with_worker(tiny_checkpoint, use)


def test_stopping_ends_every_job(tiny_checkpoint: Path) -> None:
    async def use(worker: Worker) -> None:
        calls = [asyncio.create_task(worker.call(Spin())) for _ in range(3)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await worker.stop()
        assert time.monotonic() - began < 4  # the process left by itself
        for call in calls:
            with pytest.raises(Unavailable, match="stopping"):
                await call
        with pytest.raises(Unavailable):
            worker.submit(Count(1))

    with_worker(tiny_checkpoint, use)


def test_what_keeps_the_engine_from_opening_is_raised(tmp_path: Path) -> None:
    async def run() -> None:
        worker = Worker(Settings(model=tmp_path, cpu=True))
        with pytest.raises(Unavailable, match="being loaded"):
            worker.submit(Count(1))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            await worker.start()
        await worker.stop()

    asyncio.run(run())
