"""One dense kernel at a time on the software device, from numpy arrays to numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_vk.formats import F32, FP8_BLOCK, Matrix, MatrixBF16, MatrixF32, MatrixFP8, MatrixInt8
from mimo_vk.vulkan.device import Device, Program, view
from mimo_vk.vulkan.kernels import LINEAR_BF16, LINEAR_F32, LINEAR_FP8, LINEAR_INT8, Kernel

UNTOUCHED = np.float32(-77.25)  # what outputs hold before a run
KEYS_AT, VALUES_AT, SINKS_AT = 7, 11, 3  # where attention finds them: floats of the keys, the values and the slab


class Runner:
    """A kernel bound to tensors of so many words; each run fills them and has push constants of its own.

    ``writes`` names the bindings that are outputs; one pipeline serves all runs, as each costs a compilation.
    """

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        words: dict[str, int],
        writes: Sequence[str],
        groups: tuple[int, int, int] = (3, 2, 1),
        constants: dict[str, int] | None = None,
    ) -> None:
        assert tuple(words) == kernel.bindings[1:], (tuple(words), kernel.bindings)
        self.patches = 0  # of the picture, for the kernels that ask
        self._device = device
        self._tensors: dict[str, Any] = {"Step": device.host(4, np.uint32)}
        for name, count in words.items():
            self._tensors[name] = device.device(count) if name in writes else device.host(count, np.uint32)
        self._writes = [self._tensors[name] for name in writes]
        self._pipeline = device.pipeline(
            kernel, list(self._tensors.values()), groups, dict.fromkeys(kernel.push, 0), constants
        )

    def run(self, rows: int, start: int, first: int, push: dict[str, int], **inputs: NDArray[Any]) -> list[F32]:
        """The outputs, whole, in the order of ``writes``. Inputs are given by binding; unused ones keep their words."""
        view(self._tensors["Step"])[:] = [rows, start, first, self.patches]
        for name, array in inputs.items():
            words = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
            view(self._tensors[name])[: len(words)] = words
        for tensor in self._writes:
            view(tensor)[:] = UNTOUCHED
        self._device.upload(self._writes).eval()
        Program(self._device).dispatch(self._pipeline, self._writes, push).run()
        return [view(tensor).copy() for tensor in self._writes]


def row_width(columns: int) -> int:
    """Floats of a row of activations: whole uvec4 of any format."""
    return -(-columns // 16) * 16


def padded_rows(x: F32, width: int) -> F32:
    """x [n, columns] with zeros up to ``width``."""
    out = np.zeros((len(x), width), np.float32)
    out[:, : x.shape[1]] = x
    return out


def bits(value: float | np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def behind(floats: int, array: F32 | None) -> F32:
    """The array's numbers from that place on; none for None."""
    start = np.zeros(floats, np.float32)
    return start if array is None else np.append(start, array)


def attention_push(kernel: Kernel, q: F32, v: F32, cache_rows: int, sink: F32 | None, **seen: int) -> dict[str, int]:
    """An attention kernel's constants; ``seen``: those that say what is visible. q [n, heads, hd], v [n, kv, vd]."""
    (heads, head_dim), (kv, v_dim) = q.shape[1:], v.shape[1:]
    values = {
        "heads": heads, "kv_heads": kv, "head_dim": head_dim, "v_dim": v_dim, "out_stride": row_width(heads * v_dim),
        "cache_rows": cache_rows, "keys_at": KEYS_AT, "values_at": VALUES_AT, "has_sink": int(sink is not None),
        "sinks_at": SINKS_AT, "scale_bits": bits(np.float32(head_dim**-0.5)), **seen,
    }  # fmt: skip
    return {name: values[name] for name in kernel.push}


def stored(matrix: Matrix) -> tuple[Kernel, NDArray[np.uint32], NDArray[np.uint32]]:
    """The kernel of its format, its rows in whole uvec4, and its words in the slab of scales."""
    none = np.zeros(0, np.uint32)
    match matrix:
        case MatrixF32(data):
            return LINEAR_F32, packed(data), none
        case MatrixBF16(data):
            return LINEAR_BF16, packed(data), none
        case MatrixInt8(codes, scales):
            return LINEAR_INT8, packed(codes), scales.view(np.uint32)
        case MatrixFP8(codes, scales, scale_row):
            words = scale_row.view(np.uint32), np.ascontiguousarray(scales).reshape(-1).view(np.uint32)
            return LINEAR_FP8, packed(codes), np.concatenate(words)
    raise AssertionError("MXFP4 is the experts' format")


def packed(rows: NDArray[Any]) -> NDArray[np.uint32]:
    """[N, words]: each row with zeros up to whole uvec4."""
    each = 16 // rows.itemsize
    out = np.zeros((len(rows), -(-rows.shape[1] // each) * each), rows.dtype)
    out[:, : rows.shape[1]] = rows
    return out.view(np.uint32)


def linear_push(matrix: Matrix, words: NDArray[np.uint32], **places: int) -> dict[str, int]:
    """The constants of a matrix's kernel; ``places``: w_at, y_stride, y_at, s_at."""
    kernel, (n, k) = stored(matrix)[0], matrix.shape
    values = {"n": n, "items": words.shape[1] // 4, "x_stride": row_width(k), "blocks": -(-k // FP8_BLOCK), **places}
    return {name: values[name] for name in kernel.push}
