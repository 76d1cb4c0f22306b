"""Record which experts the demonstration model's tokens use over the held-out list, and how the cache would have done.

    python tools/trace_experts.py                        # writes tests/data/demo_trace.npz and prints the table
    python tools/trace_experts.py --table                # the table of the file that is there

The file: ``experts`` uint8 [tokens, MoE layers, k] in the order of the router; ``rows`` uint16 [passes], how many
tokens each forward pass read; ``layers`` uint8, the layers' numbers; ``count``, how many experts each of them has.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

from mimo_vk.engine import Engine
from mimo_vk.formats import F32
from mimo_vk.model import Experts
from mimo_vk.ops import Index
from mimo_vk.settings import Settings
from tools.demo.heldout import read
from tools.eval_demo import evaluate, told_in_a_line

PATH = Path(__file__).resolve().parents[1] / "tests" / "data" / "demo_trace.npz"
EVERY = 4  # of the held-out list's prompts


@dataclass(frozen=True)
class Trace:
    """What the file holds."""

    experts: NDArray[np.uint8]
    rows: NDArray[np.uint16]
    layers: NDArray[np.uint8]
    count: int

    @classmethod
    def load(cls, path: Path = PATH) -> Trace:
        with np.load(path) as file:
            return cls(file["experts"], file["rows"], file["layers"], int(file["count"]))

    def save(self, path: Path) -> None:
        np.savez_compressed(path, experts=self.experts, rows=self.rows, layers=self.layers, count=np.uint16(self.count))

    def passes(self) -> Iterator[tuple[int, dict[int, list[int]]]]:
        """Each forward pass: its rows, and by layer the distinct experts that they chose, in increasing order."""
        start = 0
        for n in self.rows.tolist():
            chosen = self.experts[start : start + n]
            yield n, {int(layer): np.unique(chosen[:, i]).tolist() for i, layer in enumerate(self.layers)}
            start += n


class Recorder:
    """Stands before the engine's experts and writes down what each pass asked for."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.chosen: dict[int, list[NDArray[np.uint8]]] = {}

    def __call__(self, layer: int, x: F32, ids: Index, weights: F32) -> F32:
        self.chosen.setdefault(layer, []).append(ids.astype(np.uint8))
        return self._experts(layer, x, ids, weights)

    def trace(self, count: int) -> Trace:
        layers = sorted(self.chosen)
        rows = [len(ids) for ids in self.chosen[layers[0]]]
        experts = np.stack([np.concatenate(self.chosen[layer]) for layer in layers], axis=1)
        return Trace(experts, np.array(rows, np.uint16), np.array(layers, np.uint8), count)


def record(engine: Engine, every: int = EVERY) -> Trace:
    recorder = Recorder(engine.model.experts)
    engine.model.experts = recorder
    try:
        for _ in evaluate(engine, read()[::every]):
            pass
    finally:
        engine.model.experts = recorder._experts
    return recorder.trace(engine.config.n_routed_experts)


class LeastRecent:
    """The cache's policy alone: ``cap`` experts of one layer, least recently used out first, hits before misses."""

    def __init__(self, cap: int) -> None:
        self.cap, self.held = cap, OrderedDict[int, None]()
        self.hits = self.misses = 0

    def use(self, experts: Sequence[int]) -> None:
        """At most ``cap`` distinct experts."""
        found = [expert for expert in experts if expert in self.held]
        lost = [expert for expert in experts if expert not in self.held]
        for expert in found:
            self.held.move_to_end(expert)
        for expert in lost:
            if len(self.held) == self.cap:
                self.held.popitem(last=False)
            self.held[expert] = None
        self.hits += len(found)
        self.misses += len(lost)


def replay(trace: Trace, cap: int) -> tuple[int, int]:
    """Hits and misses of the passes of one token, as in generating, with ``cap`` experts of each layer in memory.

    The passes of several tokens take part without being counted.
    """
    caches = {int(layer): LeastRecent(cap) for layer in trace.layers}
    hits = misses = 0
    for n, by_layer in trace.passes():
        for layer, experts in by_layer.items():
            cache = caches[layer]
            before = cache.hits, cache.misses
            ordered = sorted(experts, key=lambda expert: expert not in cache.held) if len(experts) > cap else experts
            for i in range(0, len(ordered), cap):
                cache.use(ordered[i : i + cap])
            if n == 1:
                hits, misses = hits + cache.hits - before[0], misses + cache.misses - before[1]
    return hits, misses


def table(trace: Trace) -> str:
    lines = ["experts in memory, of each layer | share | hit rate while generating"]
    k = trace.experts.shape[2]
    for cap in sorted({k, *(trace.count * eighths // 8 for eighths in range(1, 9))} - {0}):
        hits, misses = replay(trace, cap)
        lines.append(f"{cap:>3} of {trace.count} | {cap / trace.count:>4.0%} | {hits / (hits + misses):.1%}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the one in the package")
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if not args.table:
        with (
            told_in_a_line("trace_experts"),
            Engine.open(Settings(model=args.model, cpu=True, threads=args.threads, ctx=2048)) as engine,
        ):
            record(engine).save(args.out)
        print(f"{args.out}: {args.out.stat().st_size} bytes")
    print(table(Trace.load(args.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
