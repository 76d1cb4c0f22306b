"""Matrix products for the compiled backend: the loops around the kernels of ``vector_kernels.py``.

One call is one parallel region. Thread t takes the t-th part of every matrix's rows, so that it reads one contiguous
range. No result depends on the threads, the blocks or the number of rows of x.
"""

from __future__ import annotations

import numba
import numpy as np

from cpu_fallback.compiled_elementary import sigmoid
from cpu_fallback.jit import jit
from cpu_fallback.threads import get_threads, set_threads
from cpu_fallback.vector_decode import (
    COLUMNS,
    FOLDED_X,
    FORMAT_FP8,
    FORMAT_FP8_FOLDED,
    FORMAT_INT8,
    GROUPS,
    LANES,
    LAYOUTS,
    STEP,
)
from cpu_fallback.vector_ir import WIDTH
from cpu_fallback.vector_kernels import (
    GROUP_BYTES,
    KIND_OF,
    PAIR,
    ROUND_BYTES,
    SCRATCH_BYTES,
    X_STEP_BYTES,
    copy_padded,
    decode,
    direct,
    load_float,
    load_int32,
    tile,
    tree,
)

BLOCK_ROWS = 32  # stored rows whose sums are finished together, all groups of lanes one after the other
DIRECT_ROWS = 2  # stored rows that share the loads of x; more of them meet in few sets of the first-level cache
DECODED_ROWS, DECODED_STEPS = 8, 4  # decoded at once: 10 KiB, which stay in a core's first-level cache
X_LIMIT = 64  # rows of x in a block
FEW = tuple(15 if layout.g <= 2 else 3 for layout in LAYOUTS.values())  # rows of x up to which ``direct`` is faster
ALL_GROUPS_LIMIT = 16  # rows of x whose lane sums, all groups, fit a core's first-level cache
SERIAL_WORK = 1 << 16  # multiplications below which waking threads costs more than it saves

# A matrix as the kernels see it is one row of an int64 table: the address of the codes and the bytes between rows, the
# same of the scales, the address of each row's scale row or 0, the rows; then codes and scales of a second matrix or 0.
CODES, CODES_STRIDE, SCALES, SCALES_STRIDE, SCALE_ROW, ROWS, SECOND = range(7)
ENTRY = SECOND + 4

WORD_COLUMNS = tuple(layout.g for layout in LAYOUTS.values())
CODE_BYTES = tuple(layout.step_bytes for layout in LAYOUTS.values())
SCALE_BYTES = tuple(layout.scale_bytes for layout in LAYOUTS.values())
SCALE_COLUMNS = tuple(layout.scale_columns for layout in LAYOUTS.values())
FOLDED_LOW, FOLDED_HIGH = np.float32(2.0**-96), np.float32(2.0**27)  # between these, folded products lose nothing
ZERO, ONE = np.float32(0), np.float32(1)


@jit()
def permute(x, g, factor, out):  # type: ignore[no-untyped-def]
    """x [n, K] times factor to out [groups, steps, n, columns of a lane, lanes of a group], zero padded."""
    n, columns = x.shape
    for s in range(out.shape[1]):
        for m in range(n):
            for i in range(STEP // g):
                t, q, lane = i // LANES, i % LANES // WIDTH, i % WIDTH
                for c in range(g):
                    k = s * STEP + i * g + c
                    out[q, s, m, t * g + c, lane] = x[m, k] * factor if k < columns else ZERO


@jit()
def can_fold(x):  # type: ignore[no-untyped-def]
    """Whether FORMAT_FP8_FOLDED gives x's products exactly: nothing in it is near a subnormal product or overflow."""
    outside = 0
    for value in x.ravel():
        size = abs(value)
        outside += not (((size >= FOLDED_LOW) & (size < FOLDED_HIGH)) | (size == ZERO))
    return outside == 0


@jit()
def find_rows(entry, second, first, count, words, scales):  # type: ignore[no-untyped-def]
    """Addresses of the codes and the scales of a block's rows from ``first``; past ``count`` the last one again."""
    codes, codes_stride = entry[CODES], entry[CODES_STRIDE]
    scale, scale_stride = entry[SCALES], entry[SCALES_STRIDE]
    if second:
        codes, codes_stride = entry[SECOND], entry[SECOND + 1]
        scale, scale_stride = entry[SECOND + 2], entry[SECOND + 3]
    for j in range(min(BLOCK_ROWS, count + PAIR)):
        row = first + min(j, count - 1)
        words[j] = codes + row * codes_stride
        scale_row = row if entry[SCALE_ROW] == 0 else load_int32(entry[SCALE_ROW] + 4 * row)
        scales[j] = scale + scale_row * scale_stride


@jit()
def copy_tails(fmt, columns, count, words, scales, tail, tail_words, tail_scales):  # type: ignore[no-untyped-def]
    """The last, partial step of the block's rows, zero padded: a kernel never reads past the end of a row."""
    steps = columns // STEP
    rest = columns - steps * STEP
    code_bytes, scale_bytes = CODE_BYTES[fmt], SCALE_BYTES[fmt]
    for j in range(min(BLOCK_ROWS, count + PAIR)):
        tail_words[j] = tail.ctypes.data + j * tail.shape[1]
        tail_scales[j] = tail_words[j] + code_bytes
        copy_padded(tail_words[j], words[j] + steps * code_bytes, rest * code_bytes // STEP, code_bytes)
        if scale_bytes:
            blocks = (rest + SCALE_COLUMNS[fmt] - 1) // SCALE_COLUMNS[fmt]
            size = blocks * (SCALE_COLUMNS[fmt] * scale_bytes // STEP)
            copy_padded(tail_scales[j], scales[j] + steps * scale_bytes, size, scale_bytes)


@jit()
def multiply_few(kernels, fmt, columns, count, pointers, x, offsets, acc):  # type: ignore[no-untyped-def]
    """Lane sums [count][n][32] of rows times n = len(offsets) rows of x, decoded in registers."""
    n = len(offsets)
    acc[: count * n * LANES] = 0
    full = columns // STEP
    x_step = x.shape[2] * X_STEP_BYTES
    x_group = x.shape[1] * x_step
    start, acc_row = x.ctypes.data, n * ROUND_BYTES
    for j in range(0, count, DIRECT_ROWS):
        rows = min(DIRECT_ROWS, count - j)
        m = 0
        while m < n:
            width = 4 if n - m >= 4 else min(2, n - m)
            at = offsets[m:].ctypes.data
            sums = acc.ctypes.data + (j * n + m) * ROUND_BYTES
            words, scales = pointers[0, j:].ctypes.data, pointers[1, j:].ctypes.data
            direct(kernels, fmt, width, words, scales, rows, 0, full, start, x_step, x_group, at, sums, acc_row)
            if columns > full * STEP:
                tail = start + full * x_step
                words, scales = pointers[2, j:].ctypes.data, pointers[3, j:].ctypes.data
                direct(kernels, fmt, width, words, scales, rows, 0, 1, tail, x_step, x_group, at, sums, acc_row)
            m += width


@jit()
def multiply_decoded(kernels, fmt, rows, steps, x, x_step, offsets, acc, scratch):  # type: ignore[no-untyped-def]
    """Decoded rows times all rows of x, for one group of lanes: acc is the address of its lane sums [rows][n][8]."""
    n = len(offsets)
    m = 0
    while m < n:
        width = 4 if n - m >= 4 else (2 if n - m >= 2 else 1)
        x_offsets = offsets.ctypes.data + 8 * m
        sums = acc + m * GROUP_BYTES
        tile(kernels, KIND_OF[fmt], width, scratch, rows, steps, x, x_step, x_offsets, sums, n * GROUP_BYTES)
        m += width


@jit()
def multiply_group(kernels, fmt, columns, q, j, rows, first, pointers, x, offsets, acc, scratch):  # type: ignore[no-untyped-def]
    """Some steps from ``first`` of ``rows`` rows from the block's j-th, for group q of the lanes."""
    full = columns // STEP
    x_step = x.shape[2] * X_STEP_BYTES
    start = x.ctypes.data + (q * x.shape[1] + first) * x_step
    sums = acc.ctypes.data + (q * BLOCK_ROWS + j) * len(offsets) * GROUP_BYTES
    buffer = scratch.ctypes.data
    if first < full:
        steps = min(DECODED_STEPS, full - first)
        decode(kernels, fmt, pointers[0, j:].ctypes.data, pointers[1, j:].ctypes.data, rows, first, steps, q, buffer)
    else:
        steps = 1
        decode(kernels, fmt, pointers[2, j:].ctypes.data, pointers[3, j:].ctypes.data, rows, 0, 1, q, buffer)
    multiply_decoded(kernels, fmt, rows, steps, start, x_step, offsets, sums, buffer)


@jit()
def multiply_many(kernels, fmt, columns, count, pointers, x, offsets, acc, scratch):  # type: ignore[no-untyped-def]
    """Lane sums [group][32 rows][n][8] of ``count`` rows times n = len(offsets) rows of x.

    With few rows of x, reading the codes costs most: all groups of a few steps while those are in the nearest cache.
    With many, x and the sums do: one group of all steps, so that its sums stay there.
    """
    n = len(offsets)
    acc[: GROUPS * BLOCK_ROWS * n * WIDTH] = 0
    full = columns // STEP
    starts = (full + DECODED_STEPS - 1) // DECODED_STEPS + (1 if columns > full * STEP else 0)
    for outer in range(1 if n <= ALL_GROUPS_LIMIT else GROUPS):
        for j in range(0, count, DECODED_ROWS):
            rows = (min(DECODED_ROWS, count - j) + PAIR - 1) // PAIR * PAIR
            for i in range(starts):
                first = min(i * DECODED_STEPS, full)
                for inner in range(GROUPS if n <= ALL_GROUPS_LIMIT else 1):
                    q = outer + inner
                    multiply_group(kernels, fmt, columns, q, j, rows, first, pointers, x, offsets, acc, scratch)


@jit()
def finish(fmt, count, n, scales, acc, product_bytes, group_bytes, result):  # type: ignore[no-untyped-def]
    """The lane sums to result [n, 32]: product (j, m) has its groups at (j*n + m)*product_bytes, group_bytes apart."""
    for j in range(count):
        for m in range(n):
            total = tree(acc.ctypes.data + (j * n + m) * product_bytes, group_bytes)
            result[m, j] = total * load_float(scales[j]) if fmt == FORMAT_INT8 else total


@jit()
def store_block(result, count, n, paired, out, begin, first):  # type: ignore[no-untyped-def]
    """result [1 or 2, n, 32] to rows begin.. and columns first.. of out; two are joined as silu(first) * second."""
    for m in range(n):
        for j in range(count):
            value = result[0, m, j]
            if paired:
                value = (value * sigmoid(value)) * result[1, m, j]
            out[begin + m, first + j] = value


@jit()
def part_of(count, part, parts):  # type: ignore[no-untyped-def]
    """Where the part begins when ``count`` rows are cut into parts of whole groups of DIRECT_ROWS."""
    blocks = (count + DIRECT_ROWS - 1) // DIRECT_ROWS
    return min(count, blocks * part // parts * DIRECT_ROWS)


@jit()
def work(part, parts, kernels, fmt, columns, table, edges, offsets, x, out):  # type: ignore[no-untyped-def]
    """One thread's share: its rows of every matrix of the table, times the matrix's rows of x."""
    most = 1
    for e in range(len(table)):
        most = max(most, min(X_LIMIT, edges[e + 1] - edges[e]))
    pointers = np.empty((4, BLOCK_ROWS), np.int64)  # codes and scales of the rows, then those of their tails
    tail = np.empty((BLOCK_ROWS, CODE_BYTES[fmt] + SCALE_BYTES[fmt] if columns % STEP else 0), np.uint8)
    acc = np.empty(BLOCK_ROWS * most * LANES, np.float32)
    scratch = np.empty(DECODED_STEPS * DECODED_ROWS * SCRATCH_BYTES if most > FEW[fmt] else 0, np.uint8)
    results = np.empty((2, most, BLOCK_ROWS), np.float32)
    for e in range(len(table)):
        entry = table[e]
        paired = entry[SECOND] != 0
        last = part_of(entry[ROWS], part + 1, parts)
        for begin in range(edges[e], edges[e + 1], X_LIMIT):
            n = min(X_LIMIT, edges[e + 1] - begin)
            for first in range(part_of(entry[ROWS], part, parts), last, BLOCK_ROWS):
                count = min(BLOCK_ROWS, last - first)
                for second in range(2 if paired else 1):
                    find_rows(entry, second, first, count, pointers[0], pointers[1])
                    if columns % STEP:
                        copy_tails(fmt, columns, count, pointers[0], pointers[1], tail, pointers[2], pointers[3])
                    rows = offsets[begin : begin + n]
                    if n <= FEW[fmt]:
                        multiply_few(kernels, fmt, columns, count, pointers, x, rows, acc)
                        finish(fmt, count, n, pointers[1], acc, ROUND_BYTES, GROUP_BYTES, results[second])
                    else:
                        multiply_many(kernels, fmt, columns, count, pointers, x, rows, acc, scratch)
                        apart = BLOCK_ROWS * n * GROUP_BYTES
                        finish(fmt, count, n, pointers[1], acc, GROUP_BYTES, apart, results[second])
                store_block(results, count, n, paired, out, begin, first)


@jit()
def prepare(fmt, table, matrix_of, row_of, x, permuted):  # type: ignore[no-untyped-def]
    """x permuted; the format to use; where the pairs of each matrix begin; each pair's offset in a step of x."""
    factor = ONE
    if fmt == FORMAT_FP8_FOLDED:
        if len(row_of) == 1 and can_fold(x):
            factor = np.float32(FOLDED_X)
        else:
            fmt = FORMAT_FP8
    permute(x, WORD_COLUMNS[fmt], factor, permuted)
    edges = np.zeros(len(table) + 1, np.int64)
    offsets = np.empty(len(row_of), np.int64)
    for p in range(len(row_of)):
        edges[matrix_of[p] + 1] += 1
        offsets[p] = row_of[p] * np.int64(X_STEP_BYTES)
    for e in range(len(table)):
        edges[e + 1] += edges[e]
    return fmt, edges, offsets


@jit(
    "void(int64[::1], int64, int64, int64[:,::1], int32[::1], int32[::1], float32[:,::1], float32[:,::1])",
    parallel=True,
)
def multiply(kernels, threads, fmt, table, matrix_of, row_of, x, out):  # type: ignore[no-untyped-def]
    """out[p] = the matrix table[matrix_of[p]] times x[row_of[p]]; matrix_of is non-decreasing.

    Where an entry has a second matrix, out[p] = silu(first) * second. Nothing here but the last loop may look to numba
    like an array operation: it would become a parallel region of its own.
    """
    columns = x.shape[1]
    permuted = np.empty((GROUPS, (columns + STEP - 1) // STEP, x.shape[0], COLUMNS, WIDTH), np.float32)
    chosen, edges, offsets = prepare(fmt, table, matrix_of, row_of, x, permuted)
    parts = threads if out.size * columns > SERIAL_WORK else 1
    before = get_threads()
    set_threads(parts)
    for part in numba.prange(parts):
        work(part, parts, kernels.ctypes.data, chosen, columns, table, edges, offsets, permuted, out)
    set_threads(before)
