"""The RAM cache of experts where something fails: a bad file, a reader's bug, a lease left half way."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from mimo_vk import expert_reader
from mimo_vk.errors import ReadError
from mimo_vk.experts import ExpertCache
from tests.expert_disk import (
    BYTES,
    Disk,
    H,
    check_all,
    contiguous,
    equal,
    fetch,
    scattered,
)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_truncated_while_open_fails_its_lease_only(disk: Disk, direct: bool) -> None:
    path = disk.directory / "layer1.bin"
    whole = path.read_bytes()
    with ExpertCache(disk.table, 4, readers=2, direct=direct) as cache:
        fetch(cache, 1, [0])
        os.truncate(path, 1001 + 2 * BYTES + 5000)  # inside expert 2, 5000 bytes on: gate's codes
        with pytest.raises(ReadError) as caught:
            fetch(cache, 1, [0, 1, 2])
        message = str(caught.value)
        offset = 1001 + 2 * BYTES
        assert message.startswith("expert 2 of layer 1 (model.layers.1.mlp.experts.2.down_proj.weight, ")
        assert message.endswith(
            f"{path}: expected {BYTES} bytes at offset {offset}, got 5000: the file has {offset + 5000} bytes"
        )
        assert cache.resident(1) in ({0}, {0, 1})  # 1 too, if it had begun
        check_all(cache, disk, [0, 1])
        check_all(cache, disk, [4, 5, 6, 7], layer=2)
        path.write_bytes(whole)
        check_all(cache, disk, [2, 3, 4, 5])
        check_all(cache, disk, [6, 7, 0, 1])


def test_an_interrupt_before_the_lease_is_open_leaves_the_cache_usable(
    cache: ExpertCache, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_all(cache, disk, [0, 1])
    slots = iter([cache._pool.slot(2)])

    def slot(index: int) -> Any:
        try:
            return next(slots)
        except StopIteration:
            raise KeyboardInterrupt from None

    with monkeypatch.context() as interrupted:
        interrupted.setattr(cache._pool, "slot", slot)
        with pytest.raises(KeyboardInterrupt):
            fetch(cache, 1, [0, 2, 3, 4])
    check_all(cache, disk, [0, 1, 2])
    check_all(cache, disk, [3, 4, 5, 6])


class Losing(SimpleQueue[Any]):
    """A queue whose first item is lost to an interrupt."""

    lost = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        if not self.lost:
            self.lost = True
            raise KeyboardInterrupt
        return item


def test_an_interrupt_that_loses_an_arrival_does_not_wait_for_it(cache: ExpertCache, disk: Disk) -> None:
    lease = cache.lease(1, [0, 1, 2])
    lease._done = Losing()
    with pytest.raises(KeyboardInterrupt), lease as batches:
        next(batches)
    assert lease._done.lost
    check_all(cache, disk, [0, 1, 2, 3])


def test_only_the_tensors_of_the_bad_range_are_named(tmp_path: Path) -> None:
    disk = scattered(tmp_path)
    missing = tmp_path / "part1.bin"  # down's scales and up's codes
    missing.rename(tmp_path / "elsewhere")
    missing.mkdir()
    with ExpertCache(disk.table, 4, readers=1) as cache:
        with pytest.raises(ReadError, match="it is not a file") as caught:
            fetch(cache, 2, [3])
        assert str(caught.value).startswith(
            f"expert 3 of layer 2 (model.layers.2.mlp.experts.3.down_proj.weight_scale): {missing}"
        )
        assert "gate_proj" not in str(caught.value)
        missing.rmdir()
        (tmp_path / "elsewhere").rename(missing)
        check_all(cache, disk, [3, 4], layer=2)


def test_a_missing_file_can_come_back(disk: Disk) -> None:
    path = disk.directory / "layer1.bin"
    path.rename(disk.directory / "away")
    with ExpertCache(disk.table, 2, readers=8) as cache:
        for _ in range(5):
            with pytest.raises(ReadError, match=r"layer1.bin: can't be opened: No such file"):
                fetch(cache, 1, [0, 1])
        (disk.directory / "away").rename(path)
        check_all(cache, disk, [0, 1])


@pytest.mark.parametrize("lay_out", [contiguous, scattered])
def test_a_nan_scale_is_refused_with_its_place(tmp_path: Path, lay_out: Any) -> None:
    disk = lay_out(tmp_path)
    info = disk.table[1][4].parts[3]
    with info.path.open("r+b") as file:
        file.seek(info.offset + 17 * (H // 32) + 2)
        file.write(b"\xff")
    with ExpertCache(disk.table, 4) as cache:
        with pytest.raises(ReadError) as caught:
            fetch(cache, 1, [4])
        assert str(caught.value) == (
            f"{info.path}: tensor model.layers.1.mlp.experts.4.gate_proj.weight_scale: "
            "the scale of row 17, block 2 (columns 64 to 95) is byte 255, NaN"
        )
        assert cache.resident(1) == set()
        check_all(cache, disk, [3, 5, 6, 7])


def test_codes_may_hold_the_byte_255(disk: Disk) -> None:
    info = disk.table[1][4].parts[2]
    with info.path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")
    disk.content[1, 4][2][0, 0] = 255
    with ExpertCache(disk.table, 4) as cache:
        check_all(cache, disk, [4])


def test_leaving_early_waits_for_what_is_under_way_and_keeps_it(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    begun, go_on = threading.Semaphore(0), threading.Event()
    ended: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        begun.release()
        go_on.wait()
        count = real(fd, buffers, offset)
        ended.append(offset)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with ExpertCache(disk.table, 4, readers=2) as cache:
        with pytest.raises(ZeroDivisionError), cache.lease(1, [0, 1, 2, 3]):
            assert begun.acquire(timeout=10) and begun.acquire(timeout=10)  # two are under way, two are queued
            threading.Timer(0.3, go_on.set).start()
            raise ZeroDivisionError
        assert len(ended) == 2
        assert cache.resident(1) == {0, 1}
        assert cache.stats.bytes_read == 2 * BYTES
        check_all(cache, disk, [4, 5, 6, 7])
        check_all(cache, disk, [0, 1, 2, 3])


def test_a_loop_left_half_way_leaves_the_cache_whole(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.01)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    with ExpertCache(disk.table, 4, readers=1) as cache:
        for _ in range(3):
            with cache.lease(1, [3, 2, 1, 0]) as batches:
                first, expert = next(batches)[0]
                assert first == 3 and equal(expert, disk.content[1, 3])
            check_all(cache, disk, [7, 6, 5, 4])


def test_a_failure_awaits_the_other_reads(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = expert_reader.ExpertRead.run
    under_way: list[int] = []

    def run(self: Any, job: Any, files: Any, scratch: Any) -> None:
        under_way.append(1)
        if "expert 1 " not in self._name:
            time.sleep(0.05)
        real(self, job, files, scratch)
        under_way.pop()

    monkeypatch.setattr(expert_reader.ExpertRead, "run", run)
    info = disk.table[1][1].parts[1]
    with info.path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")
    with ExpertCache(disk.table, 4, readers=4) as cache:
        with pytest.raises(ReadError, match=r"experts\.1\.down_proj\.weight_scale: the scale of row 0, block 0"):
            fetch(cache, 1, [0, 1, 2, 3])
        assert not under_way
        check_all(cache, disk, [0, 2, 3])


@pytest.mark.parametrize("where", [(expert_reader, "_expert"), (expert_reader.Files, "get")])
def test_a_bug_in_a_reader_reaches_the_caller_and_kills_no_thread(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    with ExpertCache(disk.table, 4, readers=1) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(*where, lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                fetch(cache, 1, [0, 1])
        check_all(cache, disk, [0, 1, 2, 3])
