"""The stored number formats, stated once in numpy: MXFP4, FP8 e4m3, BF16, int8, float32.

A matrix is [N, K]: N outputs (rows), K inputs (columns). Its arrays are C-contiguous along a row and are
never modified; they may be views of mapped files. How a product with one is added up is the contract
in ``mimo_vk/ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

FP8_BLOCK = 128  # columns that share one FP8 scale
MXFP4_BLOCK = 32  # columns that share one MXFP4 scale


@dataclass(frozen=True, eq=False)
class MatrixF32:
    """float32 weights, [N, K]."""

    data: F32

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixBF16:
    """bfloat16 weights as their 16 bits, uint16 [N, K]."""

    data: NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixInt8:
    """int8 codes [N, K] with one float32 scale per row, [N]."""

    codes: NDArray[np.int8]
    scales: F32

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixFP8:
    """FP8 e4m3fn codes [N, K], float32 scales [S, ceil(K/128)], and the scale row of each row, int32 [N].

    The scale rows are listed because the fused qkv restarts its grid at each chunk.
    """

    codes: U8
    scales: F32
    scale_row: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, eq=False)
class MatrixMXFP4:
    """MXFP4: packed e2m1 codes [N, K/2] (column 2k in the low nibble of byte k) and e8m0 scales [N, K/32]."""

    codes: U8
    scales: U8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2


DenseMatrix = MatrixF32 | MatrixBF16 | MatrixInt8 | MatrixFP8
Matrix = DenseMatrix | MatrixMXFP4


@dataclass(frozen=True, eq=False)
class Expert:
    """One routed expert: gate and up are [I, H], down is [H, I], all MXFP4."""

    gate: MatrixMXFP4
    up: MatrixMXFP4
    down: MatrixMXFP4
