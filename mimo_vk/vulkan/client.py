"""The program's end of the device process: start it, send it work, and learn of its death as an event.

Every trouble (a driver that crashes, a lost device, a killed process, an answer that never comes) is one TierGone; from
then on the client is closed and ``gone`` says why.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mimo_vk.errors import MimoError
from mimo_vk.formats import F32, Expert
from mimo_vk.vulkan.arena import Arena, DenseArena, TierShape
from mimo_vk.vulkan.dense_layout import DenseShape
from mimo_vk.vulkan.layout import permute_rows
from mimo_vk.vulkan.listing import ROOT, DeviceInfo
from mimo_vk.vulkan.messages import Message, receive, send

START_SECONDS = 120.0  # until the process is ready: a driver may compile
ANSWER_SECONDS = 60.0  # a device that works longer on one step hangs,
CPU_FACTOR = 10  # but a CPU driver is only slow
END_SECONDS = 5.0

START = """
import sys
sys.path.insert(0, {root!r})
from mimo_vk.vulkan.worker import main
main({connection}, {info!r}, {tier!r}, {slots}, {dense!r})
"""

log = logging.getLogger("mimo_vk")


@dataclass(frozen=True)
class _Asked:
    """A message that is not answered yet."""

    number: int
    kind: str
    values: tuple[Any, ...] = ()


class TierGone(MimoError):
    """The device process can't be used any more."""


class DeviceClient:
    """One device process. Not for two threads at once; one step may be under way, and any number of uploads."""

    def __init__(
        self,
        info: DeviceInfo,
        shape: TierShape,
        max_slots: int,
        dense: DenseShape | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """Start the process; ``wait_ready`` before anything else is asked of it. No slots: no experts are sent.

        ``launcher``: words before the command, such as ``env`` with a variable for the driver.
        """
        self.info = info
        self.shape = shape
        self.max_slots = max_slots
        self.slots = 0
        self.flushes = False  # whether the device takes subnormal floats for zero
        self.gone = ""  # why, once it is
        self.last_step = (0.0, 0.0)  # when the device process began and ended it, on the system's monotonic clock
        self.step_seconds = 0.0  # of all steps
        self.arena = Arena(shape)
        self.dense_arena = DenseArena(dense) if dense else None
        self._free = deque(range(shape.staging))
        self._results: dict[str, Message] = {}  # of the last answer of a kind
        self._dropped = False
        self._number = 0
        self._asked = deque([_Asked(0, "ready")])  # what is unanswered
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno(), self.arena.fd, *([self.dense_arena.fd] if self.dense_arena else [])]
        code = START.format(
            root=ROOT, connection=theirs.fileno(), info=info.as_json(), tier=(self.arena.fd, shape.as_json()),
            slots=max_slots, dense=(fds[2], dense.as_json()) if dense else None,
        )  # fmt: skip
        with theirs:
            command = [*launcher, sys.executable, "-c", code]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        self.pid = self._process.pid

    def wait_ready(self) -> int:
        """Wait until the first slab is there; the number of its slots. Errors: TierGone."""
        self._drain("ready", START_SECONDS)
        return self.slots

    def grow(self) -> int:
        """Ask for one more slab, and wait; how many slots there are then. Errors: TierGone."""
        self._ask("grow")
        self._drain("grow", self._patience)
        return self.slots

    @property
    def _patience(self) -> float:
        return ANSWER_SECONDS * (CPU_FACTOR if self.info.kind == "CPU" else 1)

    @property
    def can_upload(self) -> bool:
        """Whether an upload would not have to wait."""
        if not self._free and not self.gone:
            with contextlib.suppress(BlockingIOError):
                while self._asked:
                    self._take(0.0)
        return bool(self._free) and not self.gone

    def upload(self, expert: Expert, slot: int) -> None:
        """Send an expert to a slot. It is copied at once, and later steps find it. Only when ``can_upload``."""
        place = self._free.popleft()
        self.shape.layout.store(expert, self.arena.staging[place])
        self._ask("upload", slot, place)

    def start_step(self, x: F32, pairs: NDArray[np.uint32]) -> None:
        """Begin y[p] = expert in slot pairs[p, 0] times row pairs[p, 1] of x [rows, hidden]; slots non-decreasing."""
        permute_rows(x, self.arena.x[: len(x)])
        self.arena.pairs[: len(pairs)] = pairs
        self._ask("step", len(x), len(pairs))

    def finish_step(self, count: int) -> F32:
        """Wait for the step's results [count, hidden], valid until the next step. Errors: TierGone."""
        self._drain("step", self._patience)
        return self.arena.y[:count]

    def ask(self, kind: str, *values: Any) -> None:
        """Send a request. Errors: TierGone."""
        self._ask(kind, *values)

    def pending(self, kind: str) -> bool:
        """Whether a request of a kind is unanswered, as far as is known: an interrupt may have lost its answer."""
        return any(asked.kind == kind for asked in self._asked)

    def answer(self, kind: str, left: int = 0) -> Message:
        """Wait until no more than ``left`` requests of a kind are unanswered; what the last answer brought.

        Errors: TierGone.
        """
        self._drain(kind, self._patience, left)
        return self._results.get(kind, [])

    def drop(self, error: TierGone) -> None:
        """End the use of the device, and say so once."""
        if not self._dropped:
            self._dropped = True
            log.warning("the device is no longer used: %s; going on on the CPU", error)
        self.close()

    def _ask(self, kind: str, *values: Any) -> None:
        if self.gone:
            raise TierGone(self.gone)
        self._number += 1
        self._asked.append(_Asked(self._number, kind, values))
        try:
            self._connection.setblocking(True)
            send(self._connection, [self._number, kind, *values])
        except OSError:
            self._end(self._how_it_ended())

    def _drain(self, kind: str, seconds: float, left: int = 0) -> None:
        """Take answers until no more than ``left`` of a kind are missing."""
        while sum(asked.kind == kind for asked in self._asked) > left:
            self._take(seconds)
        if self.gone:
            raise TierGone(self.gone)

    def _take(self, seconds: float) -> None:
        """Take one answer; BlockingIOError where there is none and ``seconds`` is 0."""
        self._connection.settimeout(seconds)
        try:
            message = receive(self._connection)
        except BlockingIOError:
            raise
        except TimeoutError:
            self._end(f"no answer in {seconds:.0f} s")
        except OSError:
            message = None
        if message is None:
            self._end(self._how_it_ended())
        if message[0] == "failed":
            self._end(str(message[1]))
        # An interrupt may have lost an answer: what is older than this one is answered too.
        while self._asked and self._asked[0].number <= message[0]:
            self._answered(self._asked.popleft(), message[1:])

    def _answered(self, asked: _Asked, result: Message) -> None:
        self._results[asked.kind] = result
        if asked.kind == "upload":
            self._free.append(asked.values[1])
        elif asked.kind == "step" and len(result) == 2:
            self.last_step = result[0], result[1]
            self.step_seconds += result[1] - result[0]
        elif asked.kind in ("ready", "grow") and result:
            self.slots = result[0]
            self.flushes = result[1] if asked.kind == "ready" else self.flushes

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(END_SECONDS)
            return f"its process was ended by signal {-status}" if status < 0 else f"its process ended with {status}"
        return "its process closed the connection"

    def _end(self, why: str) -> NoReturn:
        self.gone = why
        self.close()
        raise TierGone(why)

    @property
    def returncode(self) -> int | None:
        """The process's exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End the process, also in the middle of its work, and wait until it is gone."""
        self.gone = self.gone or "closed"
        self._asked.clear()
        self._connection.close()
        self.arena.close()
        if self.dense_arena is not None:
            self.dense_arena.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> DeviceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
