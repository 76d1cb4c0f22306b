"""The work that the server's model process does: jobs, which know the engine, sent by routes, which know HTTP.

A job is a picklable dataclass. The model process runs one at a time, on one session that all jobs share, so that a
prompt that extends the last one reads only its own tokens::

    @dataclass(frozen=True)
    class Count:
        upto: int

        def run(self, engine, session, emit, cancel):
            for i in range(self.upto):
                emit(i)
            return "done"

    async with worker.submit(Count(3)) as task:  # QueueFull and Unavailable are raised here
        async for item in task:                  # 0, 1, 2
            ...
        task.result                              # "done"
    result = await worker.call(Count(3))         # the same where nothing in between matters

Leaving the ``async with`` (or cancelling the asyncio task that waits in it) cancels the job, queued or running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mimo_vk.engine import Engine
from mimo_vk.session import Session

Emit = Callable[[object], None]
Cancel = Callable[[], bool]


class Job(Protocol):
    """What ``Worker.submit`` takes. All of it, what it emits and what it returns must be picklable."""

    def run(self, engine: Engine, session: Session, emit: Emit, cancel: Cancel) -> object:
        """Do the work in the model process and return the result.

        emit: sends one object to the caller at once. cancel: True once nobody waits for the job; pass it on to the
        session, which asks it between layers, and let its ``Cancelled`` pass. A MimoError reaches the caller as it is
        (UsageError: the request was bad; ReadError: the disk); any other exception is logged in the model process and
        reaches the caller as InternalError, without its text.
        """
