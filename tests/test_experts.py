"""The RAM cache of experts over real files: exact bytes wherever they lie, who is evicted, what it holds."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk import expert_reader
from mimo_vk.expert_table import ExpertLocation
from mimo_vk.experts import ExpertCache, slot_bytes
from mimo_vk.safetensors_header import TensorInfo
from tests.expert_disk import (
    BYTES,
    LAYERS,
    Disk,
    arrays,
    check_all,
    contiguous,
    descriptors,
    equal,
    fetch,
    flat,
    scattered,
)


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
