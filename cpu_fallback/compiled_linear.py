"""Matrix products for the compiled backend: the loops around the kernels of ``vector_kernels.py``.

One call is one parallel region. Thread t takes the t-th part of every matrix's rows, so that it reads one contiguous
range, in blocks of 8 rows. No result depends on the threads, the blocks or the number of rows of x.
"""

from __future__ import annotations

import numba
import numpy as np

from cpu_fallback.compiled_elementary import sigmoid
from cpu_fallback.jit import jit
from cpu_fallback.threads import get_threads, set_threads
from cpu_fallback.vector_decode import FORMAT_INT8, LANES, LAYOUTS, STEP
from cpu_fallback.vector_kernels import (
    KIND_OF,
    SCRATCH_ROW,
    STEP_BYTES,
    TILE_WEIGHTS,
    copy_padded,
    decode,
    direct,
    load_float,
    load_int32,
    tile,
    tree,
)

BLOCK_ROWS = 8  # stored rows that share the loads of x and, decoded, fit a core's first-level cache
TILE_LIMIT = 64  # rows of x whose lane sums are kept at once
SERIAL_WORK = 1 << 16  # multiplications below which waking threads costs more than it saves

# A matrix as the kernels see it is one row of an int64 table: the address of the codes and the bytes between rows, the same
# of the scales, the address of each row's scale row or 0, the rows; then codes and scales of a second matrix, or 0.
CODES, CODES_STRIDE, SCALES, SCALES_STRIDE, SCALE_ROW, ROWS, SECOND = range(7)
ENTRY = SECOND + 4

KIND = tuple(KIND_OF)
WORD_COLUMNS = tuple(layout.g for layout in LAYOUTS.values())
CODE_BYTES = tuple(layout.step_bytes for layout in LAYOUTS.values())
SCALE_BYTES = tuple(layout.scale_bytes for layout in LAYOUTS.values())
SCALE_COLUMNS = tuple(layout.scale_columns for layout in LAYOUTS.values())


@jit()
def permute(x, g, steps, out):  # type: ignore[no-untyped-def]
    """x [n, K] to out [steps, n, 256]: within a step [word of the lane][column of the word][lane], zero padded."""
    n, columns = x.shape
    for s in range(steps):
        for m in range(n):
            for i in range(STEP // g):
                for c in range(g):
                    k = s * STEP + i * g + c
                    value = x[m, k] if k < columns else np.float32(0)
                    out[s, m, (i // LANES * g + c) * LANES + i % LANES] = value


@jit()
def find_rows(entry, second, first, count, words, scales):  # type: ignore[no-untyped-def]
    """Addresses of the codes and the scales of 8 rows from ``first``; past ``count`` the last one again."""
    codes, codes_stride = entry[CODES], entry[CODES_STRIDE]
    scale, scale_stride = entry[SCALES], entry[SCALES_STRIDE]
    if second:
        codes, codes_stride = entry[SECOND], entry[SECOND + 1]
        scale, scale_stride = entry[SECOND + 2], entry[SECOND + 3]
    for j in range(BLOCK_ROWS):
        row = first + min(j, count - 1)
        words[j] = codes + row * codes_stride
        scale_row = row if entry[SCALE_ROW] == 0 else load_int32(entry[SCALE_ROW] + 4 * row)
        scales[j] = scale + scale_row * scale_stride


@jit()
def copy_tails(fmt, columns, rows, words, scales, tail, tail_words, tail_scales):  # type: ignore[no-untyped-def]
    """The last, partial step of the block's rows, zero padded: a kernel never reads past the end of a row."""
    steps = columns // STEP
    rest = columns - steps * STEP
    code_bytes, scale_bytes = CODE_BYTES[fmt], SCALE_BYTES[fmt]
    for j in range(BLOCK_ROWS):
        tail_words[j] = tail.ctypes.data + j * tail.shape[1]
        tail_scales[j] = tail_words[j] + STEP_BYTES
        copy_padded(tail_words[j], words[j] + steps * code_bytes, rest * code_bytes // STEP, code_bytes)
        if scale_bytes:
            blocks = (rest + SCALE_COLUMNS[fmt] - 1) // SCALE_COLUMNS[fmt]
            size = blocks * (SCALE_COLUMNS[fmt] * scale_bytes // STEP)
            copy_padded(tail_scales[j], scales[j] + steps * scale_bytes, size, scale_bytes)


@jit()
def multiply_one(kernels, fmt, columns, count, words, scales, tail_words, tail_scales, x, offset, acc):  # type: ignore[no-untyped-def]
    """Lane sums [8][32] of ``count`` rows times one row of x, in registers."""
    acc[: count * LANES] = 0
    steps = columns // STEP
    x_step = x.shape[1] * STEP_BYTES
    start, sums = x.ctypes.data + offset, acc.ctypes.data
    direct(kernels, fmt, words.ctypes.data, scales.ctypes.data, count, 0, steps, start, x_step, sums)
    if columns > steps * STEP:
        start += steps * x_step
        direct(kernels, fmt, tail_words.ctypes.data, tail_scales.ctypes.data, count, 0, 1, start, x_step, sums)


@jit()
def multiply_many(kernels, fmt, columns, count, words, scales, tail_words, tail_scales, x, offsets, acc, scratch):  # type: ignore[no-untyped-def]
    """Lane sums [8][len(offsets)][32] of ``count`` rows times several rows of x."""
    n = len(offsets)
    kind = KIND[fmt]
    full = columns // STEP
    acc[: BLOCK_ROWS * n * LANES] = 0
    acc_row = n * LANES * 4
    for step in range(x.shape[0]):
        if step < full:
            decode(kernels, fmt, words.ctypes.data, scales.ctypes.data, BLOCK_ROWS, step, scratch.ctypes.data)
        else:
            decode(kernels, fmt, tail_words.ctypes.data, tail_scales.ctypes.data, BLOCK_ROWS, 0, scratch.ctypes.data)
        x_step = x.ctypes.data + step * x.shape[1] * STEP_BYTES
        m = 0
        while m < n:
            rows = 4 if n - m >= 4 else (2 if n - m >= 2 else 1)
            x_offsets = offsets.ctypes.data + 8 * m
            for j in range(0, count, TILE_WEIGHTS):
                sums = acc.ctypes.data + j * acc_row + m * LANES * 4
                tile(kernels, kind, rows, scratch.ctypes.data + j * SCRATCH_ROW, x_step, x_offsets, sums, acc_row)
            m += rows


@jit()
def finish(fmt, count, scales, n, acc, result):  # type: ignore[no-untyped-def]
    """The lane sums [8][n][32] to result [n, 8]."""
    for j in range(count):
        for m in range(n):
            total = tree(acc.ctypes.data + (j * n + m) * LANES * 4)
            result[m, j] = total * load_float(scales[j]) if fmt == FORMAT_INT8 else total


@jit()
def part_of(count, part, parts):  # type: ignore[no-untyped-def]
    """Where the part begins when ``count`` rows are cut into parts of whole blocks."""
    blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    return min(count, blocks * part // parts * BLOCK_ROWS)


@jit()
def work(part, parts, kernels, fmt, columns, table, edges, offsets, x, out):  # type: ignore[no-untyped-def]
    """One thread's share: its rows of every matrix of the table, times the matrix's rows of x."""
    most = 1
    for e in range(len(table)):
        most = max(most, min(TILE_LIMIT, edges[e + 1] - edges[e]))
    pointers = np.empty((4, BLOCK_ROWS), np.int64)
    words, scales, tail_words, tail_scales = pointers[0], pointers[1], pointers[2], pointers[3]
    tail = np.empty((BLOCK_ROWS, STEP_BYTES + 64), np.uint8)
    acc = np.empty(BLOCK_ROWS * most * LANES, np.float32)
    scratch = np.empty(BLOCK_ROWS * SCRATCH_ROW, np.uint8)
    results = np.empty((2, most, BLOCK_ROWS), np.float32)
    for e in range(len(table)):
        entry = table[e]
        last = part_of(entry[ROWS], part + 1, parts)
        for first in range(part_of(entry[ROWS], part, parts), last, BLOCK_ROWS):
            count = min(BLOCK_ROWS, last - first)
            for begin in range(edges[e], edges[e + 1], TILE_LIMIT):
                n = min(TILE_LIMIT, edges[e + 1] - begin)
                for second in range(2 if entry[SECOND] else 1):
                    find_rows(entry, second, first, count, words, scales)
                    if columns % STEP:
                        copy_tails(fmt, columns, count, words, scales, tail, tail_words, tail_scales)
                    if n == 1:
                        multiply_one(
                            kernels, fmt, columns, count, words, scales, tail_words, tail_scales, x, offsets[begin], acc
                        )
                    else:
                        multiply_many(
                            kernels, fmt, columns, count, words, scales, tail_words, tail_scales, x,
                            offsets[begin : begin + n], acc, scratch,
                        )  # fmt: skip
                    finish(fmt, count, scales, n, acc, results[second])
                for m in range(n):
                    for j in range(count):
                        value = results[0, m, j]
                        if entry[SECOND]:
                            value = (value * sigmoid(value)) * results[1, m, j]
                        out[begin + m, first + j] = value


@jit(
    "void(int64[::1], int64, int64, int64[:,::1], int32[::1], int32[::1], float32[:,::1], float32[:,::1])",
    parallel=True,
)
def multiply(kernels, threads, fmt, table, matrix_of, row_of, x, out):  # type: ignore[no-untyped-def]
    """out[p] = the matrix table[matrix_of[p]] times x[row_of[p]]; matrix_of is non-decreasing.

    Where an entry has a second matrix, out[p] = silu(first) * second.
    """
    columns = x.shape[1]
    steps = (columns + STEP - 1) // STEP
    permuted = np.empty((steps, x.shape[0], STEP), np.float32)
    permute(x, WORD_COLUMNS[fmt], steps, permuted)
    edges = np.zeros(len(table) + 1, np.int64)
    offsets = np.empty(len(row_of), np.int64)
    for p in range(len(row_of)):
        edges[matrix_of[p] + 1] += 1
        offsets[p] = row_of[p] * np.int64(STEP_BYTES)
    for e in range(len(table)):
        edges[e + 1] += edges[e]
    parts = threads if out.size * columns > SERIAL_WORK else 1
    before = get_threads()
    set_threads(parts)
    for part in numba.prange(parts):
        work(part, parts, kernels.ctypes.data, fmt, columns, table, edges, offsets, permuted, out)
    set_threads(before)
