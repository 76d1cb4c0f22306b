"""Where the dense weights and the KV rows of the device's layers lie: the same arithmetic in both processes.

A slab is one buffer, at most ``slab_words`` words of 4 bytes; a place is a slab and a word in it. There are four kinds
of slabs: ``W`` stored matrices, ``S`` small things (norms, sinks, scales), ``K`` and ``V`` cached rows. A matrix that
is larger than a slab is cut between rows. A window layer's ring has room for a block beside the window, so that a
block's rows displace only what no later row sees: one that fails half way leaves the state as it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from mimo_vk.config import Config, LayerSpec
from mimo_vk.formats import FP8_BLOCK
from mimo_vk.ops import SinkReading
from mimo_vk.tensor_names import qkv_rows
from mimo_vk.vision_config import VisionConfig

ALIGN = 64  # words that places are multiples of
COLUMNS = {"fp8": 4, "int8": 4, "bf16": 2, "f32": 1}  # of a word
KINDS = ("W", "S", "K", "V")


def aligned(count: int, to: int = ALIGN) -> int:
    """The next multiple."""
    return -(-count // to) * to


def row_width(columns: int) -> int:
    """Floats of a row of activations: whole uvec4 of any format; what is past the last column stays zero."""
    return aligned(columns, 16)


@dataclass(frozen=True)
class TowerShape:
    """The picture tower on the device: ``patches`` of the largest picture that it is to have room for."""

    config: VisionConfig
    sink: SinkReading
    patches: int

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> TowerShape:
        """From ``asdict`` by way of JSON."""
        config = VisionConfig(**{**values["config"], "block_types": tuple(values["config"]["block_types"])})
        return cls(config, values["sink"], values["patches"])


@dataclass(frozen=True)
class DenseShape:
    """What both processes must know: the model's numbers, the layers that are to live on the device, and the sizes."""

    layers: tuple[LayerSpec, ...]
    head: bool
    hidden: int
    inner: int  # of a dense MLP
    vocab: int
    experts: int
    rope_dim: int
    qkv_chunks: int
    value_scale: float
    eps: float
    dense_bits: int
    ctx: int
    max_rows: int  # of a block
    saves: int  # snapshots of the rings that may be kept
    slab_words: int
    tower: TowerShape | None = None

    @classmethod
    def of(cls, config: Config, *, dense_bits: int, ctx: int, max_rows: int, saves: int, slab_words: int) -> DenseShape:
        """A shape with every layer and the head."""
        return cls(
            config.layers, True, config.hidden_size, config.intermediate_size, config.vocab_size,
            config.n_routed_experts, config.rope_dim, config.qkv_chunks, config.attention_value_scale,
            config.layernorm_epsilon, dense_bits, ctx, max_rows, saves, slab_words,
        )  # fmt: skip

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DenseShape:
        values = json.loads(text)
        names = [field.name for field in fields(LayerSpec)]
        values["layers"] = tuple(LayerSpec(*(spec[name] for name in names)) for spec in values["layers"])
        values["tower"] = values["tower"] and TowerShape.from_values(values["tower"])
        return cls(**values)

    def ring_rows(self, spec: LayerSpec) -> int:
        """Rows that a layer's cache has."""
        return self.ctx if spec.window is None else min(self.ctx, spec.window - 1 + self.max_rows)


@dataclass(frozen=True)
class Place:
    """Words of one slab."""

    kind: str
    slab: int
    at: int
    words: int


@dataclass(frozen=True)
class Part:
    """Rows of a matrix that lie together; ``scales`` are these rows' own, where the format has any."""

    first: int
    rows: int
    place: Place
    scales: Place | None


@dataclass(frozen=True)
class MatrixPlace:
    """A stored matrix [rows, columns]: each row ``items`` uvec4."""

    format: str
    rows: int
    columns: int
    parts: tuple[Part, ...]

    @property
    def items(self) -> int:
        return items_of(self.format, self.columns)

    @property
    def blocks(self) -> int:
        """FP8's blocks of columns."""
        return -(-self.columns // FP8_BLOCK)


def items_of(stored: str, columns: int) -> int:
    """uvec4 of a row."""
    return -(-columns // (4 * COLUMNS[stored]))


@dataclass(frozen=True)
class CachePlace:
    """A layer's cached rows: keys [kv, rows, head_dim], values [kv, rows, v_head_dim]; position p in row p mod rows."""

    keys: Place
    values: Place
    rows: int


@dataclass(frozen=True)
class LayerPlace:
    spec: LayerSpec
    input_norm: Place
    qkv: MatrixPlace
    sink: Place | None
    o_proj: MatrixPlace
    post_norm: Place
    gate: MatrixPlace | None  # of a dense MLP
    up: MatrixPlace | None
    down: MatrixPlace | None
    router: MatrixPlace | None
    cache: CachePlace


@dataclass(frozen=True)
class HeadPlace:
    norm: Place
    matrix: MatrixPlace


@dataclass(frozen=True)
class BiasedPlace:
    matrix: MatrixPlace
    bias: Place


@dataclass(frozen=True)
class TowerBlockPlace:
    kind: int
    norm1: Place
    q: BiasedPlace
    kv: BiasedPlace
    sinks: Place | None
    proj: BiasedPlace
    norm2: Place
    gate: BiasedPlace
    up: BiasedPlace
    down: BiasedPlace


@dataclass(frozen=True)
class TowerPlace:
    """``cache``: the keys and values of one block, patch j's in row j."""

    embed: MatrixPlace
    blocks: tuple[TowerBlockPlace, ...]
    norm: Place
    up: MatrixPlace
    down: MatrixPlace
    cache: CachePlace


class DenseLayout:
    """All places for a shape. ``slabs`` gives the words of each slab, by kind."""

    def __init__(self, shape: DenseShape) -> None:
        self.shape = shape
        self.slabs: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.layers = {spec.index: self._layer(spec) for spec in shape.layers}
        self.head = self._head() if shape.head else None
        self.tower = self._tower(shape.tower) if shape.tower else None

    @property
    def nbytes(self) -> int:
        """Of all slabs."""
        return 4 * sum(sum(sizes) for sizes in self.slabs.values())

    def _take(self, kind: str, words: int) -> Place:
        words = aligned(words)
        slabs = self.slabs[kind]
        if not slabs or slabs[-1] + words > self.shape.slab_words:
            slabs.append(0)
        slabs[-1] += words
        return Place(kind, len(slabs) - 1, slabs[-1] - words, words)

    def _matrix(self, stored: str, rows: int, columns: int) -> MatrixPlace:
        row_words = 4 * items_of(stored, columns)
        most = max(1, (self.shape.slab_words - ALIGN) // row_words)
        parts = []
        for first in range(0, rows, most):
            count = min(most, rows - first)
            place = self._take("W", count * row_words)
            parts.append(Part(first, count, place, self._scales(stored, count, rows, columns)))
        return MatrixPlace(stored, rows, columns, tuple(parts))

    def _scales(self, stored: str, count: int, rows: int, columns: int) -> Place | None:
        if stored == "int8":
            return self._take("S", count)
        if stored == "fp8":  # the scale row of each row, then the scales: at most a block's rows more for each chunk
            grid = (-(-rows // FP8_BLOCK) + self.shape.qkv_chunks) * -(-columns // FP8_BLOCK)
            return self._take("S", count + grid)
        return None

    def _dense(self, stored: str, rows: int, columns: int) -> MatrixPlace:
        return self._matrix({0: stored, 8: "int8", 32: "f32"}[self.shape.dense_bits], rows, columns)

    def _layer(self, spec: LayerSpec) -> LayerPlace:
        hidden, inner = self.shape.hidden, self.shape.inner
        return LayerPlace(
            spec,
            input_norm=self._take("S", hidden),
            qkv=self._dense("fp8", qkv_rows(spec), hidden),
            sink=self._take("S", spec.num_heads) if spec.has_sink else None,
            o_proj=self._dense("bf16", hidden, spec.num_heads * spec.v_head_dim),
            post_norm=self._take("S", hidden),
            gate=None if spec.moe else self._dense("fp8", inner, hidden),
            up=None if spec.moe else self._dense("fp8", inner, hidden),
            down=None if spec.moe else self._dense("fp8", hidden, inner),
            router=self._matrix("bf16", self.shape.experts, hidden) if spec.moe else None,
            cache=self._cache(spec),
        )

    def _cache(self, spec: LayerSpec) -> CachePlace:
        rows = self.shape.ring_rows(spec)
        keys = self._take("K", spec.num_kv_heads * rows * spec.head_dim)
        return CachePlace(keys, self._take("V", spec.num_kv_heads * rows * spec.v_head_dim), rows)

    def _head(self) -> HeadPlace:
        return HeadPlace(self._take("S", self.shape.hidden), self._dense("bf16", self.shape.vocab, self.shape.hidden))

    def _tower(self, tower: TowerShape) -> TowerPlace:
        config, kv_width = tower.config, tower.config.num_kv_heads * tower.config.head_dim
        joined = config.merge_unit * config.hidden_size
        keys, values = (self._take(kind, tower.patches * kv_width) for kind in ("K", "V"))
        return TowerPlace(
            embed=self._matrix("bf16", config.hidden_size, config.patch_values),
            blocks=tuple(self._tower_block(config, index) for index in range(len(config.block_types))),
            norm=self._take("S", config.hidden_size),
            up=self._matrix("bf16", joined, joined),
            down=self._matrix("bf16", config.out_hidden_size, joined),
            cache=CachePlace(keys, values, tower.patches),
        )

    def _tower_block(self, config: VisionConfig, index: int) -> TowerBlockPlace:
        hidden, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = (heads * config.head_dim for heads in (config.num_heads, 2 * config.num_kv_heads))
        return TowerBlockPlace(
            kind=config.block_types[index],
            norm1=self._take("S", hidden),
            q=self._biased(q_width, hidden),
            kv=self._biased(kv_width, hidden),
            sinks=self._take("S", config.num_heads) if config.sinks_in(index) else None,
            proj=self._biased(hidden, q_width),
            norm2=self._take("S", hidden),
            gate=self._biased(inner, hidden),
            up=self._biased(inner, hidden),
            down=self._biased(hidden, inner),
        )

    def _biased(self, rows: int, columns: int) -> BiasedPlace:
        return BiasedPlace(self._matrix("bf16", rows, columns), self._take("S", rows))
