"""The device process: what it computes, and that its end, however it comes, is an event and not a crash."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import Expert
from mimo_vk.vulkan import client as client_module
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.client import DeviceClient, TierGone
from mimo_vk.vulkan.messages import receive
from tests.matrices import random_expert, random_x
from tests.vulkan_device import assert_computed, reference, software_device

SHAPE = TierShape(256, 64, top_k=4, max_rows=3, staging=2)
SLOTS = 8


@pytest.fixture(scope="module")
def experts() -> list[Expert]:
    rng = np.random.default_rng(0)
    return [random_expert(rng, SHAPE.hidden, SHAPE.inner) for _ in range(SLOTS)]


@pytest.fixture
def client() -> Iterator[DeviceClient]:
    with DeviceClient(software_device(), SHAPE, SLOTS) as client:
        assert client.wait_ready() == SLOTS
        yield client


def upload(client: DeviceClient, expert: Expert, slot: int) -> None:
    deadline = time.monotonic() + 30
    while not client.can_upload:
        assert time.monotonic() < deadline and not client.gone
    client.upload(expert, slot)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_steps_and_uploads_in_the_order_sent(client: DeviceClient, experts: list[Expert]) -> None:
    """A step finds what was uploaded before it, also into a slot that the step before it used."""
    rng = np.random.default_rng(1)
    x = random_x(rng, 3, SHAPE.hidden)
    pairs = np.array([(slot, row) for slot in range(4) for row in range(3)], np.uint32)
    for slot in range(4):
        upload(client, experts[slot], slot)
    client.start_step(x, pairs)
    upload(client, experts[7], 0)
    upload(client, experts[6], 3)
    assert_computed(client, client.finish_step(len(pairs)), reference(experts, pairs, x))
    client.start_step(x, pairs)
    moved = [experts[7], experts[1], experts[2], experts[6]]
    assert_computed(client, client.finish_step(len(pairs)), reference(moved, pairs, x))
    assert client.step_seconds > 0


def test_an_answer_that_was_lost_to_an_interrupt(client: DeviceClient, experts: list[Expert]) -> None:
    """The next answers still belong to their questions, and no staging place is lost."""
    x = random_x(np.random.default_rng(1), 3, SHAPE.hidden)
    pairs = np.array([(0, 1), (1, 2)], np.uint32)
    for slot in range(2):
        upload(client, experts[slot], slot)
    client.start_step(x, pairs[:1])
    for _ in range(3):  # two uploads, and a step of which nobody hears
        client._connection.settimeout(30)
        assert receive(client._connection) is not None
    client.start_step(x, pairs)
    assert_computed(client, client.finish_step(2), reference(experts, pairs, x))
    assert not client._asked and len(client._free) == SHAPE.staging


def test_the_device_works_beside_the_cpu(experts: list[Expert]) -> None:
    """A trace of both: products of the release's size end on the CPU while the device is at its own."""
    flash = TierShape(4096, 2048, top_k=8, max_rows=1, staging=1)
    rng = np.random.default_rng(2)
    expert, x, ops = random_expert(rng, 4096, 2048), random_x(rng, 1, 4096), ReferenceOps()
    act = random_x(rng, 1, 2048)
    with DeviceClient(software_device(), flash, 1) as client:
        client.wait_ready()
        upload(client, expert, 0)
        while not client.can_upload:  # its answer is not the step's
            time.sleep(0.01)
        client.start_step(x, np.array([(0, 0)] * 8, np.uint32))
        finished = []
        while not select.select([client._connection], [], [], 0)[0]:
            ops.linear(expert.down, act)
            finished.append(time.monotonic())
        client.finish_step(8)
        first, last = client.last_step
    beside = [moment for moment in finished if first < moment < last]
    assert len(beside) >= 2, (first, last, finished)


@pytest.mark.parametrize("when", ["idle", "step"])
def test_a_killed_process(client: DeviceClient, experts: list[Expert], when: str) -> None:
    upload(client, experts[0], 0)
    x, pairs = random_x(np.random.default_rng(1), 3, SHAPE.hidden), np.array([(0, 0), (0, 1)], np.uint32)
    if when == "step":
        os.kill(client.pid, signal.SIGSTOP)  # so that the step is surely not done
        client.start_step(x, pairs)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(TierGone, match=r"signal 9"):
        client.start_step(x, pairs) if when == "idle" else None
        client.finish_step(2)
    assert client.gone and not client.can_upload
    with pytest.raises(TierGone):
        client.start_step(x, pairs)


def test_an_exception_in_the_process(client: DeviceClient) -> None:
    client.start_step(np.zeros((1, SHAPE.hidden), np.float32), np.array([(SLOTS, 0)], np.uint32))
    with pytest.raises(TierGone, match="slot 8 of 8"):
        client.finish_step(1)


def test_a_process_that_does_not_answer(client: DeviceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(client_module, "END_SECONDS", 0.2)
    os.kill(client.pid, signal.SIGSTOP)
    client.start_step(np.zeros((1, SHAPE.hidden), np.float32), np.array([(0, 0)], np.uint32))
    with pytest.raises(TierGone, match="no answer"):
        client.finish_step(1)
    assert not Path(f"/proc/{client.pid}").exists()


def test_no_driver_crashes_the_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    info = software_device()
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")
    with DeviceClient(info, SHAPE, SLOTS) as client, pytest.raises(TierGone, match=r"no driver|signal|ended"):
        client.wait_ready()


def test_ten_thousand_swaps_leave_memory_flat(client: DeviceClient, experts: list[Expert]) -> None:
    x, pairs = random_x(np.random.default_rng(1), 3, SHAPE.hidden), np.array([(0, 0), (5, 1)], np.uint32)
    sizes = []
    for i in range(10_000):
        upload(client, experts[i % SLOTS], i * 5 % SLOTS)
        if i % 50 == 0:
            client.start_step(x, pairs)
            client.finish_step(2)
        if i in (1_000, 9_999):
            sizes.append((resident_bytes(client.pid), resident_bytes(os.getpid())))
    for before, after in zip(*sizes, strict=True):
        assert after - before < 2_000_000, sizes


def test_fifty_starts_and_exits(experts: list[Expert], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, idle, in the middle of a step and after one: exit status 0 each time. Two at a time."""
    monkeypatch.setattr(client_module, "END_SECONDS", 60.0)  # on a busy machine a process may still be loading
    x = random_x(np.random.default_rng(1), 3, SHAPE.hidden)
    pairs = np.array([(0, row) for row in range(3)], np.uint32)
    statuses = []
    for i in range(25):
        both = [DeviceClient(software_device(), SHAPE, SLOTS) for _ in range(2)]
        for client in both:
            if i % 5:
                client.wait_ready()
            if i % 5 > 1:
                upload(client, experts[0], 0)
                client.start_step(x, pairs)
            if i % 5 > 3:
                client.finish_step(3)
        for client in both:
            client.close()
            statuses.append(client.returncode)
    assert statuses == [0] * 50


@pytest.mark.parametrize("working", [False, True])
def test_a_dead_parent_takes_its_device_process_along(working: bool, project_root: Path) -> None:
    program = f"""
import sys, os, signal
sys.path[:0] = [{str(project_root)!r}]
import numpy as np
from tests.test_vulkan_client import *
client = DeviceClient(software_device(), SHAPE, SLOTS)
client.wait_ready()
if {working}:
    client.start_step(np.zeros((3, SHAPE.hidden), np.float32), np.zeros((3, 2), np.uint32))
print(client.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the device process outlived its parent"
        time.sleep(0.05)
