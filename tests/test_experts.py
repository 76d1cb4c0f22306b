"""The RAM cache of experts over real files: exact bytes wherever they lie, who is evicted, what a failure leaves."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk import expert_reader
from mimo_vk.errors import ReadError
from mimo_vk.expert_table import ExpertLocation
from mimo_vk.experts import ExpertCache, slot_bytes
from mimo_vk.formats import Expert
from mimo_vk.safetensors_header import TensorInfo

H, INNER = 96, 64  # an expert's input and inner width: parts of 3072 and 192 bytes
SHAPES = {
    "down_proj.weight": (H, INNER // 2),
    "down_proj.weight_scale": (H, INNER // 32),
    "gate_proj.weight": (INNER, H // 2),
    "gate_proj.weight_scale": (INNER, H // 32),
    "up_proj.weight": (INNER, H // 2),
    "up_proj.weight_scale": (INNER, H // 32),
}
BYTES = 3 * (3072 + 192)
LAYERS = (1, 2)


class Disk:
    """Experts written to files: ``table`` says where, ``content[layer, expert]`` what, as six arrays."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.count = count
        self.content: dict[tuple[int, int], list[np.ndarray]] = {}
        self.table: dict[int, list[ExpertLocation]] = {layer: [] for layer in LAYERS}
        self._rng = np.random.default_rng(11)

    def expert(self, layer: int, expert: int) -> list[np.ndarray]:
        parts = [self._rng.integers(0, 255, shape, dtype=np.uint8) for shape in SHAPES.values()]  # never 255
        self.content[layer, expert] = parts
        return parts

    def name(self, layer: int, expert: int, part: str) -> str:
        return f"model.layers.{layer}.mlp.experts.{expert}.{part}"


def contiguous(directory: Path, count: int = 8, lead: int = 1001) -> Disk:
    """One file a layer; the experts back to back from an odd offset to the file's last byte."""
    disk = Disk(directory, count)
    for layer in LAYERS:
        path, at = directory / f"layer{layer}.bin", lead
        written = [b"\xee" * lead]
        for expert in range(count):
            infos = []
            for part, array in zip(SHAPES, disk.expert(layer, expert), strict=True):
                infos.append(TensorInfo(disk.name(layer, expert, part), path, at, array.nbytes, "U8", array.shape))
                written.append(array.tobytes())
                at += array.nbytes
            disk.table[layer].append(ExpertLocation(tuple(infos), True))
        path.write_bytes(b"".join(written))
    return disk


def scattered(directory: Path, count: int = 8) -> Disk:
    """Weights and scales in files of their own, with gaps of odd lengths between the tensors."""
    disk = Disk(directory, count)
    files: dict[Path, bytearray] = {}
    for layer in LAYERS:
        for expert in range(count):
            infos = []
            for i, (part, array) in enumerate(zip(SHAPES, disk.expert(layer, expert), strict=True)):
                path = directory / f"part{i % 3}.bin"
                data = files.setdefault(path, bytearray())
                data += b"\xee" * (expert * 7 + i * 3 + 1)
                infos.append(
                    TensorInfo(disk.name(layer, expert, part), path, len(data), array.nbytes, "U8", array.shape)
                )
                data += array.tobytes()
            disk.table[layer].append(ExpertLocation(tuple(infos), False))
    for path, data in files.items():
        path.write_bytes(data)
    return disk


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return contiguous(tmp_path)


@pytest.fixture
def cache(disk: Disk) -> Iterator[ExpertCache]:
    with ExpertCache(disk.table, 4, readers=2) as cache:
        yield cache


def arrays(expert: Expert) -> list[np.ndarray]:
    return [a for matrix in (expert.down, expert.gate, expert.up) for a in (matrix.codes, matrix.scales)]


def equal(expert: Expert, parts: list[np.ndarray]) -> bool:
    return all(a.shape == b.shape and np.array_equal(a, b) for a, b in zip(arrays(expert), parts, strict=True))


def fetch(cache: ExpertCache, layer: int, ids: list[int]) -> list[list[int]]:
    """Lease, and return the batches of ids."""
    with cache.lease(layer, ids) as batches:
        return [[expert for expert, _ in batch] for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [expert for batch in batches for expert in batch]


def check_all(cache: ExpertCache, disk: Disk, ids: list[int], layer: int = 1) -> None:
    """Every byte of the experts is right while they are leased."""
    with cache.lease(layer, ids) as batches:
        held = [pair for batch in batches for pair in batch]
        assert sorted(expert for expert, _ in held) == sorted(set(ids))
        assert all(equal(expert, disk.content[layer, i]) for i, expert in held)


def descriptors(directory: Path) -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory))
        except OSError:
            continue  # the listing's own descriptor
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("lay_out", [contiguous, scattered])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("readers", [1, 8])
@pytest.mark.parametrize("piece", [4096, 2 << 20])
def test_every_byte_of_every_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lay_out: Any, direct: bool, readers: int, piece: int
) -> None:
    monkeypatch.setattr(expert_reader, "PIECE", piece)
    monkeypatch.setattr(expert_reader, "SCRATCH", 1000 if piece == 4096 else 2 << 20)
    disk = lay_out(tmp_path)
    with ExpertCache(disk.table, 8, readers=readers, direct=direct) as cache:
        for layer in LAYERS:
            check_all(cache, disk, [7, 0, 3, 5], layer)  # 7 ends with the file
            check_all(cache, disk, list(range(8)), layer)
        assert (cache.stats.hits, cache.stats.misses) == (8, 16)
        assert cache.stats.bytes_read == 16 * BYTES


@pytest.mark.parametrize("lead", [0, 1, 8, 511, 4095, 4096])
def test_any_offset_in_the_file(tmp_path: Path, lead: int) -> None:
    disk = contiguous(tmp_path, count=3, lead=lead)
    with ExpertCache(disk.table, 3) as cache:
        check_all(cache, disk, [0, 1, 2])


def test_a_slot_holds_an_expert_wherever_it_starts() -> None:
    # 9792 bytes are three blocks at best and four at worst.
    assert BYTES == 9792 and slot_bytes(BYTES) == 4 * 4096
    assert slot_bytes(4096) == 2 * 4096
    # 12.75 MiB, an expert of hidden size 4096 and inner size 2048, is 3264 whole blocks: one more is the slack.
    assert slot_bytes(3264 * 4096) == 3265 * 4096


def test_the_arrays_are_read_only_views_without_copies(cache: ExpertCache, disk: Disk) -> None:
    with cache.lease(1, [2]) as batches:
        ((_, expert),) = [pair for batch in batches for pair in batch]
        assert all(not a.flags.writeable and a.flags.c_contiguous for a in arrays(expert))
        first, last = arrays(expert)[0], arrays(expert)[-1]
        assert last.ctypes.data + last.nbytes - first.ctypes.data == BYTES
        assert first.ctypes.data % 4096 == (1001 + 2 * BYTES) % 4096


def test_hits_come_first_and_at_once(cache: ExpertCache) -> None:
    fetch(cache, 1, [0, 1])
    batches = fetch(cache, 1, [3, 1, 2, 0])
    assert batches[0] == [1, 0]
    assert sorted(flat(batches[1:])) == [2, 3]
    assert fetch(cache, 1, [3, 2, 1, 0]) == [[3, 2, 1, 0]]
    assert fetch(cache, 1, []) == [[]]


def test_eviction_takes_the_least_recently_used(cache: ExpertCache) -> None:
    # cap 4, least recent on the left
    fetch(cache, 1, [0, 1])  # 0 1
    fetch(cache, 1, [2, 3])  # 0 1 2 3
    fetch(cache, 1, [0])  # 1 2 3 0
    fetch(cache, 1, [4])  # 2 3 0 4    1 went
    assert cache.resident(1) == {0, 2, 3, 4}
    fetch(cache, 1, [5, 2])  # 0 4 2 5    3 went: 2, leased, was older
    assert cache.resident(1) == {0, 2, 4, 5}
    fetch(cache, 1, [6, 0, 7])  # 5 0 6 7  4 and 2 went
    assert cache.resident(1) == {0, 5, 6, 7}
    assert cache.resident(2) == set()
    assert (cache.stats.hits, cache.stats.misses) == (3, 8)
    assert cache.stats.accesses[1] == [3, 1, 2, 1, 1, 1, 1, 1]
    assert cache.stats.accesses[2] == [0] * 8


def test_the_layers_do_not_share_slots(cache: ExpertCache, disk: Disk) -> None:
    fetch(cache, 1, [0, 1, 2, 3])
    check_all(cache, disk, [4, 5, 6, 7], layer=2)
    assert cache.resident(1) == {0, 1, 2, 3}
    check_all(cache, disk, [0, 1, 2, 3], layer=1)
    assert cache.stats.misses == 8


def test_what_is_leased_keeps_its_bytes_while_misses_arrive(disk: Disk) -> None:
    with ExpertCache(disk.table, 4, readers=8) as cache:
        fetch(cache, 1, [0, 1, 2, 3])
        for hit in range(4):  # the oldest of the four is leased with three misses that need room
            with cache.lease(1, [hit, 4, 5, 6]) as batches:
                held = [pair for batch in batches for pair in batch]
                assert held[0][0] == hit
                assert all(equal(expert, disk.content[1, i]) for i, expert in held)
            fetch(cache, 1, [0, 1, 2, 3])


def test_more_experts_than_slots_go_in_groups(cache: ExpertCache, disk: Disk) -> None:
    for _ in range(2):
        for group in ([0, 1, 2], [3, 4, 5], [6, 7]):
            check_all(cache, disk, group)
    assert cache.stats.bytes_read == 16 * BYTES


def test_the_cap_is_clamped_and_a_larger_lease_refused(disk: Disk) -> None:
    with ExpertCache(disk.table, 1000) as cache:
        assert cache.cap == 8
        check_all(cache, disk, list(range(8)))
    with ExpertCache(disk.table, 3) as cache:
        with pytest.raises(AssertionError, match="4 experts leased at once, the cache holds 3"):
            fetch(cache, 1, [0, 1, 2, 3])
        check_all(cache, disk, [0, 1, 2])


def test_an_id_asked_for_twice_comes_once(cache: ExpertCache) -> None:
    assert flat(fetch(cache, 1, [5, 5, 2, 5, 2])) in ([5, 2], [2, 5])
    assert fetch(cache, 1, [2, 5, 2, 2]) == [[2, 5]]
    assert (cache.stats.hits, cache.stats.misses) == (2, 2)


def test_numpy_ids_are_taken(cache: ExpertCache) -> None:
    fetch(cache, 1, list(np.array([3, 1], dtype=np.int32)))
    assert fetch(cache, 1, [1, 3]) == [[1, 3]]
    assert all(type(i) is int for i in cache.resident(1))


def test_one_lease_at_a_time(cache: ExpertCache) -> None:
    with cache.lease(1, [0]), pytest.raises(AssertionError, match="one lease at a time"), cache.lease(2, [0]):
        pass
    fetch(cache, 1, [0])


def test_the_statistics_start_again(cache: ExpertCache) -> None:
    fetch(cache, 1, [0, 1])
    stats = cache.stats
    assert stats.misses == 2 and stats.wait_seconds > 0
    cache.reset_stats()
    assert cache.stats is stats
    assert (stats.hits, stats.misses, stats.bytes_read, stats.wait_seconds) == (0, 0, 0, 0.0)
    fetch(cache, 1, [0])
    assert stats.hits == 1 and stats.accesses == {1: [1, 0, 0, 0, 0, 0, 0, 0], 2: [0] * 8}


def test_cleared_it_reads_again(cache: ExpertCache, disk: Disk) -> None:
    fetch(cache, 1, [0, 1, 2, 3])
    cache.clear()
    assert cache.resident(1) == set()
    check_all(cache, disk, [3, 2, 1, 0])
    assert cache.stats.misses == 8


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


def test_ten_thousand_swaps_hold_no_more_memory(tmp_path: Path) -> None:
    disk = contiguous(tmp_path)
    with ExpertCache(disk.table, 2, readers=2) as cache:
        for round_ in range(2500):
            fetch(cache, 1, [round_ * 2 % 8, (round_ * 2 + 1) % 8])
            if round_ == 500:
                before = resident_bytes()
            fetch(cache, 2, [round_ * 2 % 8, (round_ * 2 + 1) % 8])
        assert cache.stats.misses == 10_000
        assert resident_bytes() - before < 2 << 20


def test_only_what_is_touched_is_resident(tmp_path: Path) -> None:
    (tmp_path / "big.bin").touch()
    os.truncate(tmp_path / "big.bin", 64 << 20)  # zeros: a scale of 0 is a valid one
    shapes = [(4096, 1024), (4096, 64), (2048, 2048), (2048, 128), (2048, 2048), (2048, 128)]
    row, at = [], 0
    for _ in range(4):
        parts = []
        for i, shape in enumerate(shapes):
            parts.append(TensorInfo(f"t{i}", tmp_path / "big.bin", at, shape[0] * shape[1], "U8", shape))
            at += parts[-1].nbytes
        row.append(ExpertLocation(tuple(parts), True))
    before = resident_bytes()
    with ExpertCache(dict.fromkeys(range(100), row), 4) as cache:
        assert cache.slot_bytes * 400 > 5e9
        assert resident_bytes() - before < 8 << 20
        fetch(cache, 50, [2, 3])
        grown = resident_bytes() - before
        assert 2 * 3264 * 4096 < grown < 2 * cache.slot_bytes + (12 << 20)  # at most a few huge pages at the edges


def test_closing_ends_the_threads_and_closes_the_files(disk: Disk) -> None:
    threads = threading.active_count()
    cache = ExpertCache(disk.table, 4, readers=5)
    fetch(cache, 1, [0, 1])
    fetch(cache, 2, [0])
    assert threading.active_count() == threads + 5
    assert descriptors(disk.directory) == 2  # one a file
    cache.close()
    cache.close()
    assert threading.active_count() == threads
    assert descriptors(disk.directory) == 0


def test_one_warning_for_all_files_where_o_direct_is_refused(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mimo_vk.direct_io.dio_alignment", lambda fd: 1 << 20)
    with caplog.at_level(logging.WARNING, logger="mimo_vk"), ExpertCache(disk.table, 4) as cache:
        check_all(cache, disk, [0, 1, 2, 7], layer=1)
        check_all(cache, disk, [0, 1, 2, 7], layer=2)
    assert len(caplog.records) == 1


def test_a_dropped_expert_frees_its_slot(cache: ExpertCache, disk: Disk) -> None:
    fetch(cache, 1, [0, 1, 2, 3])
    cache.drop(1, 2)
    cache.drop(1, 7)  # not there
    assert cache.resident(1) == {0, 1, 3}
    fetch(cache, 1, [5])
    assert cache.resident(1) == {0, 1, 3, 5}
    check_all(cache, disk, [0, 1, 3, 5])
