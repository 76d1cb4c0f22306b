"""The compiled backend: every operation of ``mimo_vk/ops.py`` through numba, the same bytes as ``ReferenceOps``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numba
import numpy as np
from numpy.typing import NDArray

from cpu_fallback.compiled_linear import ENTRY, multiply
from cpu_fallback.reference import ReferenceOps
from cpu_fallback.vector_decode import FORMAT_BF16, FORMAT_F32, FORMAT_FP8, FORMAT_INT8, FORMAT_MXFP4
from cpu_fallback.vector_kernels import kernel_addresses
from mimo_vk.formats import F32, Expert, Matrix, MatrixBF16, MatrixF32, MatrixFP8, MatrixInt8, MatrixMXFP4
from mimo_vk.ops import Index

Row = NDArray[np.int64]


def address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def codes_entry(codes: NDArray[Any], scales: NDArray[Any] | None, scale_row: NDArray[np.int32] | None = None) -> list[int]:
    """What the kernels need to know of a matrix; rows are contiguous, one row may lie anywhere after another."""
    assert codes.strides[1] == codes.itemsize, codes.strides
    entry = [address(codes), codes.strides[0], 0, 0, 0, codes.shape[0]]
    if scales is not None:
        assert scales.strides[-1] == scales.itemsize, scales.strides
        entry[2:4] = [address(scales), scales.strides[0]]
    if scale_row is not None:
        assert scale_row.dtype == np.int32 and scale_row.strides == (4,), (scale_row.dtype, scale_row.strides)
        entry[4] = address(scale_row)
    return entry


def matrix_entry(matrix: Matrix) -> tuple[int, list[int]]:
    """A matrix's format and its entry."""
    match matrix:
        case MatrixF32():
            return FORMAT_F32, codes_entry(matrix.data, None)
        case MatrixBF16():
            return FORMAT_BF16, codes_entry(matrix.data, None)
        case MatrixInt8():
            return FORMAT_INT8, codes_entry(matrix.codes, matrix.scales)
        case MatrixFP8():
            return FORMAT_FP8, codes_entry(matrix.codes, matrix.scales, matrix.scale_row)
        case MatrixMXFP4():
            return FORMAT_MXFP4, codes_entry(matrix.codes, matrix.scales)


def table_row(entry: Sequence[int], second: Sequence[int] = ()) -> Row:
    row = np.zeros((1, ENTRY), np.int64)
    row[0, : len(entry)] = entry
    row[0, len(entry) : len(entry) + 4] = second[:4] if second else 0
    return row


def usable(x: F32) -> F32:
    """x itself if compiled code takes it (its signature names writable C-contiguous float32), else a copy."""
    if x.dtype == np.float32 and x.flags.c_contiguous and x.flags.writeable:
        return x
    return np.array(x, np.float32)


class CompiledOps(ReferenceOps):
    """``mimo_vk.ops.Ops`` in compiled code on ``threads`` threads."""

    name = "numba"

    def __init__(self, threads: int) -> None:
        self.threads = max(1, min(threads, numba.config.NUMBA_NUM_THREADS))
        self.kernels = kernel_addresses()
        self.entries: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # addresses, as long as the matrix lives
        self.numbers: dict[int, tuple[Index, Index]] = {}

    def cached(self, key: Any, make: Callable[[Any], Any]) -> Any:
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = make(key)
        return found

    def linear(self, matrix: Matrix, x: F32) -> F32:
        fmt, table = self.cached(matrix, linear_entry)
        assert x.ndim == 2 and x.shape[1] == matrix.shape[1], (x.shape, matrix.shape)
        n = len(x)
        out = np.empty((n, table[0, 5]), np.float32)
        pairs = self.numbers.get(n)
        if pairs is None:
            pairs = self.numbers[n] = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
        multiply(self.kernels, self.threads, fmt, table, *pairs, usable(x), out)
        return out

    def experts(self, rows: list[Row], matrix_of: Index, row_of: Index, x: F32) -> F32:
        table = np.concatenate(rows)
        out = np.empty((len(matrix_of), table[0, 5]), np.float32)
        multiply(self.kernels, self.threads, FORMAT_MXFP4, table, matrix_of, row_of, usable(x), out)
        return out

    def expert_gate_up(self, experts: Sequence[Expert], expert_of: Index, row_of: Index, x: F32) -> F32:
        return self.experts([self.cached(e, expert_entry)[0] for e in experts], expert_of, row_of, x)

    def expert_down(self, experts: Sequence[Expert], expert_of: Index, act: F32) -> F32:
        row_of = np.arange(len(act), dtype=np.int32)
        return self.experts([self.cached(e, expert_entry)[1] for e in experts], expert_of, row_of, act)


def linear_entry(matrix: Matrix) -> tuple[int, Row]:
    fmt, entry = matrix_entry(matrix)
    return fmt, table_row(entry)


def expert_entry(expert: Expert) -> tuple[Row, Row]:
    """Entries of gate and up together, and of down."""
    gate, up, down = (matrix_entry(m)[1] for m in (expert.gate, expert.up, expert.down))
    return table_row(gate, up), table_row(down)
