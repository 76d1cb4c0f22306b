"""The device's products with FP8, bfloat16, int8 and float32 matrices have the bytes of the numpy backend."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk.formats import F32, Matrix, MatrixFP8
from mimo_vk.tensor_names import qkv_scale_row
from mimo_vk.vulkan.device import Device
from tests.matrices import random_matrix, random_x
from tests.vulkan_dense import UNTOUCHED, Runner, linear_push, padded_rows, row_width, stored
from tests.vulkan_device import assert_same_bits, software_device

pytestmark = pytest.mark.bits

KINDS = ("f32", "bf16", "int8", "fp8")
TILES = ((1, 1), (1, 2), (4, 4))  # rows of x and of the matrix that an octet takes
W_AT, S_AT, Y_AT = 8, 5, 3
REFERENCE = ReferenceOps()


class Products:
    """One pipeline for each format and tile."""

    def __init__(self) -> None:
        self.device = Device(software_device())
        self.get = functools.cache(self._make)

    def _make(self, kind: str, tile: tuple[int, int], select: int, scale: int) -> Runner:
        kernel = stored(random_matrix(np.random.default_rng(0), kind, 1, 4))[0]
        constants = {"ROWS": tile[0], "OUTPUTS": tile[1], "SELECT_DECODE": select}
        words = {"X": 1 << 17, "W": 1 << 17, "S": 1 << 13, "Y": 1 << 14}
        return Runner(
            self.device,
            kernel,
            {name: scale * words[name] for name in kernel.bindings[1:]},
            ["Y"],
            constants={name: constants[name] for name in kernel.constants},
        )

    def check(self, kind: str, matrix: Matrix, x: F32, tile: tuple[int, int], select: int = 0, scale: int = 1) -> None:
        """Equal bits in the window; nothing else is written."""
        _, words, scales = stored(matrix)
        n, rows = matrix.shape[0], len(x)
        stride = n + 7
        push = linear_push(matrix, words, w_at=W_AT, y_stride=stride, y_at=Y_AT, s_at=S_AT)
        inputs = {
            "X": padded_rows(x, row_width(x.shape[1])),
            "W": np.concatenate([np.zeros(W_AT, np.uint32), words.ravel()]),
        }
        if len(scales):
            inputs["S"] = np.concatenate([np.zeros(S_AT, np.uint32), scales])
        (out,) = self.get(kind, tile, select, scale).run(rows, 0, 0, push, **inputs)
        found = out[: rows * stride].reshape(rows, stride)
        assert_same_bits(found[:, Y_AT : Y_AT + n], REFERENCE.linear(matrix, x))
        rest = found[:, :Y_AT], found[:, Y_AT + n :], out[rows * stride :]
        assert all((part == UNTOUCHED).all() for part in rest)


@pytest.fixture(scope="module")
def products() -> Iterator[Products]:
    products = Products()
    yield products
    products.device.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shapes(products: Products, kind: str, tile: tuple[int, int]) -> None:
    for n in (1, 7, 130):
        rng = np.random.default_rng(n)
        for k in (5, 32, 33, 96, 131, 256, 544):
            matrix = random_matrix(rng, kind, n, k)
            for rows in (1, 3, 64) if n < 100 else (2, 7):
                products.check(kind, matrix, random_x(rng, rows, k), tile)


def test_every_code_of_fp8(products: Products) -> None:
    """Each code in each place of a word, under scales down to subnormal ones, and both ways of decoding."""
    codes = np.zeros((254 * 4, 4), np.uint8)
    values = [code for code in range(256) if code & 0x7F != 0x7F]
    for row, (i, column) in enumerate(np.ndindex(254, 4)):
        codes[row, column] = values[i]
    for scale in (1.0, 3e-39, 1e-45, 2.0**-126, 1.7e38, -0.5):
        matrix = MatrixFP8(codes, np.full((1, 1), scale, np.float32), np.zeros(len(codes), np.int32))
        for value in (1.2345678, 1e-30, 3e38, 2e-45):
            for select in (0, 1):
                products.check("fp8", matrix, np.full((1, 4), value, np.float32), (1, 2), select)


EXTREMES = {
    "zero": [0.0, -0.0],
    "subnormal": [1e-45, -3e-42, 1e-39],
    "huge": [3e38, -2e38, 1e37],
    "wide": [1e30, 1e-30, 1.0, -1e30],
    "infinite": [np.inf, 1.0, -1.0, 0.0],
    "both infinities": [np.inf, -np.inf, 1.0],
    "nan": [np.nan, 1.0, 0.0],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(products: Products, kind: str, name: str) -> None:
    """A few numbers of that sort among ordinary ones, and rows made of them alone."""
    rng = np.random.default_rng(5)
    matrix = random_matrix(rng, kind, 40, 416)
    for rows, tile in ((1, (1, 2)), (5, (4, 4))):
        alone = rng.choice(np.array(EXTREMES[name], np.float32), (rows, 416))
        products.check(kind, matrix, alone, tile)
        few = np.where(rng.random((rows, 416)) < 0.01, alone, random_x(rng, rows, 416))
        products.check(kind, matrix, few, tile)


def test_a_grid_that_restarts_at_each_chunk(products: Products) -> None:
    """4 chunks of 144 rows: 2 rows of scales each, where one grid over 576 rows has 5."""
    rng = np.random.default_rng(9)
    for scale_rows in (8, 5):
        codes = rng.integers(0, 0x7F, (576, 160), dtype=np.uint8)
        scales = rng.uniform(0.001, 0.1, (scale_rows, 2)).astype(np.float32)
        matrix = MatrixFP8(codes, scales, qkv_scale_row(576, scale_rows, 4))
        products.check("fp8", matrix, random_x(rng, 3, 160), (4, 4))


@pytest.mark.parametrize(("kind", "k"), [("fp8", 4096), ("bf16", 8192), ("int8", 16384), ("f32", 4096)])
def test_flash_rows(products: Products, kind: str, k: int) -> None:
    """Some rows of the release's qkv, o_proj and down: whole rows, as the order of addition runs along them."""
    rng = np.random.default_rng(k)
    matrix = random_matrix(rng, kind, 40, k)
    for rows, tile in ((1, (1, 2)), (5, (4, 4))):
        products.check(kind, matrix, random_x(rng, rows, k), tile, scale=4)
