"""The device is lost with the dense layers' rows: the same request goes on on the CPU with the same bytes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mimo_vk.sampling import Sampler
from mimo_vk.session import Session
from mimo_vk.vulkan import setup
from mimo_vk.vulkan.client import DeviceClient
from mimo_vk.vulkan.listing import Listing
from mimo_vk.vulkan.messages import receive
from tests.engines import PROMPT, open_engine
from tests.test_vulkan_dense import open_dense
from tests.vulkan_device import software_device

TEXT = [(13 * i) % 590 for i in range(9)]
CHUNK = 3


def kill(client: DeviceClient) -> None:
    os.kill(client.pid, signal.SIGKILL)


def stop_then_kill(client: DeviceClient) -> None:
    """It is killed while it has work before it: stopped now, killed once that is sent."""
    os.kill(client.pid, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {client.pid}"])


def bad_message(client: DeviceClient) -> None:
    """An exception in the middle of the process's work."""
    client.ask("layers", 1, 0, [["jump"]])


def interfere(monkeypatch: pytest.MonkeyPatch, kind: str, count: int, harm: Callable[[DeviceClient], None]) -> None:
    """Do harm just before the message of a kind is sent that comes after ``count`` others of it."""
    send, left = DeviceClient.ask, [count]

    def ask(self: DeviceClient, asked: str, *values: Any) -> None:
        if asked == kind:
            left[0] -= 1
            if left[0] == -1:
                harm(self)
        send(self, asked, *values)

    monkeypatch.setattr(DeviceClient, "ask", ask)


def conversation(session: Session) -> list[Any]:
    """Blocks, a snapshot, options read from it, generated ids, and going on from what is live."""
    first = session.prompt(TEXT)
    session.pin()
    ids = list(session.generate(first, max_tokens=4, sampler=Sampler(), stop_ids=frozenset()))
    options = session.read_options([*TEXT, 3], [[4, 5], [6, 2, 2], [7, 8]])
    whole = session.prompt(PROMPT[:5], all_logits=True)
    return [first.tobytes(), ids, [option.tobytes() for option in options], whole.tobytes()]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> list[Any]:
    with open_engine(tiny_checkpoint, threads=1, chunk=CHUNK) as engine:
        return conversation(engine.session())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The lines about a device that is no longer used."""
    with caplog.at_level(logging.WARNING):
        yield lambda: [r.getMessage() for r in caplog.records if "no longer used" in r.getMessage()]


@pytest.mark.parametrize(
    ("kind", "count", "harm"),
    [
        ("layers", 0, kill),
        ("layers", 9, stop_then_kill),  # in the second block, between two layers
        ("layers", 21, kill),  # while the answer is generated
        ("layers", 45, bad_message),
        ("head", 0, kill),
        ("head", 3, stop_then_kill),
        ("save", 0, kill),
        ("save", 1, bad_message),  # the state that the options are read from
        ("restore", 0, kill),
        ("restore", 1, stop_then_kill),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_same_request_goes_on(
    tiny_checkpoint: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]],
    kind: str, count: int, harm: Callable[[DeviceClient], None],
) -> None:  # fmt: skip
    with open_dense(tiny_checkpoint, 5, chunk=CHUNK, tier_rate=100) as engine:
        interfere(monkeypatch, kind, count, harm)
        assert conversation(engine.session()) == expected
        assert engine.dense is not None and engine.dense.gone and engine.tier is not None and engine.tier.gone
        assert conversation(engine.session()) == expected
        assert len(said()) == 1
        stats = engine.snapshot_stats()
        assert (stats.device_layers, stats.device_head, stats.tier_slots) == (0, False, 0)
        assert "device: lost, the dense layers run on the CPU" in stats.lines()


def test_a_step_of_the_experts_that_finds_it_lost(
    tiny_checkpoint: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """The experts go on on the CPU at once; the dense layers learn of it at their next message."""
    with open_dense(tiny_checkpoint, 40, chunk=CHUNK, tier_rate=100) as engine:
        start, left = DeviceClient.start_step, [8]

        def start_step(self: DeviceClient, *step: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                kill(self)
            start(self, *step)

        monkeypatch.setattr(DeviceClient, "start_step", start_step)
        assert conversation(engine.session()) == expected
        assert left[0] <= 0 and engine.dense is not None and engine.dense.gone and len(said()) == 1


def test_cancelled_while_the_ids_are_read_again(
    tiny_checkpoint: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live state is then what was read again so far, and good to go on from."""
    with open_dense(tiny_checkpoint, chunk=CHUNK) as engine:
        session = engine.session()
        logits = session.prompt(TEXT)
        assert engine.dense is not None
        kill(engine.dense.client)
        layers = iter(range(10**6))
        answer = session.generate(
            logits, max_tokens=4, sampler=Sampler(), stop_ids=frozenset(), cancel=lambda: next(layers) > 7
        )
        assert len(list(answer)) == 1 and session.finish_reason == "cancelled"
        assert session.ids == TEXT[:CHUNK]
        assert session.prompt(TEXT).tobytes() == expected[0]
        assert engine.stats.reused_tokens == CHUNK


def test_an_answer_that_an_interrupt_lost(tiny_checkpoint: Path, expected: list[Any]) -> None:
    """Received, and gone with the block that waited for it: the next block must not wait for it again."""
    with open_dense(tiny_checkpoint, chunk=CHUNK) as engine:
        session = engine.session()
        assert engine.dense is not None
        client = engine.dense.client
        client.ask("layers", 1, 0, [])
        assert receive(client._connection) is not None and client.pending("layers")
        assert session.prompt(TEXT).tobytes() == expected[0]
        assert not client.pending("layers") and not client.gone


@pytest.mark.parametrize("count", [0, 5])
def test_lost_while_the_weights_are_sent(
    tiny_checkpoint: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    interfere(monkeypatch, "fill", count, kill)
    with open_dense(tiny_checkpoint, 5, chunk=CHUNK) as engine:
        assert engine.dense is None and engine.tier is None
        (line,) = engine.notices
        assert line.endswith("is not used: its process was ended by signal 9; running on the CPU")
        assert conversation(engine.session()) == expected


def test_a_driver_that_is_gone_by_then(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = software_device()
    monkeypatch.setattr(setup, "list_devices", lambda: Listing((info,), ""))
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")
    with open_dense(tiny_checkpoint) as engine:
        assert engine.dense is None and engine.notices[0].startswith(f"device {info.describe()} is not used: ")
