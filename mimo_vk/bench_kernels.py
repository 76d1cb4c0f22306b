"""The speed of the CPU's matrix products, each beside limits measured in the same run.

Medians. GFLOPS count a multiplication and an addition per stored weight and row of x; GB/s count the bytes of codes and
scales, each read once per call. The limits: ``read``, a pass that only reads as many bytes; ``copy``, what a plain
copy moves (read and written); ``peak``, unfused multiplications and additions in registers, all on the same threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from mimo_vk.formats import (
    F32,
    FP8_BLOCK,
    MXFP4_BLOCK,
    Expert,
    Matrix,
    MatrixBF16,
    MatrixF32,
    MatrixFP8,
    MatrixInt8,
    MatrixMXFP4,
)
from mimo_vk.ops import Ops

OUTPUTS, COLUMNS = 4096, 14336
HIDDEN, INNER, CHOSEN = 4096, 2048, 8  # the experts of one token
ROWS = (1, 8, 64)
KINDS = ("mxfp4", "bf16", "fp8", "int8", "f32")
SHORTEST, FEWEST = 0.5, 7  # seconds and calls that a median is taken over


@dataclass(frozen=True)
class KernelResult:
    """One kernel's median, and the limits measured right after it."""

    name: str
    rows: int
    seconds: float
    flops: float
    bytes: int
    read_gbps: float
    copy_gbps: float
    peak_gflops: float

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def gbps(self) -> float:
        return self.bytes / self.seconds / 1e9

    def line(self) -> str:
        return (
            f"{self.name:22} {self.rows:4} {self.seconds * 1e3:9.3f} {self.gflops:8.1f} {self.gbps:7.1f}"
            f" {self.read_gbps:7.1f} {self.copy_gbps:7.1f} {self.peak_gflops:7.1f}"
        )


HEADER = f"{'kernel':22} {'rows':>4} {'ms':>9} {'GFLOPS':>8} {'GB/s':>7} {'read':>7} {'copy':>7} {'peak':>7}"


def timed(call: Callable[[], object], shortest: float = SHORTEST) -> float:
    """Median seconds of a call, after one that isn't counted."""
    call()
    seconds: list[float] = []
    while len(seconds) < FEWEST or sum(seconds) < shortest:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


class Limits:
    """The machine's own speeds on so many threads."""

    def __init__(self, threads: int, shortest: float = SHORTEST) -> None:
        self.threads, self.shortest = threads, shortest

    def read_gbps(self, size: int) -> float:
        from cpu_fallback import limits

        data, out = np.ones(size // 8, np.int64), np.zeros(self.threads, np.int64)
        return data.nbytes / timed(lambda: limits.read(self.threads, data, out), self.shortest) / 1e9

    def copy_gbps(self, size: int) -> float:
        from cpu_fallback import limits

        data = np.ones(size // 8, np.int64)
        out = np.zeros_like(data)
        return 2 * data.nbytes / timed(lambda: limits.copy(self.threads, data, out), self.shortest) / 1e9

    def peak_gflops(self) -> float:
        from cpu_fallback import limits

        count, out = 200_000, np.zeros(self.threads, np.float32)
        seconds = timed(lambda: limits.multiply_add(self.threads, count, out), self.shortest)
        return self.threads * count * limits.PEAK_FLOPS / seconds / 1e9

    def result(self, name: str, rows: int, seconds: float, weights: int, size: int) -> KernelResult:
        limits = self.read_gbps(size), self.copy_gbps(size), self.peak_gflops()
        return KernelResult(name, rows, seconds, 2.0 * weights * rows, size, *limits)


def random_mxfp4(rng: np.random.Generator, outputs: int, columns: int) -> MatrixMXFP4:
    codes = rng.integers(0, 256, (outputs, columns // 2), dtype=np.uint8)
    return MatrixMXFP4(codes, rng.integers(118, 124, (outputs, columns // MXFP4_BLOCK), dtype=np.uint8))


def fp8_codes(values: F32) -> np.ndarray:
    """Values of about 1 as e4m3 codes with the largest at 448, rounded down: a bell like that of real weights."""
    scaled = np.abs(values) * np.float32(448 / np.abs(values).max())
    bits = scaled.view(np.uint32)
    normal = (bits >> 20) - np.uint32(120 << 3)
    codes = np.where(scaled < 2.0**-6, (scaled * 512).astype(np.uint32), normal)
    return (codes | (np.signbit(values).astype(np.uint32) << 7)).astype(np.uint8)


def random_matrix(kind: str, outputs: int, columns: int) -> Matrix:
    rng = np.random.default_rng(1)
    if kind == "mxfp4":
        return random_mxfp4(rng, outputs, columns)
    values = rng.standard_normal((outputs, columns), dtype=np.float32)
    if kind == "f32":
        return MatrixF32(values)
    if kind == "bf16":
        return MatrixBF16((values.view(np.uint32) >> 16).astype(np.uint16))
    if kind == "int8":
        return MatrixInt8(np.clip(values * 30, -127, 127).astype(np.int8), np.full(outputs, 0.01, np.float32))
    blocks = -(-outputs // FP8_BLOCK), -(-columns // FP8_BLOCK)
    scales = rng.uniform(1e-4, 2e-4, blocks).astype(np.float32)
    return MatrixFP8(fp8_codes(values), scales, (np.arange(outputs) // FP8_BLOCK).astype(np.int32))


def stored_bytes(matrix: Matrix) -> int:
    return sum(array.nbytes for name, array in vars(matrix).items() if name != "scale_row")


def linear_results(
    ops: Ops,
    limits: Limits,
    kinds: Sequence[str] = KINDS,
    rows: Sequence[int] = ROWS,
    shape: tuple[int, int] = (OUTPUTS, COLUMNS),
) -> Iterator[KernelResult]:
    """A matrix of each format times one row and times several."""
    for kind in kinds:
        matrix = random_matrix(kind, *shape)
        for n in rows:
            x = np.random.default_rng(2).standard_normal((n, shape[1]), dtype=np.float32)
            seconds = timed(lambda matrix=matrix, x=x: ops.linear(matrix, x), limits.shortest)  # type: ignore[misc]
            yield limits.result(f"{kind} {shape[0]}x{shape[1]}", n, seconds, shape[0] * shape[1], stored_bytes(matrix))


def expert_results(
    ops: Ops, limits: Limits, hidden: int = HIDDEN, inner: int = INNER, chosen: int = CHOSEN
) -> Iterator[KernelResult]:
    """The experts of one token: gate and up with SwiGLU, then down."""
    rng = np.random.default_rng(3)
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    experts = [Expert(*(random_mxfp4(rng, *shape) for shape in shapes)) for _ in range(chosen)]
    pairs, rows = np.arange(chosen, dtype=np.int32), np.zeros(chosen, np.int32)
    x = rng.standard_normal((1, hidden), dtype=np.float32)
    act = ops.expert_gate_up(experts, pairs, rows, x)
    calls: dict[str, tuple[int, Callable[[], F32]]] = {
        f"{chosen} experts gate_up": (2, lambda: ops.expert_gate_up(experts, pairs, rows, x)),
        f"{chosen} experts down": (1, lambda: ops.expert_down(experts, pairs, act)),
    }
    for name, (matrices, call) in calls.items():
        weights = matrices * chosen * hidden * inner
        size = weights // 2 + weights // MXFP4_BLOCK
        yield limits.result(name, 1, timed(call, limits.shortest), weights, size)


def main(arguments: Sequence[str] | None = None) -> None:
    from cpu_fallback.compiled import CompiledOps

    parser = argparse.ArgumentParser(prog="python -m mimo_vk.bench_kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--shape", nargs=2, type=int, default=[OUTPUTS, COLUMNS], metavar=("OUTPUTS", "COLUMNS"))
    parser.add_argument("--seconds", type=float, default=SHORTEST, help="how long each median is taken over")
    options = parser.parse_args(arguments)
    ops = CompiledOps(options.threads)
    limits = Limits(ops.threads, options.seconds)
    print(HEADER)
    for result in linear_results(ops, limits, options.kinds, options.rows, tuple(options.shape)):
        print(result.line(), flush=True)
    for result in expert_results(ops, limits):
        print(result.line(), flush=True)


if __name__ == "__main__":
    main()
