"""The bench's arithmetic: what is counted, what stands beside it; and the empty backend has the real one's shapes."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import open_engine

from cpu_fallback.reference import ReferenceOps
from mimo_vk import bench, bench_limits
from mimo_vk.bench import PARTS, Run
from mimo_vk.bench_kernels import KernelResult
from mimo_vk.bench_limits import NullOps, ReadPass, arrays_of, disk_rates, python_seconds
from mimo_vk.checkpoint import Checkpoint
from mimo_vk.engine import Engine
from mimo_vk.errors import UsageError
from mimo_vk.formats import MatrixMXFP4
from mimo_vk.kv_cache import KvCache
from mimo_vk.model import Model, as_ids
from mimo_vk.moe import CachedExperts
from mimo_vk.settings import Settings


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint, backend="numpy", cap=16) as engine:
        yield engine


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PROMPTS", (3, 5))
    monkeypatch.setattr(bench, "DECODE", 2)


def bytes_of_step(engine: Engine, model: Path) -> int:
    """One step's bytes from the files' headers: every text tensor but the embedding, and k experts a layer."""
    weights, config = engine.model.weights, engine.config
    total = 0
    for name, info in Checkpoint.open(model).tensors.items():
        if name in weights.skipped or name.startswith("visual.") or ".mlp.experts." in name:
            continue
        if name == "model.embed_tokens.weight":
            continue
        total += info.nbytes
        if info.dtype == "BF16" and len(info.shape) == 1:
            total += info.nbytes  # vectors are widened to float32
        if info.dtype == "F8_E4M3":
            total += 4 * info.shape[0]  # the scale row of each row, int32
    moe = sum(spec.moe for spec in config.layers)
    h, inner = config.hidden_size, config.moe_intermediate_size
    return total + moe * config.num_experts_per_tok * 3 * h * inner * 17 // 32


def test_arrays_are_found_at_any_depth() -> None:
    codes, scales = np.zeros((4, 16), np.uint8), np.zeros((4, 1), np.uint8)
    matrix = MatrixMXFP4(codes, scales)
    assert [id(a) for a in arrays_of(matrix)] == [id(codes), id(scales)]
    assert arrays_of(3) == arrays_of(None) == []


def test_a_context_in_which_nothing_can_be_decoded_is_refused(tiny_checkpoint: Path) -> None:
    with (
        open_engine(tiny_checkpoint, backend="numpy", ctx=1) as engine,
        pytest.raises(UsageError, match=r"2 tokens.*1"),
    ):
        bench.measure(engine, lambda what, done, total: None, print, 1)


def test_every_phase_is_measured_and_its_parts_add_up(engine: Engine, tiny_checkpoint: Path) -> None:
    shown: list[str] = []
    report = bench.measure(engine, lambda what, done, total: None, shown.append, 1)
    assert [(p["phase"], p["cache"], p["tokens"]) for p in report["phases"]] == [
        ("prompt of 3", "cold", 3),
        ("prompt of 3", "warm", 3),
        ("prompt of 5", "cold", 5),
        ("prompt of 5", "warm", 5),
        ("decode of 2", "cold", 2),
        ("decode of 2", "warm", 2),
    ]
    nbytes = engine.model.weights.experts.expert_bytes
    for phase in report["phases"]:
        assert phase["tokens_per_second"] == phase["tokens"] / phase["seconds"]
        assert sum(phase["parts"].values()) == pytest.approx(phase["seconds"])
        assert all(phase["parts"][part] > 0 for part in ("dense", "attention", "experts", "head", "other", "python"))
        read, waited = phase["bytes_read"], phase["parts"]["disk"]
        assert (read > 0 and read % nbytes == 0 and waited > 0) if phase["cache"] == "cold" else read == waited == 0
    assert report["limit"]["bytes"] == bytes_of_step(engine, tiny_checkpoint)
    assert report["limit"]["seconds"] > 0
    assert report["python"]["layers"] == 48 and report["python"]["seconds"] > 0
    assert report["disk"] is None  # too little to read
    assert report["model"]["cap"] == 16 and report["model"]["backend"] == engine.backend
    rows = [bench.phase_line(phase) for phase in report["phases"]]
    assert shown == [*bench.head_lines(report["model"]), *rows, *bench.limit_lines(report)]


def test_the_pass_reads_the_chosen_experts(engine: Engine) -> None:
    cache = engine.cache
    cache.clear()
    cache.reset_stats()
    layer = next(spec.index for spec in engine.config.layers if spec.moe)
    one = ReadPass(engine.model.weights, cache, {layer: [3]}, 2)
    three = ReadPass(engine.model.weights, cache, {layer: [3, 0, 9]}, 1)
    assert one.seconds(1) > 0 and three.seconds(1) > 0
    assert three.nbytes - one.nbytes == 2 * engine.model.weights.experts.expert_bytes
    assert cache.resident(layer) == {0, 3, 9}


def test_a_threads_share_of_the_arrays_is_all_of_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray[Any, Any]] = []

    class Seen(np.ndarray[Any, Any]):
        def max(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(np.asarray(self))
            return None

    arrays = [np.arange(n, dtype=np.uint8).view(Seen) for n in (0, 1, 2, 7, 100)]
    for share in range(3):
        bench_limits._read_share(arrays, share, 3)
    assert sorted(np.concatenate(seen).tolist()) == sorted(np.concatenate(arrays).tolist())


class Both:
    """Calls two backends, holds their results' shapes and types together, and returns the first's."""

    name = "both"

    def __init__(self, real: Any, null: Any) -> None:
        self._real, self._null = real, null
        self.called: set[str] = set()

    def __getattr__(self, operation: str) -> Any:
        def call(*args: Any) -> Any:
            self.called.add(operation)
            real, null = getattr(self._real, operation)(*args), getattr(self._null, operation)(*args)
            a, b = (result if isinstance(result, tuple) else (result,) for result in (real, null))
            assert [(x.shape, x.dtype) for x in a] == [(x.shape, x.dtype) for x in b], operation
            return real

        return call


@pytest.mark.parametrize("count", [1, 3])
def test_the_empty_backend_has_the_shapes_of_the_real_one(engine: Engine, count: int) -> None:
    ops: Any = Both(ReferenceOps(), NullOps())
    model = Model(engine.model.weights, ops, CachedExperts(ops, engine.cache))
    model.logits(model.forward(as_ids(list(range(count))), KvCache(engine.config, 8), lambda: None))
    assert ops.called == {name for name in vars(NullOps) if not name.startswith("_")} - {"name"}


def test_python_is_timed_over_48_layers_of_cached_experts(engine: Engine) -> None:
    config, layers = bench_limits._stretched(engine.model.weights)
    own = engine.model.weights.layers
    assert len(layers) == len(config.layers) == 48
    assert layers[0] is own[0] and layers[1] is own[1] and layers[len(own)] is own[1]
    engine.cache.clear()
    engine.cache.reset_stats()
    assert python_seconds(engine.model.weights, engine.cache, repeat=2) > 0
    moe, k = sum(spec.moe for spec in config.layers), engine.config.num_experts_per_tok
    stats = engine.cache.stats
    assert stats.misses == k * sum(spec.moe for spec in engine.config.layers)
    assert stats.hits + stats.misses == 3 * moe * k  # one step before the timed ones


def test_disks_are_compared_on_the_file_with_the_most_experts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    table, cache = engine.model.weights.experts, engine.cache
    commands: list[list[str]] = []

    def dd(command: list[str], **_: Any) -> None:
        commands.append(command)

    monkeypatch.setattr(subprocess, "run", dd)
    monkeypatch.setattr(bench_limits, "LEAST_DISK_BYTES", 1)
    monkeypatch.setattr(bench_limits, "DD_BLOCK", 4096)
    monkeypatch.setattr(bench_limits, "DISK_BYTES", 5 * table.expert_bytes + 1)
    cache.reset_stats()
    rates = disk_rates(cache, table, repeat=2)
    assert rates is not None and rates["bytes"] == 5 * table.expert_bytes
    assert rates["cache"] > 0 and rates["dd"] > 0
    assert cache.stats.misses == 10 and cache.stats.bytes_read == 10 * table.expert_bytes
    assert all(not cache.resident(layer) for layer in table)
    files = [location.parts[0].path for row in table.values() for location in row if location.contiguous]
    path = Path(commands[0][1].removeprefix("if="))
    assert files.count(path) == max(map(files.count, files))
    assert commands[0][2:] == ["of=/dev/null", "bs=4096", f"count={5 * table.expert_bytes // 4096}", "iflag=direct"]


@pytest.mark.parametrize("error", [FileNotFoundError("dd"), subprocess.CalledProcessError(1, "dd")])
def test_without_a_working_dd_there_is_no_comparison(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def dd(command: list[str], **_: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", dd)
    monkeypatch.setattr(bench_limits, "LEAST_DISK_BYTES", 1)
    assert disk_rates(engine.cache, engine.model.weights.experts) is None


def test_dd_reads_the_bytes_that_its_rate_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, said = subprocess.run, []

    def run(command: list[str], **how: Any) -> None:
        done = real(command[:-1], **how)  # without O_DIRECT: not every temporary directory takes it
        said.append(done.stderr.decode())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bench_limits, "DD_BLOCK", 65536)
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    rate = bench_limits._dd(tmp_path / "f", 1_000_000)
    assert rate is not None and rate > 0
    assert "983040 bytes" in said[0]  # 15 whole blocks
    assert bench_limits._dd(tmp_path / "absent", 1_000_000) is None


def test_medians_and_rates_of_a_phase() -> None:
    runs = [Run(10, s, {"dense": d, "disk": 0.0}, b) for s, d, b in ((5.0, 1.0, 7), (2.0, 0.5, 9), (4.0, 0.1, 8))]
    phase = bench._phase("prompt of 10", True, runs)
    assert phase == {
        "phase": "prompt of 10",
        "cache": "cold",
        "tokens": 10,
        "seconds": 4.0,
        "tokens_per_second": 2.5,
        "bytes_read": 8,
        "parts": {**dict.fromkeys(PARTS, 0.0), "dense": 0.5},
    }


def test_the_lines_of_a_report() -> None:
    parts = {part: 0.4 * (i + 1) for i, part in enumerate(PARTS)}
    phase = {"phase": "decode of 32", "cache": "warm", "tokens": 32, "seconds": 4.0, "tokens_per_second": 8.0}
    report: dict[str, Any] = {
        "model": {"name": "m", "layers": 3, "experts": 8, "cap": 4, "backend": "numba", "threads": 2, "chunk": 64},
        "phases": [{**phase, "bytes_read": 1_230_000_000, "parts": parts}],
        "limit": {"seconds": 0.0625, "bytes": 1_000_000_000},
        "python": {"seconds": 0.0025, "layers": 48},
        "disk": {"cache": 1.5e9, "dd": 1.2e9, "bytes": 2_000_000_000},
    }
    lines = [*bench.head_lines(report["model"]), bench.phase_line(report["phases"][0]), *bench.limit_lines(report)]
    assert lines[0] == "m: 3 layers, 8 experts a layer (4 cached), numba, threads 2, blocks of 64"
    row = "decode of 32, warm 8.0 12.50 25.00 37.50 50.00 62.50 75.00 87.50 100.00 112.50 1.23"
    assert " ".join(lines[2].split()) == row
    assert lines[3] == (
        "limit: one step's 1.000 GB read and nothing else: 16.0 steps/s (16.0 GB/s); decode reaches 50% of it"
    )
    assert lines[4] == "Python alone: 2.50 ms a step of 48 layers"
    assert lines[5] == "disk: 1.50 GB/s through the cache, 1.20 GB/s by dd with O_DIRECT (125%), 2.00 GB each"


def test_the_command_ends_with_one_object(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model=tiny_checkpoint, cpu=True, ctx=64, backend="numpy", threads=2)
    monkeypatch.setattr(bench, "REPEAT", 1)
    assert bench.main(settings, argparse.Namespace(kernels=False, json=True)) == 0
    out = capsys.readouterr().out.splitlines()
    report = json.loads(out[-1])
    assert len(out) == 2 + 6 + 3 + 1
    assert out[2:8] == [bench.phase_line(phase) for phase in report["phases"]]
    assert {p["cache"] for p in report["phases"]} == {"cold", "warm"}


def test_kernels_are_shown_and_returned_with_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(*_: Any) -> Iterator[KernelResult]:
        yield KernelResult("mxfp4 8x8", 1, 0.5, 4e9, 1_000_000_000, 20.0, 15.0, 100.0)

    class Ops:
        name = "numba"

    monkeypatch.setattr(bench, "make_ops", lambda backend, threads: Ops())
    monkeypatch.setattr(bench.bench_kernels, "linear_results", results)
    monkeypatch.setattr(bench.bench_kernels, "expert_results", lambda *_: iter(()))
    shown: list[str] = []
    (kernel,) = bench.kernels(Settings(), shown.append)
    assert (kernel["name"], kernel["gflops"], kernel["gbps"], kernel["read_gbps"]) == ("mxfp4 8x8", 8.0, 2.0, 20.0)
    assert len(shown) == 2 and shown[1].split()[2:5] == ["1", "500.000", "8.0"]


def test_the_numpy_kernels_are_refused() -> None:
    with pytest.raises(UsageError, match="--kernels"):
        bench.kernels(Settings(backend="numpy"), print)
