"""The compiled backend: every operation of ``mimo_vk/ops.py`` through numba, the same bytes as ``ReferenceOps``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numba
import numpy as np
from numpy.typing import NDArray

from cpu_fallback import compiled_rows, compiled_vision
from cpu_fallback.compiled_linear import ENTRY, ROWS, SCALE_ROW, SCALES, SCALES_STRIDE, SECOND, multiply
from cpu_fallback.vector_decode import (
    FORMAT_BF16,
    FORMAT_F32,
    FORMAT_FP8,
    FORMAT_FP8_FOLDED,
    FORMAT_INT8,
    FORMAT_MXFP4,
    FORMAT_MXFP4_PORTABLE,
)
from cpu_fallback.vector_kernels import kernel_addresses
from mimo_vk.formats import F32, Expert, Matrix, MatrixBF16, MatrixF32, MatrixFP8, MatrixInt8, MatrixMXFP4
from mimo_vk.ops import Ids, Index, QkvLayout, SinkReading

Row = NDArray[np.int64]

FOLDED_SCALE_LIMIT = 2.0**100  # below it an FP8 scale stays finite when it takes over part of the codes' 2^120


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def table_entry(codes: NDArray[Any], scales: NDArray[Any] | None = None, scale_row: Index | None = None) -> Row:
    """A matrix as one row of the kernels' table. Each row is contiguous; the rows may lie any distance apart."""
    assert codes.strides[1] == codes.itemsize, codes.strides
    entry = np.zeros((1, ENTRY), np.int64)
    entry[0, :2] = address(codes), codes.strides[0]
    entry[0, ROWS] = codes.shape[0]
    if scales is not None:
        assert scales.strides[-1] == scales.itemsize, scales.strides
        entry[0, SCALES], entry[0, SCALES_STRIDE] = address(scales), scales.strides[0]
    if scale_row is not None:
        assert scale_row.dtype == np.int32 and scale_row.strides == (4,), (scale_row.dtype, scale_row.strides)
        entry[0, SCALE_ROW] = address(scale_row)
    return entry


def fp8_format(scales: F32) -> int:
    """The folded format where every scale allows it (NaN does not)."""
    return FORMAT_FP8_FOLDED if bool((np.abs(scales) < FOLDED_SCALE_LIMIT).all()) else FORMAT_FP8


def linear_entry(matrix: Matrix) -> tuple[int, Row, int, int]:
    """Format, table, and the matrix's rows and columns."""
    match matrix:
        case MatrixF32():
            fmt, entry = FORMAT_F32, table_entry(matrix.data)
        case MatrixBF16():
            fmt, entry = FORMAT_BF16, table_entry(matrix.data)
        case MatrixInt8():
            fmt, entry = FORMAT_INT8, table_entry(matrix.codes, matrix.scales)
        case MatrixFP8():
            fmt, entry = fp8_format(matrix.scales), table_entry(matrix.codes, matrix.scales, matrix.scale_row)
        case MatrixMXFP4():
            fmt, entry = FORMAT_MXFP4, table_entry(matrix.codes, matrix.scales)
    return fmt, entry, *matrix.shape


def expert_entry(expert: Expert) -> tuple[Row, Row]:
    """The table's row of gate and up together, and that of down."""
    gate_up, up, down = (table_entry(m.codes, m.scales) for m in (expert.gate, expert.up, expert.down))
    assert expert.gate.shape == expert.up.shape, (expert.gate.shape, expert.up.shape)
    gate_up[0, SECOND:] = up[0, :SCALE_ROW]
    return gate_up, down


def usable(x: F32) -> F32:
    """x itself if compiled code takes it (writable, C-contiguous float32, as its signature says), else a copy."""
    if x.dtype == np.float32 and x.flags.carray:
        return x
    return np.array(x, np.float32, order="C")


class CompiledOps:
    """``mimo_vk.ops.Ops`` in compiled code on ``threads`` threads, at most what numba was started with.

    ``portable`` forces the decoding that needs no special instructions; the bytes are the same.
    """

    name = "numba"

    def __init__(self, threads: int, portable: bool = False) -> None:
        self.threads = max(1, min(threads, numba.config.NUMBA_NUM_THREADS))
        self.mxfp4 = FORMAT_MXFP4_PORTABLE if portable else FORMAT_MXFP4
        self.kernels = kernel_addresses()
        self.entries: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # addresses, as long as the matrix lives
        self.rows: tuple[Index, Index] = (np.zeros(0, np.int32), np.zeros(0, np.int32))

    def entry(self, key: Any, make: Callable[[Any], Any]) -> Any:
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = make(key)
        return found

    def rows_of_one(self, n: int) -> tuple[Index, Index]:
        """matrix_of and row_of for n rows of x and one matrix: the beginnings of those for the most rows so far."""
        if n > len(self.rows[0]):
            self.rows = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
        return self.rows[0][:n], self.rows[1][:n]

    def linear(self, matrix: Matrix, x: F32) -> F32:
        fmt, table, rows, columns = self.entry(matrix, linear_entry)
        n = len(x)
        assert x.shape == (n, columns), (x.shape, matrix.shape)
        out = np.empty((n, rows), np.float32)
        matrix_of, row_of = self.rows_of_one(n)
        fmt = self.mxfp4 if fmt == FORMAT_MXFP4 else fmt
        multiply(self.kernels, self.threads, fmt, table, matrix_of, row_of, usable(x), out)
        return out

    def expert_gate_up(self, experts: Sequence[Expert], expert_of: Index, row_of: Index, x: F32) -> F32:
        table = np.concatenate([self.entry(expert, expert_entry)[0] for expert in experts])
        assert x.shape[1] == experts[0].gate.shape[1], (x.shape, experts[0].gate.shape)
        out = np.empty((len(expert_of), table[0, ROWS]), np.float32)
        multiply(self.kernels, self.threads, self.mxfp4, table, expert_of, row_of, usable(x), out)
        return out

    def expert_down(self, experts: Sequence[Expert], expert_of: Index, act: F32) -> F32:
        table = np.concatenate([self.entry(expert, expert_entry)[1] for expert in experts])
        assert act.shape == (len(expert_of), experts[0].down.shape[1]), (act.shape, experts[0].down.shape)
        out = np.empty((len(expert_of), table[0, ROWS]), np.float32)
        row_of = self.rows_of_one(len(act))[1]
        multiply(self.kernels, self.threads, self.mxfp4, table, expert_of, row_of, usable(act), out)
        return out

    def embed(self, table: MatrixBF16, ids: Ids) -> F32:
        return compiled_rows.embed(table, ids)

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return compiled_rows.rms_norm(x, weight, eps, self.threads)

    def add(self, a: F32, b: F32) -> F32:
        return compiled_rows.add(a, b)

    def swiglu(self, gate: F32, up: F32) -> F32:
        return compiled_rows.swiglu(gate, up, self.threads)

    def split_qkv(self, qkv: F32, layout: QkvLayout, value_scale: float) -> tuple[F32, F32, F32]:
        return compiled_rows.split_qkv(qkv, layout, value_scale)

    def rope(self, x: F32, cos: F32, sin: F32) -> F32:
        return compiled_rows.rope(x, cos, sin)

    def attention(
        self, q: F32, k: F32, v: F32, keys: F32, values: F32, start: int, window: int | None, sink: F32 | None
    ) -> F32:
        return compiled_rows.attention(q, k, v, keys, values, start, window, sink, self.threads)

    def route(self, logits: F32, bias: F32, top_k: int, scaling: float) -> tuple[Index, F32]:
        return compiled_rows.route(logits, bias, top_k, scaling)

    def weighted_sum(self, y: F32, weights: F32) -> F32:
        return compiled_rows.weighted_sum(y, weights, self.threads)

    def add_row(self, x: F32, row: F32) -> F32:
        return compiled_vision.add_row(x, row)

    def layer_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return compiled_vision.layer_norm(x, weight, eps)

    def gelu(self, x: F32) -> F32:
        return compiled_vision.gelu(x, self.threads)

    def patch_attention(
        self, q: F32, k: F32, v: F32, start: int, reach: int | None, sink: F32 | None, reading: SinkReading
    ) -> F32:
        return compiled_vision.patch_attention(q, k, v, start, reach, sink, reading, self.threads)
