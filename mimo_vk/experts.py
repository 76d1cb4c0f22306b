"""The RAM cache of routed experts: so many slots a layer, least recently used out first, misses read by a thread pool.

An expert lies in its slot as in the file. Nothing leased is ever evicted. A failed read fails its lease, nothing else.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter
from types import TracebackType

import numpy as np

from mimo_vk.direct_io import allocate
from mimo_vk.expert_reader import ExpertRead, Job, ReaderPool, expert_bytes, slot_bytes
from mimo_vk.expert_table import ExpertLocation
from mimo_vk.formats import U8, Expert

__all__ = ["CacheStats", "ExpertCache", "Lease", "slot_bytes"]

Table = Mapping[int, Sequence[ExpertLocation]]
Batch = list[tuple[int, Expert]]


@dataclass
class CacheStats:
    """Counters since the start, or since ``reset_stats``."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0  # of experts that arrived
    wait_seconds: float = 0.0  # the caller had nothing to do but wait for reads
    accesses: dict[int, list[int]] = field(default_factory=dict)  # how often each expert was leased, by layer


class ExpertCache:
    """Holds up to ``cap`` experts of each MoE layer. One lease at a time; its reader threads work beside the caller."""

    def __init__(self, table: Table, cap: int, *, readers: int = 8, direct: bool = True) -> None:
        """``cap`` is clamped to the number of experts. Nothing is opened, read or resident before it's leased."""
        assert cap >= 1 and readers >= 1
        sizes = [(len(row), expert_bytes(row[0])) for row in table.values()]
        self.cap = min(cap, max((count for count, _ in sizes), default=cap))
        self.slot_bytes = slot_bytes(max((nbytes for _, nbytes in sizes), default=0))
        self._pool = _Pool(len(table) * self.cap, self.slot_bytes)
        self._layers = {
            layer: _Layer(layer, row, range(i * self.cap, (i + 1) * self.cap))
            for i, (layer, row) in enumerate(table.items())
        }
        self.stats = CacheStats()
        self.reset_stats()
        self._readers = ReaderPool(readers, direct)
        self._leased = False
        self._closed = False

    def lease(self, layer: int, ids: Sequence[int]) -> Lease:
        """A context manager over an iterator of lists of (id, Expert): the hits at once, then misses as they arrive.

        The distinct ids may be no more than ``cap``. The experts stay until the lease closes and are not to be used
        after it. The iteration raises ReadError when a read fails; leaving early is safe.
        """
        assert not self._closed
        return Lease(self, self._layers[layer], ids)

    def resident(self, layer: int) -> set[int]:
        """The experts of a layer that a lease would find in memory."""
        return set(self._layers[layer].entries)

    def drop(self, layer: int, expert: int) -> None:
        """Forget one expert, if it's there: it lives elsewhere now, and its slot is free for another."""
        assert not self._leased, "a lease is open"
        held = self._layers[layer]
        if expert in held.entries:
            held.free.append(held.entries.pop(expert)[0])

    def reset_stats(self) -> None:
        """Start counting from zero, in the same ``stats`` object."""
        for layer in self._layers.values():
            layer.accesses = [0] * len(layer.locations)
        vars(self.stats).update(vars(CacheStats(accesses={k: layer.accesses for k, layer in self._layers.items()})))

    def clear(self) -> None:
        """Forget every expert; memory that was touched stays with the cache."""
        assert not self._leased, "a lease is open"
        for layer in self._layers.values():
            layer.clear()

    def close(self) -> None:
        """End the reader threads, close the files; the memory goes when the last expert in it is let go of."""
        assert not self._leased, "a lease is open"
        if not self._closed:
            self._closed = True
            self._readers.close()
            self._layers.clear()
            self._pool.close()

    def __enter__(self) -> ExpertCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Pool:
    """The memory of all slots, in one piece."""

    def __init__(self, slots: int, size: int) -> None:
        self._memory: mmap.mmap | None = allocate(slots * size)
        self._size = size

    def slot(self, index: int) -> U8:
        assert self._memory is not None
        return np.frombuffer(self._memory, dtype=np.uint8, count=self._size, offset=index * self._size)

    def close(self) -> None:
        self._memory = None


class _Layer:
    """One layer's slots: which are free, and who sits in the others, least recently used first."""

    def __init__(self, index: int, locations: Sequence[ExpertLocation], slots: range) -> None:
        self.index = index
        self.locations = locations
        self.accesses: list[int] = []
        self.entries: OrderedDict[int, tuple[int, tuple[int, Expert]]] = OrderedDict()  # id: slot, what a lease yields
        self.free: list[int] = []
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        self.entries.clear()
        self.reclaim()

    def reclaim(self) -> None:
        """Every slot that no expert sits in is free."""
        taken = {slot for slot, _ in self.entries.values()}
        self.free = [slot for slot in reversed(self._slots) if slot not in taken]

    def take_slot(self) -> int:
        """A free slot, or the least recently used expert's. What is leased was used last, so it stays."""
        if self.free:
            return self.free.pop()
        return self.entries.popitem(last=False)[1][0]


class Lease:
    """See ``ExpertCache.lease``. Experts count as used in the order hits, then misses, each as asked for."""

    __slots__ = ("_cache", "_done", "_ids", "_layer", "_open", "_reads")

    def __init__(self, cache: ExpertCache, layer: _Layer, ids: Sequence[int]) -> None:
        self._cache = cache
        self._layer = layer
        self._ids = ids
        self._reads: dict[ExpertRead, tuple[int, int]] = {}  # the misses, in the order asked for: id, slot
        self._open = 0  # of those, not yet heard of
        self._done: SimpleQueue[ExpertRead] = SimpleQueue()

    def __enter__(self) -> Iterator[Batch]:
        cache, entries, accesses = self._cache, self._layer.entries, self._layer.accesses
        distinct = dict.fromkeys(self._ids)
        assert not cache._leased, "one lease at a time"
        assert len(distinct) <= cache.cap, f"{len(distinct)} experts leased at once, the cache holds {cache.cap}"
        hits: Batch = []
        misses: list[int] = []
        for expert in distinct:
            accesses[expert] += 1
            entry = entries.get(expert)
            if entry is None:
                misses.append(int(expert))
            else:
                entries.move_to_end(expert)
                hits.append(entry[1])
        try:
            cache._leased = True
            cache.stats.hits += len(hits)
            if not misses:
                return iter((hits,))
            cache.stats.misses += len(misses)
            self._start(misses)
        except BaseException:  # Ctrl-C, before the caller's ``with`` is entered
            self._end()
            self._layer.reclaim()  # one may have been taken for a read that doesn't know of it yet
            raise
        return self._batches(hits)

    def _start(self, misses: list[int]) -> None:
        cache, layer = self._cache, self._layer
        jobs: list[Job] = []
        for expert in misses:
            slot = layer.take_slot()
            name = f"expert {expert} of layer {layer.index}"
            read = ExpertRead(name, layer.locations[expert], cache._pool.slot(slot), self._done)
            self._reads[read] = expert, slot
            jobs += read.jobs()
        queued = map(cache._readers.queue.put, jobs)
        self._open = len(self._reads)
        deque(queued, maxlen=0)  # puts them all in one call, which no Ctrl-C can cut in two

    def _batches(self, hits: Batch) -> Iterator[Batch]:
        if hits:
            yield hits
        while self._open:
            yield [(self._reads[read][0], read.result()) for read in self._arrived()]

    def _arrived(self) -> list[ExpertRead]:
        """Wait for a read to end, and take what else has."""
        begin = perf_counter()
        reads = [self._done.get()]
        self._open -= 1
        self._cache.stats.wait_seconds += perf_counter() - begin
        while self._open:
            try:
                reads.append(self._done.get_nowait())
            except Empty:
                break
            self._open -= 1
        return reads

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        """Wait for the reads that have begun, and settle who stays."""
        interrupt: KeyboardInterrupt | None = None
        for read in self._reads:
            read.cancelled = True
        if self._open:
            interrupt = self._wait_for_all()
        for read, (expert, slot) in self._reads.items():
            self._settle(read, expert, slot)
        self._reads.clear()
        self._cache._leased = False
        if interrupt is not None:
            raise interrupt

    def _wait_for_all(self) -> KeyboardInterrupt | None:
        """Wait until no reader writes to a slot any more, as one that is written to can't be given back.

        By the reads themselves and not by their number: a Ctrl-C may have lost one that came off the queue.
        """
        interrupt: KeyboardInterrupt | None = None
        begin = perf_counter()
        while not all(read.ended for read in self._reads):
            try:
                self._done.get()
            except KeyboardInterrupt as again:
                interrupt = again
        self._cache.stats.wait_seconds += perf_counter() - begin
        return interrupt

    def _settle(self, read: ExpertRead, expert: int, slot: int) -> None:
        """What arrived stays, whether or not the caller took it; the slot of what did not is free again."""
        if read.expert is None:
            self._layer.free.append(slot)
            return
        self._layer.entries[expert] = slot, (expert, read.expert)
        self._cache.stats.bytes_read += read.nbytes
