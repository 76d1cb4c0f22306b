"""``mimo-vk bench``: how fast prompts are read and tokens come, from a cold and a warm expert cache, and why.

Cold means that no expert is in RAM (the dense weights are: they have been read once before). Every number is the
median of some runs; beside decode stands a limit measured in the same run, a read-only pass over one step's bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import numpy as np

from mimo_vk import bench_kernels
from mimo_vk.bench_kernels import CHOSEN
from mimo_vk.bench_limits import LAYERS, ReadPass, disk_rates, python_seconds
from mimo_vk.engine import Engine, make_ops
from mimo_vk.errors import UsageError
from mimo_vk.formats import Expert
from mimo_vk.progress import Progress
from mimo_vk.sampling import Sampler
from mimo_vk.session import Session
from mimo_vk.settings import Settings
from mimo_vk.vulkan import bench_device, bench_overlap
from mimo_vk.vulkan.bench_device import HIDDEN, INNER
from mimo_vk.vulkan.listing import DeviceInfo

PROMPTS = (32, 128)  # tokens read
DECODE = 32  # tokens generated, after a prompt of PROMPTS[0]
REPEAT = 3
# Of the device: "layers" are those that live there whole, "device" is the wait for its experts.
PARTS = ("dense", "attention", "layers", "experts", "head", "other", "disk", "device", "python")
_SEED = 1234

Report = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One timed phase: its tokens, its wall time, and the parts of it by name, in seconds."""

    tokens: int
    seconds: float
    parts: dict[str, float]
    bytes_read: int


def main(settings: Settings, args: argparse.Namespace) -> int:
    """Print the table as it is measured, and with --json one object last; --kernels adds the single kernels."""
    with Progress() as progress:

        def show(line: str) -> None:
            progress.clear()
            print(line, flush=True)

        with Engine.open(settings, progress) as engine:
            report = measure(engine, progress, show, REPEAT)
            device = engine.device
        if args.kernels:
            report["kernels"] = kernels(settings, show)
            report["device_kernels"] = device_kernels(device, show) if device else []
            report["overlap"] = overlap(device, settings, show) if device else []
    if args.json:
        print(json.dumps(report))
    return 0


def measure(
    engine: Engine, progress: Callable[[str, int, int], None], show: Callable[[str], None], repeat: int
) -> Report:
    """Everything the bench reports, as plain numbers: seconds, bytes, tokens. ``show`` gets the lines of the table.

    Errors: UsageError for a context in which nothing can be decoded.
    """
    if engine.ctx < 2:
        raise UsageError(f"bench: a context of 2 tokens or more is needed, found {engine.ctx} (--ctx)")
    bench = _Bench(engine, repeat)
    todo = [partial(bench.prefill, n, cold) for n in bench.prompts for cold in (True, False)]
    todo += [partial(bench.decode, cold) for cold in (True, False)]
    progress("warming up", 0, len(todo))
    bench.warm_up()
    report: Report = {"model": bench.model(), "phases": []}
    for line in head_lines(report["model"]):
        show(line)
    for i, phase in enumerate(todo):
        progress("measuring", i, len(todo))
        report["phases"].append(phase())
        show(phase_line(report["phases"][-1]))
    progress("measuring the limits", len(todo), len(todo))
    weights = engine.model.weights
    report["limit"] = bench.limit()
    report["python"] = {"seconds": python_seconds(weights, engine.cache), "layers": LAYERS}
    report["disk"] = disk_rates(engine.cache, weights.experts)
    for line in limit_lines(report):
        show(line)
    return report


def kernels(settings: Settings, show: Callable[[str], None]) -> list[Report]:
    """Each matrix product at the release's sizes, on the backend that the settings name."""
    ops = make_ops(settings.backend, settings.threads)
    if ops.name == "numpy":
        raise UsageError("--kernels: the compiled kernels are measured; numba is not used here")
    limits = bench_kernels.Limits(settings.threads)
    results = []
    show(bench_kernels.HEADER)
    for result in chain(bench_kernels.linear_results(ops, limits), bench_kernels.expert_results(ops, limits)):
        show(result.line())
        results.append({**asdict(result), "gflops": result.gflops, "gbps": result.gbps})
    return results


def device_kernels(info: DeviceInfo, show: Callable[[str], None]) -> list[Report]:
    """Each kernel on the device, beside what it copies."""
    show(f"device {info.describe()}")
    show(bench_device.HEADER)
    results = bench_device.measure(info)
    for result in results:
        show(result.line())
    return [{**asdict(result), "gbps": result.gbps} for result in results]


def overlap(info: DeviceInfo, settings: Settings, show: Callable[[str], None]) -> list[Report]:
    """Steps whose experts are partly on the device: wall time beside that of each part alone."""
    rng = np.random.default_rng(_SEED)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    experts = [Expert(*(bench_kernels.random_mxfp4(rng, *shape) for shape in shapes)) for _ in range(CHOSEN)]
    threads = 1 if info.kind == "CPU" else settings.threads
    results = bench_overlap.measure(info, make_ops(settings.backend, threads), experts)
    for result in results:
        for line in result.lines():
            show(line)
    return [asdict(result) for result in results]


class _Bench:
    """The phases on one engine and one session."""

    def __init__(self, engine: Engine, repeat: int) -> None:
        self._engine = engine
        self._repeat = repeat
        self._session: Session = engine.session()
        rng = np.random.default_rng(_SEED)
        self._ids: list[int] = rng.integers(0, engine.vocab_limit, max(PROMPTS)).tolist()
        self.prompts = [n for n in PROMPTS if n <= engine.ctx]
        self._start = min(PROMPTS[0], engine.ctx // 2)  # of decode
        self._steps = min(DECODE, engine.ctx - self._start)

    def warm_up(self) -> None:
        """Compile what is compiled at first use, and read the dense weights once."""
        self._read(max(self.prompts, default=self._start))
        self._generate(2)

    def model(self) -> Report:
        engine = self._engine
        return {
            "name": engine.model_name,
            "layers": engine.config.num_hidden_layers,
            "experts": engine.config.n_routed_experts,
            "cap": engine.cache.cap,
            "backend": engine.backend,
            "threads": engine.settings.threads,
            "chunk": engine.chunk,
            "dense_bits": engine.settings.dense_bits,
        }

    def prefill(self, count: int, cold: bool) -> Report:
        """Read ``count`` tokens. Warm: the same tokens were the last thing read."""
        runs = []
        for i in range(self._repeat + (not cold)):
            if cold:
                self._engine.cache.clear()
            runs.append(self._timed(lambda: self._read(count)))
            if i == 0 and not cold:
                runs.clear()
        return _phase(f"prompt of {count}", cold, runs)

    def decode(self, cold: bool) -> Report:
        """Generate, by the same steps each time. Cold: the cache is empty at the first of them."""
        runs = []
        for i in range(self._repeat + (not cold)):
            self._read(self._start)
            if cold:
                self._engine.cache.clear()
            runs.append(self._timed(lambda: self._generate(self._steps)))
            if i == 0 and not cold:
                runs.clear()
        return _phase(f"decode of {self._steps}", cold, runs)

    def limit(self) -> Report:
        """The read-only pass over what one more step, of a warm cache, touched."""
        engine = self._engine
        self._read(self._start)
        engine.cache.reset_stats()
        self._generate(1)
        chosen = {layer: np.flatnonzero(counts).tolist() for layer, counts in engine.cache.stats.accesses.items()}
        read = ReadPass(engine.model.weights, engine.cache, chosen, engine.settings.threads)
        seconds = read.seconds()
        return {"seconds": seconds, "bytes": read.nbytes}

    def _read(self, count: int) -> None:
        self._session.reset()
        self._logits = self._session.prompt(self._ids[:count])

    def _generate(self, steps: int) -> None:
        """``steps`` forward passes: an id is sampled from the prompt's own logits first."""
        sampler = Sampler(0.0)
        for _ in self._session.generate(self._logits, max_tokens=steps + 1, sampler=sampler, stop_ids=frozenset()):
            pass

    def _timed(self, work: Callable[[], None]) -> Run:
        """Run it, and take from the engine's counters what it added."""
        before = _counters(self._engine)
        work()
        added = {name: value - before.get(name, 0.0) for name, value in _counters(self._engine).items()}
        seconds = added.pop("seconds")
        tokens, bytes_read = int(added.pop("tokens")), int(added.pop("bytes_read"))
        return Run(tokens, seconds, {**added, "python": seconds - sum(added.values())}, bytes_read)


def _counters(engine: Engine) -> dict[str, float]:
    """The engine's counters so far: tokens and seconds of both phases together, bytes read, and each part."""
    stats = engine.snapshot_stats()
    return {
        **stats.parts,
        "seconds": stats.prefill_seconds + stats.decode_seconds,
        "tokens": stats.prefill_tokens + stats.decode_tokens,
        "bytes_read": stats.bytes_read,
    }


def _phase(name: str, cold: bool, runs: list[Run]) -> Report:
    """The medians of some runs; a part is its median too, so that parts add up to about the whole."""
    seconds = median(run.seconds for run in runs)
    return {
        "phase": name,
        "cache": "cold" if cold else "warm",
        "tokens": runs[0].tokens,
        "seconds": seconds,
        "tokens_per_second": runs[0].tokens / seconds,
        "bytes_read": int(median(run.bytes_read for run in runs)),
        "parts": {part: median(run.parts.get(part, 0.0) for run in runs) for part in PARTS},
    }


def head_lines(model: Report) -> list[str]:
    """What is measured, and the table's head."""
    columns = f"{'':26}{'tokens/s':>9}" + "".join(f"{part:>10}" for part in PARTS) + f"{'GB read':>9}"
    return [
        f"{model['name']}: {model['layers']} layers, {model['experts']} experts a layer ({model['cap']} cached), "
        f"{model['backend']}, threads {model['threads']}, blocks of {model['chunk']}",
        columns + "   (parts: ms per token)",
    ]


def phase_line(phase: Report) -> str:
    """A row of the table, with milliseconds per token where they went."""
    name = f"{phase['phase']}, {phase['cache']}"
    parts = "".join(f"{phase['parts'][part] / phase['tokens'] * 1e3:10.2f}" for part in PARTS)
    return f"{name:26}{phase['tokens_per_second']:9.1f}{parts}{phase['bytes_read'] / 1e9:9.2f}"


def limit_lines(report: Report) -> list[str]:
    """What the last row, decode from a warm cache, stands beside."""
    limit, python, disk = report["limit"], report["python"], report["disk"]
    warm = report["phases"][-1]
    out = [
        f"limit: one step's {limit['bytes'] / 1e9:.3f} GB read and nothing else: {1 / limit['seconds']:.1f} steps/s "
        f"({limit['bytes'] / limit['seconds'] / 1e9:.1f} GB/s); decode reaches "
        f"{warm['tokens_per_second'] * limit['seconds']:.0%} of it",
        f"Python alone: {python['seconds'] * 1e3:.2f} ms a step of {python['layers']} layers",
    ]
    if disk is None:
        return [*out, "disk: too few bytes of experts in one file to measure, or dd can't read it with O_DIRECT"]
    return [
        *out,
        f"disk: {disk['cache'] / 1e9:.2f} GB/s through the cache, {disk['dd'] / 1e9:.2f} GB/s by dd with O_DIRECT "
        f"({disk['cache'] / disk['dd']:.0%}), {disk['bytes'] / 1e9:.2f} GB each",
    ]
