"""Reads of any range against plain reads, with O_DIRECT and without, and of files that are not what they were."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_vk import direct_io
from mimo_vk.direct_io import BLOCK, Files, aligned_span, allocate, span_capacity
from mimo_vk.errors import ReadError

SIZE = 5 * BLOCK + 1234  # no multiple of any block


@pytest.fixture(scope="module")
def data() -> bytes:
    return np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> Path:
    file = tmp_path_factory.mktemp("direct") / "data.bin"
    file.write_bytes(data)
    return file


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "buffered"])
def files(request: pytest.FixtureRequest) -> Iterator[Files]:
    files = Files(direct=request.param)
    yield files
    files.close()


def read(files: Files, path: Path, offset: int, length: int) -> bytes:
    return bytes(files.get(path).read_exact(offset, length, memoryview(allocate(span_capacity(length)))))


def open_descriptors(path: Path) -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the listing's own descriptor
    return links.count(str(path))


@pytest.mark.parametrize(
    ("offset", "length", "span", "capacity"),
    [
        (0, 1, (0, 4096), 8192),
        (0, 4096, (0, 4096), 8192),
        (1, 4096, (0, 8192), 8192),
        (4095, 2, (0, 8192), 8192),
        (4096, 4097, (4096, 12288), 12288),
        (8191, 4098, (4096, 16384), 12288),
    ],
)
def test_the_span_is_the_smallest_range_of_blocks(
    offset: int, length: int, span: tuple[int, int], capacity: int
) -> None:
    assert aligned_span(offset, length) == span
    assert span_capacity(length) == capacity
    assert span[1] - span[0] <= capacity


@given(offset=st.integers(0, SIZE - 1), length=st.integers(0, SIZE))
@settings(max_examples=300, deadline=None)
def test_every_range_reads_as_plain_reads_do(files: Files, path: Path, data: bytes, offset: int, length: int) -> None:
    length = min(length, SIZE - offset)
    assert read(files, path, offset, length) == data[offset : offset + length]


@given(offset=st.integers(0, SIZE + 2 * BLOCK), past=st.integers(1, 2 * BLOCK))
@settings(max_examples=100, deadline=None)
def test_a_range_past_the_end_is_refused_with_its_numbers(files: Files, path: Path, offset: int, past: int) -> None:
    length = max(SIZE - offset, 0) + past
    with pytest.raises(ReadError) as caught:
        read(files, path, offset, length)
    there = max(SIZE - offset, 0)
    assert str(caught.value) == (
        f"{path}: expected {length} bytes at offset {offset}, got {there}: the file has {SIZE} bytes"
    )


def test_short_reads_are_continued(path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % BLOCK == 0, "O_DIRECT continues on a block"
        calls.append(offset)
        return real(fd, [buffers[0][: BLOCK if len(calls) % 2 else BLOCK + 512]], offset)

    monkeypatch.setattr(os, "preadv", short)
    files = Files(direct=True)
    assert read(files, path, 100, SIZE - 100) == data[100:]
    assert calls == [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    files.close()


def test_signals_do_not_disturb_a_read(path: Path, data: bytes) -> None:
    hits = []
    before = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        files = Files(direct=True)
        while len(hits) < 20:
            assert read(files, path, 1, SIZE - 1) == data[1:]
        files.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refuse_on_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(os, "open", open_)


def refuse_on_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open, real_read = os.open, os.preadv
    direct: set[int] = set()

    def open_(path: Path, flags: int) -> int:
        fd = real_open(path, flags & ~os.O_DIRECT)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)


def refuse_by_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "dio_alignment", lambda fd: 65536)


@pytest.mark.parametrize("refuse", [refuse_on_open, refuse_on_read, refuse_by_alignment])
def test_where_o_direct_is_refused_reads_are_buffered_with_one_warning(
    refuse, tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_bytes(data)
    refuse(monkeypatch)
    files = Files(direct=True)
    with caplog.at_level(logging.WARNING, logger="mimo_vk"):
        for path in paths * 2:
            assert read(files, path, 4097, 5000) == data[4097:9097]
    assert len(caplog.records) == 1
    assert str(paths[0]) in caplog.messages[0] and "O_DIRECT is refused" in caplog.messages[0]
    assert not any(files.get(path).direct for path in paths)
    files.close()
    assert [open_descriptors(path) for path in paths] == [0, 0, 0]


def test_threads_that_meet_the_refusal_together_all_read(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    refuse_on_read(monkeypatch)
    files = Files(direct=True)
    gate = threading.Barrier(8)
    came: list[bytes] = []

    def work() -> None:
        gate.wait()
        came.append(read(files, path, 3, SIZE - 3))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files.close()
    assert came == [data[3:]] * 8
    assert open_descriptors(path) == 0


def test_another_error_is_named_and_not_taken_for_a_refusal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    files = Files(direct=True)
    with pytest.raises(ReadError) as caught:
        read(files, path, 10, 20)
    assert str(caught.value) == f"{path}: reading 20 bytes at offset 10 failed: Input/output error"
    assert files.get(path).direct
    files.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_missing_file_and_a_directory_are_read_errors(
    tmp_path: Path, data: bytes, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(direct=direct)
    there = tmp_path / "later"
    with pytest.raises(ReadError, match=r"later: can't be opened: No such file"):
        read(files, there, 0, 1)
    with pytest.raises(ReadError, match="can't be opened: it is not a file"):
        read(files, tmp_path, 0, 1)
    there.write_bytes(data)
    assert read(files, there, 5, 9) == data[5:14]
    assert not caplog.records
    files.close()


def test_a_file_is_opened_once_and_closed(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    files = Files(direct=True)
    assert files.get(path) is files.get(path)
    assert open_descriptors(path) == 1
    files.close()
    assert open_descriptors(path) == 0


def test_untouched_memory_is_not_resident() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    memory = allocate(8 << 30)
    memory[5 << 30] = 1
    assert resident() - before < 16 << 20
    assert memory[5 << 30] == 1 and memory[1 << 30] == 0


def test_the_memory_is_not_copied_by_a_fork() -> None:
    memory = np.frombuffer(allocate(123 * BLOCK), dtype=np.uint8)
    start = memory.ctypes.data
    assert start % BLOCK == 0
    flags = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            low, high = (int(x, 16) for x in first.split("-"))
        elif first == "VmFlags:" and low <= start < high:
            flags[low] = rest.split()
    (found,) = flags.values()
    assert "dc" in found
