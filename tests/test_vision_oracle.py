"""The picture tower against the same tower written a second time in torch, and what breaks the agreement.

The rows are those of tools/vision_oracle.py for the tiny checkpoint, seed 0: float32, and at most 1e-6 of their range
from the same computation in float64. The pictures are in tools/vision_cases.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_fallback.compiled import CompiledOps
from mimo_vk import vision
from mimo_vk.checkpoint import Checkpoint
from mimo_vk.config import load_config
from mimo_vk.formats import F32, MatrixBF16
from mimo_vk.image import Patches
from mimo_vk.ops import Index, SinkReading
from mimo_vk.vision import Angles, VisionTower
from mimo_vk.vision_config import COLUMNS, VisionConfig
from mimo_vk.vision_weights import BiasedMatrix, VisionBlock, VisionWeights
from mimo_vk.weights import load_weights
from tools.vision_cases import CASES, SINKS, Case

TOLERANCE = 1e-5  # of the rows' range
VISIBLE = 5e-5  # what a fault must change at least; all but that of the GELU change a thousand times the tolerance
BY_NAME = {case.name: case for case in CASES}
OTHER: dict[SinkReading, SinkReading] = {"key0": "denominator", "denominator": "key0"}
References = dict[tuple[str, str], F32]


@pytest.fixture(scope="module")
def references(project_root: Path) -> References:
    with np.load(project_root / "tests" / "reference" / "vision.npz") as saved:
        return {(case.name, sink): saved[f"rows_{case.name}_{sink}"] for case in CASES for sink in SINKS}


@pytest.fixture(scope="module")
def towers(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionWeights]:
    """The tower for each case: of the same tensors, under a config.json with the case's settings."""
    stored, towers = Checkpoint.open(tiny_checkpoint), {}
    for case in CASES:
        config = json.loads((tiny_checkpoint / "config.json").read_text("utf-8"))
        config["vision_config"] |= case.settings
        path = tmp_path_factory.mktemp(case.name) / "config.json"
        path.write_text(json.dumps(config), "utf-8")
        weights = load_weights(stored, load_config(path)[0]).vision
        assert weights is not None
        towers[case.name] = weights
    return towers


def rows_of(tower: VisionTower, case: Case) -> F32:
    return tower.forward(Patches(case.pixels(), case.grid, tower.weights.config.merge_size))


def largest_difference(got: F32, reference: F32) -> float:
    """Relative to the range of the rows; NaN counts as infinitely far."""
    assert got.shape == reference.shape
    return float(np.nan_to_num(np.abs(got - reference), nan=np.inf).max() / np.ptp(reference))


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_agrees(
    towers: dict[str, VisionWeights], references: References, case: Case, sink: SinkReading
) -> None:
    got, reference = rows_of(VisionTower(towers[case.name], CompiledOps(1), sink), case), references[case.name, sink]
    assert got.dtype == reference.dtype == np.float32 and reference.shape == (case.tokens, 256)
    assert largest_difference(got, reference) < TOLERANCE


def test_the_reference_can_tell_rows_and_pictures_apart(references: References) -> None:
    """Otherwise agreement would mean little: all rows differ from each other by much more than the tolerance."""
    rows = np.concatenate([references[name, "key0"] for name in ("unit", "columns", "leaving")])
    apart = np.abs(rows[:, None] - rows[None]).max(axis=2)
    np.fill_diagonal(apart, math.inf)
    assert apart.min() > 1.0 and np.ptp(rows) < 20


# What is wrong must be seen. Each fault makes one thing in our tower wrong, as a plausible misreading would.

Fault = Callable[[VisionWeights, SinkReading, pytest.MonkeyPatch], VisionTower]


def with_config(**changes: Any) -> Fault:
    def faulty(weights: VisionWeights, sink: SinkReading, _: pytest.MonkeyPatch) -> VisionTower:
        return VisionTower(replace(weights, config=replace(weights.config, **changes)), CompiledOps(1), sink)

    return faulty


def with_blocks(change: Callable[[VisionBlock], VisionBlock]) -> Fault:
    def faulty(weights: VisionWeights, sink: SinkReading, _: pytest.MonkeyPatch) -> VisionTower:
        blocks = tuple(change(block) for block in weights.blocks)
        return VisionTower(replace(weights, blocks=blocks), CompiledOps(1), sink)

    return faulty


def with_order(order: Callable[[tuple[int, int], VisionConfig], Index]) -> Fault:
    def faulty(weights: VisionWeights, sink: SinkReading, patch: pytest.MonkeyPatch) -> VisionTower:
        patch.setattr(vision, "column_order", order)
        return VisionTower(weights, CompiledOps(1), sink)

    return faulty


def with_tower(kind: type[VisionTower]) -> Fault:
    return lambda weights, sink, _: kind(weights, CompiledOps(1), sink)


def with_ops(kind: type[CompiledOps]) -> Fault:
    return lambda weights, sink, _: VisionTower(weights, kind(1), sink)


# the order of the columns


def no_columns(grid: tuple[int, int], config: VisionConfig) -> Index:
    return np.arange(grid[0] * grid[1], dtype=np.int32)


def columns_of_patches(grid: tuple[int, int], config: VisionConfig) -> Index:
    """The patches themselves column by column, not the units."""
    row, column = vision.positions(grid, config.merge_size)
    return np.lexsort((row, column)).astype(np.int32)


def columns_within_units_too(grid: tuple[int, int], config: VisionConfig) -> Index:
    """The units in the right order, but their patches turned as well."""
    return TRUE_ORDER(grid, config).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)


def grid_the_wrong_way_round(grid: tuple[int, int], config: VisionConfig) -> Index:
    return TRUE_ORDER((grid[1], grid[0]), config)


TRUE_ORDER = vision.column_order


# the angles


class AnglesStay(VisionTower):
    """The angles don't move with the patches."""

    def _block(self, block: VisionBlock, x: F32, angles: Angles, steps: Any) -> None:
        super()._block(block, x, self.kept, steps)

    def angles(self, grid: tuple[int, int]) -> Angles:
        self.kept = super().angles(grid)
        return self.kept


class ColumnsFirst(VisionTower):
    def angles(self, grid: tuple[int, int]) -> Angles:
        cos, sin = (np.roll(part, part.shape[1] // 2, axis=1) for part in super().angles(grid))
        return cos, sin


class OneAngle(VisionTower):
    """Positions one after the other, as in a text."""

    def angles(self, grid: tuple[int, int]) -> Angles:
        config = self.weights.config
        speed = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angle = np.arange(grid[0] * grid[1])[:, None] * speed
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class RowsAsTheyCome(VisionTower):
    """Positions as if the patches came line by line."""

    def angles(self, grid: tuple[int, int]) -> Angles:
        row, column = vision.positions(grid, self.weights.config.merge_size)
        line_by_line = np.lexsort((column, row))
        cos, sin = super().angles(grid)
        return cos[line_by_line], sin[line_by_line]


class NeighboursTurn(CompiledOps):
    """Numbers 2i and 2i+1 of a head turn together, not i and i + half."""

    def rope(self, x: F32, cos: F32, sin: F32) -> F32:
        pairs = np.arange(x.shape[-1]).reshape(-1, 2).T.reshape(-1)
        out = super().rope(np.ascontiguousarray(x[..., pairs]), cos, sin)
        return np.ascontiguousarray(out[..., np.argsort(pairs)])


class KeysStill(VisionTower):
    """Only the queries turn."""

    def _project(self, block: VisionBlock, x: F32, angles: Angles, steps: Any) -> tuple[F32, F32, F32]:
        q, _, v = super()._project(block, x, angles, steps)
        still = np.ones_like(angles[0]), np.zeros_like(angles[1])
        return q, super()._project(block, x, still, steps)[1], v


# heads


def narrow_heads(weights: VisionWeights, sink: SinkReading, _: pytest.MonkeyPatch) -> VisionTower:
    """The same rows of qkv as twice as many heads of half the size."""
    config = weights.config
    more = replace(
        config, head_dim=config.head_dim // 2, num_heads=2 * config.num_heads, num_kv_heads=2 * config.num_kv_heads
    )
    blocks = tuple(
        replace(block, sinks=None if block.sinks is None else block.sinks.repeat(2)) for block in weights.blocks
    )
    return VisionTower(replace(weights, config=more, blocks=blocks), CompiledOps(1), sink)


class ScaledByHiddenSize(VisionTower):
    """Scores scaled as if a head were hidden_size / num_heads wide."""

    def _project(self, block: VisionBlock, x: F32, angles: Angles, steps: Any) -> tuple[F32, F32, F32]:
        q, k, v = super()._project(block, x, angles, steps)
        config = self.weights.config
        return q * np.float32(math.sqrt(config.head_dim * config.num_heads / config.hidden_size)), k, v


class GroupsInterleaved(VisionTower):
    """Query head h reads kv head h mod kv."""

    def _project(self, block: VisionBlock, x: F32, angles: Angles, steps: Any) -> tuple[F32, F32, F32]:
        q, k, v = super()._project(block, x, angles, steps)
        return np.ascontiguousarray(q[:, [0, 2, 1, 3]]), k, v


def keys_for_values(block: VisionBlock) -> VisionBlock:
    at = np.r_[0:256, 384:512, 256:384]  # of 4 * 64 rows of queries, 2 * 64 of keys, 2 * 64 of values
    qkv = BiasedMatrix(MatrixBF16(np.ascontiguousarray(block.qkv.matrix.data[at])), block.qkv.bias[at])
    return replace(block, qkv=qkv)


# norms and the merger


class MergerRms(CompiledOps):
    def layer_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return self.rms_norm(x, weight, eps)


class NormOfUnits(CompiledOps):
    """Mean and variance of a whole unit, not of each patch."""

    def layer_norm(self, x: F32, weight: F32, eps: float) -> F32:
        units = super().layer_norm(x.reshape(-1, 4 * x.shape[1]), np.tile(weight, 4), eps)
        return units.reshape(x.shape)


class MeanTakenEverywhere(CompiledOps):
    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return self.layer_norm(x, weight, eps)


class TanhGelu(CompiledOps):
    def gelu(self, x: F32) -> F32:
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
        return np.float32(0.5) * x * (1 + np.tanh(inner))


def no_bias(block: VisionBlock) -> VisionBlock:
    def bare(part: BiasedMatrix) -> BiasedMatrix:
        return replace(part, bias=np.zeros_like(part.bias))

    return replace(block, proj=bare(block.proj))


# sinks


def other_sink(weights: VisionWeights, sink: SinkReading, _: pytest.MonkeyPatch) -> VisionTower:
    return VisionTower(weights, CompiledOps(1), OTHER[sink])


def no_sinks(block: VisionBlock) -> VisionBlock:
    return replace(block, sinks=None)


def zero_sinks(block: VisionBlock) -> VisionBlock:
    return replace(block, sinks=None if block.sinks is None else np.zeros_like(block.sinks))


def scaled_sinks(block: VisionBlock) -> VisionBlock:
    return replace(block, sinks=None if block.sinks is None else block.sinks * np.float32(64**-0.5))


def turned_sinks(block: VisionBlock) -> VisionBlock:
    return replace(block, sinks=None if block.sinks is None else np.roll(block.sinks, 1))


class SinkElsewhere(CompiledOps):
    """key0: the last key takes the sink of the first. denominator: its share is given back to the others."""

    def patch_attention(
        self, q: F32, k: F32, v: F32, start: int, reach: int | None, sink: F32 | None, reading: SinkReading
    ) -> F32:
        if sink is None:
            return super().patch_attention(q, k, v, start, reach, sink, reading)
        if reading == "denominator":
            share = super().patch_attention(q, k, np.ones_like(v), start, reach, sink, reading)
            return super().patch_attention(q, k, v, start, reach, sink, reading) / share
        q, k, v = (np.ascontiguousarray(part[::-1]) for part in (q, k, v))
        return super().patch_attention(q, k, v, len(k) - start - len(q), reach, sink, reading)[::-1]


FAULTS: dict[str, Fault] = {
    "columns: none": with_order(no_columns),
    "columns: of patches": with_order(columns_of_patches),
    "columns: within the units too": with_order(columns_within_units_too),
    "columns: the grid the wrong way round": with_order(grid_the_wrong_way_round),
    "angles: they stay": with_tower(AnglesStay),
    "angles: the column first": with_tower(ColumnsFirst),
    "angles: one dimension": with_tower(OneAngle),
    "angles: line by line": with_tower(RowsAsTheyCome),
    "angles: neighbours turn": with_ops(NeighboursTurn),
    "angles: keys still": with_tower(KeysStill),
    "angles: another base": with_config(rope_theta=1e5),
    "window: one less": lambda w, s, p: with_config(reach=w.config.reach - 1)(w, s, p),
    "window: one more": lambda w, s, p: with_config(reach=w.config.reach + 1)(w, s, p),
    "window: both sides together": lambda w, s, p: with_config(reach=w.config.reach // 2)(w, s, p),
    "heads: narrow": narrow_heads,
    "heads: the scale of hidden_size": with_tower(ScaledByHiddenSize),
    "heads: groups interleaved": with_tower(GroupsInterleaved),
    "heads: keys for values": with_blocks(keys_for_values),
    "norms: rms in the merger": with_ops(MergerRms),
    "norms: of whole units": with_ops(NormOfUnits),
    "norms: the mean taken everywhere": with_ops(MeanTakenEverywhere),
    "merger: gelu by tanh": with_ops(TanhGelu),
    "block: a bias left out": with_blocks(no_bias),
    "sinks: the other reading": other_sink,
    "sinks: none": with_blocks(no_sinks),
    "sinks: zero": with_blocks(zero_sinks),
    "sinks: scaled": with_blocks(scaled_sinks),
    "sinks: another head's": with_blocks(turned_sinks),
    "sinks: elsewhere": with_ops(SinkElsewhere),
}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_seen(
    towers: dict[str, VisionWeights],
    references: References,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    sink: SinkReading,
) -> None:
    """On the picture whose blocks have all three types."""
    got = rows_of(FAULTS[fault](towers["leaving"], sink, monkeypatch), BY_NAME["leaving"])
    assert np.isfinite(got).all()  # wrong numbers, not none
    assert largest_difference(got, references["leaving", sink]) > VISIBLE


class TurnedInEachBlock(VisionTower):
    """The second block of a run by columns finds the patches turned once more."""

    def _block(self, block: VisionBlock, x: F32, angles: Angles, steps: Any) -> None:
        if block is self.weights.blocks[2]:
            assert block.kind == self.weights.blocks[1].kind == COLUMNS
            x[:] = x[vision.column_order(BY_NAME["columns"].grid, self.weights.config)]
        super()._block(block, x, angles, steps)


@pytest.mark.parametrize("sink", SINKS)
def test_a_run_by_columns_is_turned_once(
    towers: dict[str, VisionWeights], references: References, sink: SinkReading
) -> None:
    got = rows_of(TurnedInEachBlock(towers["columns"], CompiledOps(1), sink), BY_NAME["columns"])
    assert largest_difference(got, references["columns", sink]) > VISIBLE
