"""What the bench's numbers stand beside: a read-only pass over a step's bytes, dd on the same file, Python alone."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mimo_vk.config import Config
from mimo_vk.experts import ExpertCache
from mimo_vk.formats import F32, U8, Expert, Matrix, MatrixBF16
from mimo_vk.kv_cache import KvCache
from mimo_vk.model import Model, as_ids
from mimo_vk.moe import CachedExperts
from mimo_vk.ops import Ids, Index, QkvLayout
from mimo_vk.weights import ExpertTable, LayerWeights, Weights

LAYERS = 48  # Python's time is given for this many layers' worth of calls
DISK_BYTES = 2 << 30  # read at most, per run, where disks are compared
DD_BLOCK = 4 << 20  # bytes per read of dd
LEAST_DISK_BYTES = 64 << 20  # with less to read, the time says nothing about the disk


def arrays_of(value: Any) -> list[np.ndarray[Any, Any]]:
    """The arrays of a weight dataclass, however deep."""
    if isinstance(value, np.ndarray):
        return [value]
    if not is_dataclass(value):
        return []
    return list(itertools.chain.from_iterable(arrays_of(getattr(value, f.name)) for f in fields(value)))


class ReadPass:
    """Reads every byte that one decode step touches: the dense weights, the chosen experts, the head."""

    def __init__(self, weights: Weights, cache: ExpertCache, chosen: dict[int, list[int]], threads: int) -> None:
        """``chosen``: the experts of the step, by layer."""
        self._weights = weights
        self._cache = cache
        self._chosen = chosen
        self._threads = threads
        self.nbytes = 0

    def seconds(self, repeat: int = 5) -> float:
        """The median time of a pass; ``nbytes`` is then what it read."""
        with ThreadPoolExecutor(self._threads) as pool:
            self._run(pool)
            return median(self._run(pool) for _ in range(repeat))

    def _run(self, pool: ThreadPoolExecutor) -> float:
        self.nbytes = 0
        began = time.perf_counter()
        for layer in self._weights.layers:
            ids = self._chosen.get(layer.spec.index, [])
            with self._cache.lease(layer.spec.index, ids) if ids else nullcontext(()) as batches:
                experts = [expert for batch in batches for _, expert in batch]
                self._sweep(pool, itertools.chain(arrays_of(layer), *map(arrays_of, experts)))
        self._sweep(pool, [*arrays_of(self._weights.norm), *arrays_of(self._weights.lm_head)])
        return time.perf_counter() - began

    def _sweep(self, pool: ThreadPoolExecutor, arrays: Iterable[np.ndarray[Any, Any]]) -> None:
        flat = [array.reshape(-1).view(np.uint8) for array in arrays]
        self.nbytes += sum(array.nbytes for array in flat)
        list(pool.map(_read_share, itertools.repeat(flat), range(self._threads), itertools.repeat(self._threads)))


def _read_share(arrays: Sequence[U8], share: int, shares: int) -> None:
    """Read one thread's part of each array. The maximum of bytes is the cheapest arithmetic that numpy has."""
    for array in arrays:
        part = array[len(array) * share // shares : len(array) * (share + 1) // shares]
        if part.size:
            part.max()


def disk_rates(cache: ExpertCache, table: ExpertTable, repeat: int = 3) -> dict[str, float] | None:
    """Bytes per second of distinct experts read through the empty cache, and of dd on the same file, run in turns.

    Medians of ``repeat`` runs, ``{"cache", "dd", "bytes"}``; None where no file holds enough experts or dd fails.
    The cache is left empty.
    """
    found = _largest_file(table)
    if found is None:
        return None
    path, groups, nbytes = found
    through_cache, by_dd = [], []
    for _ in range(repeat):
        rate = _dd(path, nbytes)
        if rate is None:
            return None
        by_dd.append(rate)
        through_cache.append(_read_experts(cache, groups))
    cache.clear()
    return {"cache": median(through_cache), "dd": median(by_dd), "bytes": nbytes}


def _largest_file(table: ExpertTable) -> tuple[Path, dict[int, list[int]], int] | None:
    """The file with the most whole experts: its path, up to DISK_BYTES of them by layer, and their bytes."""
    held: dict[Path, dict[int, list[int]]] = {}
    for layer, experts in table.items():
        for expert, location in enumerate(experts):
            if location.contiguous:
                held.setdefault(location.parts[0].path, {}).setdefault(layer, []).append(expert)
    if not held:
        return None
    path = max(held, key=lambda p: sum(map(len, held[p].values())))
    left, groups = DISK_BYTES // table.expert_bytes, {}
    for layer, ids in held[path].items():
        groups[layer] = ids[:left]
        left -= len(groups[layer])
    nbytes = sum(map(len, groups.values())) * table.expert_bytes
    return (path, groups, nbytes) if nbytes >= LEAST_DISK_BYTES else None


def _dd(path: Path, nbytes: int) -> float | None:
    """Bytes per second of dd reading the first ``nbytes`` of a file with O_DIRECT; None where it can't."""
    blocks = nbytes // DD_BLOCK
    command = ["dd", f"if={path}", "of=/dev/null", f"bs={DD_BLOCK}", f"count={blocks}", "iflag=direct"]
    began = time.perf_counter()
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return blocks * DD_BLOCK / (time.perf_counter() - began)


def _read_experts(cache: ExpertCache, groups: dict[int, list[int]]) -> float:
    """Bytes per second of reading the experts, none of them cached."""
    cache.clear()
    before = cache.stats.bytes_read
    began = time.perf_counter()
    for layer, ids in groups.items():
        for at in range(0, len(ids), cache.cap):
            with cache.lease(layer, ids[at : at + cache.cap]) as batches:
                for _ in batches:
                    pass
    return (cache.stats.bytes_read - before) / (time.perf_counter() - began)


class NullOps:
    """A backend that computes nothing: every operation returns an array of the right shape, made once."""

    name = "null"

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], F32] = {}
        self._routes: dict[tuple[int, int], tuple[Index, F32]] = {}

    def _array(self, *shape: int) -> F32:
        array = self._made.get(shape)
        if array is None:
            array = self._made[shape] = np.zeros(shape, dtype=np.float32)
        return array

    def embed(self, table: MatrixBF16, ids: Ids) -> F32:
        return self._array(len(ids), table.shape[1])

    def linear(self, matrix: Matrix, x: F32) -> F32:
        return self._array(len(x), matrix.shape[0])

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return x

    def add(self, a: F32, b: F32) -> F32:
        return a

    def swiglu(self, gate: F32, up: F32) -> F32:
        return gate

    def split_qkv(self, qkv: F32, layout: QkvLayout, value_scale: float) -> tuple[F32, F32, F32]:
        n = len(qkv)
        return (
            self._array(n, layout.num_heads, layout.head_dim),
            self._array(n, layout.num_kv_heads, layout.head_dim),
            self._array(n, layout.num_kv_heads, layout.v_head_dim),
        )

    def rope(self, x: F32, cos: F32, sin: F32) -> F32:
        return x

    def attention(
        self, q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None
    ) -> F32:
        return self._array(len(q), q.shape[1] * v.shape[2])

    def route(self, logits: F32, bias: F32, top_k: int, scaling: float) -> tuple[Index, F32]:
        key = len(logits), top_k
        if key not in self._routes:
            ids = np.tile(np.arange(top_k, dtype=np.int32), (len(logits), 1))
            self._routes[key] = ids, self._array(*key)
        return self._routes[key]

    def expert_gate_up(self, experts: Sequence[Expert], expert_of: Index, row_of: Index, x: F32) -> F32:
        return self._array(len(expert_of), experts[0].gate.shape[0])

    def expert_down(self, experts: Sequence[Expert], expert_of: Index, act: F32) -> F32:
        return self._array(len(expert_of), experts[0].down.shape[0])

    def weighted_sum(self, y: F32, weights: F32) -> F32:
        return self._array(len(y), y.shape[2])


def python_seconds(weights: Weights, cache: ExpertCache, repeat: int = 200) -> float:
    """The median time of one decode step through LAYERS layers whose kernels do nothing; every expert is cached."""
    config, layers = _stretched(weights)
    ops = NullOps()
    model = Model(replace(weights, config=config, layers=layers), ops, CachedExperts(ops, cache))
    rows = KvCache(config, 1)
    ids = as_ids([0])

    def step() -> float:
        began = time.perf_counter()
        h = model.forward(ids, rows, _nothing)
        model.logits(h)
        seconds = time.perf_counter() - began
        rows.rewind()
        return seconds

    step()
    return median(step() for _ in range(repeat))


def _nothing() -> None:
    """No one cancels a bench."""


def _stretched(weights: Weights) -> tuple[Config, tuple[LayerWeights, ...]]:
    """The model's first layer, then its others over and over (as in the release), LAYERS in all."""
    first, *others = weights.layers
    layers = (first, *itertools.islice(itertools.cycle(others or [first]), LAYERS - 1))
    return replace(weights.config, layers=tuple(layer.spec for layer in layers)), layers
