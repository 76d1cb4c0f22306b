"""What stands in each tensor. Weights are scaled so that activations stay near 1 through all layers.

``exact``: every number drawn for its place. ``tiled``: large tensors repeat a block of random codes from a different
start each (for speed; the values mean as little). ``sparse``: only what decides the route through the model is
written, the rest is a hole that reads as zeros.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from tools.checkpoint import numbers
from tools.checkpoint.geometry import Geometry
from tools.checkpoint.layout import BLOCK, TensorSpec, blocks
from tools.checkpoint.numbers import F64, U8

Piece = tuple[int, bytes]  # offset inside the tensor, bytes
TILE = 8_388_593  # a prime: rows of one tensor, and equal tensors, start at different places of the tile
SMALL = 1 << 16  # a tensor of at most this many bytes is drawn for its place even where others are tiled
SPARSE_ROWS = 1024  # rows of the embedding and the head that a sparse checkpoint has
ROUTE_PARTS = ("norm.weight", "layernorm.weight", "mlp.gate.weight", "e_score_correction_bias", "attention_sink_bias")


def spread(spec: TensorSpec) -> tuple[float, float]:
    """(mean, standard deviation) of a BF16 or F32 tensor."""
    name = spec.name
    if name.endswith((".input_layernorm.weight", ".post_attention_layernorm.weight", "norm.weight", "ln_q.weight")):
        return 1.0, 0.2
    if name.endswith(("norm1.weight", "norm2.weight")):
        return 1.0, 0.2
    if name.endswith(("attention_sink_bias", "attn.sinks")):
        return 0.0, 2.0
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.15
    if name == "model.embed_tokens.weight":
        return 0.0, 0.5
    if name.endswith(".bias"):
        return 0.0, 0.05
    return 0.0, 1.5 / math.sqrt(math.prod(spec.shape[1:]))


class Contents:
    """Bytes of a geometry's tensors, in pieces; a tensor without pieces is all hole."""

    def __init__(self, g: Geometry, seed: int) -> None:
        self._g = g
        self._seed = seed
        self._scales: dict[str, bytes] = {}  # FP8 scales, made with their codes, until their turn comes
        self._tiles: dict[str, bytes] = {}

    def pieces(self, spec: TensorSpec) -> Iterator[Piece]:
        if self._g.contents == "sparse":
            yield from self._sparse(spec)
        elif spec.dtype == "F8_E4M3":
            yield from self._fp8_tiled(spec) if self._g.contents == "tiled" else self._fp8_exact(spec)
        elif spec.name in self._scales:
            yield 0, self._scales.pop(spec.name)
        elif self._g.contents == "tiled" and spec.nbytes > SMALL:
            yield from self._tiled(spec)
        else:
            yield 0, self._exact(spec)

    # exact

    def _exact(self, spec: TensorSpec) -> bytes:
        if spec.dtype == "U8" and spec.name.endswith("_scale"):
            return self._mx_scales(spec).tobytes()
        if spec.dtype == "U8":
            return numbers.random_bytes(self._seed, spec.name, spec.nbytes).tobytes()
        x = self._gaussian(spec)
        return x.astype("<f4").tobytes() if spec.dtype == "F32" else numbers.bf16(x).tobytes()

    def _mx_scales(self, spec: TensorSpec) -> U8:
        # a larger down makes up for what silu and the mean over experts take away
        gain = 4.0 if ".down_proj." in spec.name else 1.5
        return numbers.mxfp4_scales(self._seed, spec.name, spec.shape, gain)

    def _gaussian(self, spec: TensorSpec) -> F64:
        mean, std = spread(spec)
        x = numbers.gaussian(self._seed, spec.name, spec.shape, std) + mean
        if spec.name == "lm_head.weight":
            # Rows past the tokenizer would win most draws: an engine that forgets to mask them is seen at once.
            x[self._g.base_tokens + 32 :] *= 2.0
        return x

    def _fp8_exact(self, spec: TensorSpec) -> Iterator[Piece]:
        chunk_rows = self._chunk_rows(spec)
        x = numbers.gaussian(self._seed, spec.name, spec.shape, 1.5 / math.sqrt(spec.shape[1]))
        parts = []
        for i in range(spec.shape[0] // chunk_rows):
            part = x[i * chunk_rows : (i + 1) * chunk_rows]
            parts.append(numbers.fp8_blocks(part * self._cell_factors(f"{spec.name}/{i}", part.shape)))
        self._scales[f"{spec.name}_scale_inv"] = b"".join(scales.tobytes() for _, scales in parts)
        yield 0, b"".join(codes.tobytes() for codes, _ in parts)

    def _cell_factors(self, name: str, shape: tuple[int, ...]) -> F64:
        """0.5 to 1.5 per scale cell: with equal cells a wrong scale grid would hardly show."""
        grid = blocks(shape[0]), blocks(shape[1])
        factor = (64.0 + (numbers.random_bytes(self._seed, name, grid[0] * grid[1]) & 127)) / 128.0
        wide = np.repeat(np.repeat(factor.reshape(grid), BLOCK, axis=0), BLOCK, axis=1)
        return wide[: shape[0], : shape[1]]

    def _chunk_rows(self, spec: TensorSpec) -> int:
        if ".qkv_proj." not in spec.name:
            return spec.shape[0]
        return spec.shape[0] // self._g.chunks

    # tiled

    def _tile(self, key: str, make: Callable[[], bytes]) -> bytes:
        if key not in self._tiles:
            self._tiles[key] = make()
        return self._tiles[key]

    def _tiled(self, spec: TensorSpec) -> Iterator[Piece]:
        tile, item = self._tile_of(spec), 1 if spec.dtype == "U8" else 2
        start = zlib.crc32(spec.name.encode()) % TILE * item % len(tile)
        done = 0
        while done < spec.nbytes:
            part = tile[start : start + spec.nbytes - done]
            yield done, part
            done += len(part)
            start = 0

    def _tile_of(self, spec: TensorSpec) -> bytes:
        if spec.dtype == "U8" and not spec.name.endswith("_scale"):
            return self._tile("codes", lambda: numbers.random_bytes(self._seed, "codes", TILE).tobytes())
        if spec.dtype == "U8":
            kind = spec.name.rsplit(".", 2)[1]
            whole = TensorSpec(f"tile.{kind}.weight_scale", "U8", (TILE // spec.shape[1], spec.shape[1]))
            return self._tile(kind, lambda: self._mx_scales(whole).tobytes())
        mean, std = spread(spec)
        assert mean == 0.0 and spec.dtype == "BF16", spec
        count = TILE // 2 - 2  # 4194294: no divisor of it is a row's length
        make = lambda: numbers.bf16(numbers.gaussian(self._seed, "tile", (count,), std)).tobytes()  # noqa: E731
        return self._tile(f"bf16 {std}", make)

    def _fp8_tiled(self, spec: TensorSpec) -> Iterator[Piece]:
        rows, cols = spec.shape
        block = self._fp8_block(cols)
        chunk_rows = self._chunk_rows(spec)
        grid = rows // chunk_rows * blocks(chunk_rows), blocks(cols)
        middle = 1.5 / math.sqrt(cols) / 129.0  # 129: about the rms of the codes, 448 / 3.46
        factor = (64.0 + (numbers.random_bytes(self._seed, spec.name, grid[0] * grid[1]) & 127)) / 128.0
        self._scales[f"{spec.name}_scale_inv"] = (factor * middle).astype("<f4").tobytes()
        for first in range(0, rows, chunk_rows):
            for row in range(0, chunk_rows, BLOCK):
                turn = BLOCK * ((first + row) // BLOCK % grid[1])
                part = np.roll(block, turn, axis=1)[: min(BLOCK, chunk_rows - row)]
                yield (first + row) * cols, part.tobytes()

    def _fp8_block(self, cols: int) -> U8:
        """[128, cols] codes whose first row alone gives each 128 columns a code of 448: true of a cut block too."""
        x = numbers.gaussian(self._seed, f"fp8 {cols}", (BLOCK, cols), 1.0)
        tile = self._tile(f"fp8 {cols}", lambda: numbers.fp8_blocks(x)[0].tobytes())
        block = np.frombuffer(tile, np.uint8).reshape(BLOCK, cols).copy()
        block[0, ::BLOCK] = 0x7E
        return block

    # sparse

    def _sparse(self, spec: TensorSpec) -> Iterator[Piece]:
        if spec.name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield from self._some_rows(spec)
        elif spec.name.startswith("model.") and spec.name.endswith(ROUTE_PARTS):
            yield from self._tiled(spec) if spec.nbytes > SMALL else [(0, self._exact(spec))]

    def _some_rows(self, spec: TensorSpec) -> Iterator[Piece]:
        row_bytes = spec.nbytes // spec.shape[0]
        first = TensorSpec(spec.name, spec.dtype, (SPARSE_ROWS, spec.shape[1]))
        yield 0, self._exact(first)
        if spec.name == "model.embed_tokens.weight":  # the control tokens' rows, which any chat prompt needs
            control = TensorSpec(f"{spec.name}/control", spec.dtype, (32, spec.shape[1]))
            x = numbers.gaussian(self._seed, control.name, control.shape, spread(spec)[1])
            yield self._g.base_tokens * row_bytes, numbers.bf16(x).tobytes()
