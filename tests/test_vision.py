"""The picture tower: its numbers from config.json, its tensors, its orders, and the same bytes everywhere."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_fallback.compiled import CompiledOps
from cpu_fallback.reference import ReferenceOps
from mimo_vk import vision
from mimo_vk.checkpoint import Checkpoint
from mimo_vk.config import Config, load_config
from mimo_vk.errors import Cancelled, CheckpointError
from mimo_vk.formats import F32, bf16_to_float32
from mimo_vk.ops import SinkReading
from mimo_vk.tensor_names import vision_tensors
from mimo_vk.vision import VisionTower, column_order, positions
from mimo_vk.vision_config import IGNORED, VisionConfig
from mimo_vk.vision_weights import VisionWeights
from mimo_vk.weights import check_names, load_weights

DATA = Path(__file__).parent / "data"
F = np.float32


@dataclass(frozen=True)
class Picture:
    pixels: F32
    grid: tuple[int, int]


def picture(config: VisionConfig, rows: int, columns: int, seed: int = 1) -> Picture:
    """``rows`` by ``columns`` merge units of noise."""
    grid = rows * config.merge_size, columns * config.merge_size
    pixels = np.random.default_rng(seed).standard_normal((grid[0] * grid[1], config.patch_values)).astype(F)
    return Picture(pixels, grid)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> VisionWeights:
    config, _ = load_config(tiny_checkpoint)
    weights = load_weights(Checkpoint.open(tiny_checkpoint), config).vision
    assert weights is not None
    return weights


# Numbers and tensors


def tower_of(path: Path) -> VisionConfig:
    tower = load_config(path)[0].tower
    assert tower is not None
    return tower


@pytest.mark.parametrize(("name", "hidden"), [("flash", 4096), ("pro", 6144)])
def test_the_release_reads_as_it_is(name: str, hidden: int) -> None:
    tower = tower_of(DATA / f"{name}-config.json")
    assert (tower.hidden_size, tower.intermediate_size, tower.out_hidden_size) == (1280, 4608, hidden)
    assert (tower.num_heads, tower.num_kv_heads, tower.head_dim, tower.qkv_rows) == (32, 8, 64, 3072)
    assert (tower.patch_values, tower.merge_unit, tower.reach, tower.has_sinks) == (1536, 4, 64, True)
    assert [i for i, kind in enumerate(tower.block_types) if kind == -1] == [0, 9, 18, 27]
    wanted = vision_tensors(tower)
    assert len(wanted) == 364 and sum("sinks" in name for name in wanted) == 24
    assert wanted["visual.merger.mlp.2.weight"].shapes == ((hidden, 5120),)
    assert wanted["visual.patch_embed.proj.weight"].shapes == ((1280, 3, 2, 16, 16),)


def changed(tmp_path: Path, **keys: Any) -> Path:
    """The release's config.json with keys of vision_config changed; ``...`` takes a key out."""
    config = json.loads((DATA / "flash-config.json").read_text())
    for key, value in keys.items():
        config["vision_config"].pop(key, None) if value is ... else config["vision_config"].update({key: value})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"depth": ...}, "vision_config.depth: expected an integer of 1 or more (under 2^31), it is missing"),
        ({"hidden_size": 0}, "vision_config.hidden_size: expected an integer of 1 or more (under 2^31), found 0"),
        ({"hidden_act": "gelu"}, 'vision_config.hidden_act: expected "silu" (no other value is supported), found'),
        ({"num_key_value_heads": 5}, "vision_config.num_heads: expected a multiple of num_key_value_heads (5)"),
        ({"num_query_groups": 8}, "vision_config.num_query_groups: expected num_heads / num_key_value_heads (4)"),
        ({"spatial_patch_size": 14}, "vision_config.spatial_patch_size: expected patch_size (16), found 14"),
        ({"vit_window_attn_types": [0, 2]}, "vit_window_attn_types: expected a list with -1, 0 or 1 for each block"),
        ({"vit_window_attn_types": [0]}, "vit_window_attn_types: expected 28 entries (depth), not 1, found [0]"),
        ({"fullatt_block_indexes": [0]}, "is -1 ([0, 9, 18, 27]), found [0]"),
        ({"use_sink": 1}, "vision_config.use_sink: expected true or false, found 1"),
        ({"out_hidden_size": 100}, "out_hidden_size: expected hidden_size of the text model (4096), found 100"),
        ({"qk_channels": 30}, "vision_config.qk_channels: expected a multiple of 4"),
        ({"visual_token_window_size": -1}, "visual_token_window_size: expected an integer of 0 or more"),
        ({"depth": 10**6}, "vision_config.depth: expected at most 1000, found 1000000"),
    ],
)
def test_a_faulty_key_is_named(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    path = changed(tmp_path, **keys)
    with pytest.raises(CheckpointError) as caught:
        load_config(path)
    assert any(line.startswith(f"{path}: ") and expected in line for line in caught.value.problems)


def test_keys_that_may_be_absent_and_keys_that_are_not_known(tmp_path: Path) -> None:
    repeated = dict.fromkeys(("num_query_groups", "spatial_patch_size", *IGNORED), ...)
    path = changed(tmp_path, **repeated, new_thing=1, qk_channels=40)
    config, warnings = load_config(path)
    assert warnings == [f"{path}: vision_config.new_thing: unknown key, not used"]
    assert config.tower == replace(tower_of(DATA / "flash-config.json"), head_dim=40)
    assert all(len(reason) > 10 for reason in IGNORED.values())


@pytest.fixture
def tiny_files(tiny_checkpoint: Path) -> tuple[Checkpoint, Config]:
    return Checkpoint.open(tiny_checkpoint), load_config(tiny_checkpoint)[0]


def test_each_tensor_is_where_it_belongs(tiny_files: tuple[Checkpoint, Config], tiny: VisionWeights) -> None:
    checkpoint, _ = tiny_files

    def stored(name: str) -> np.ndarray:
        return checkpoint.mapped("visual." + name)

    assert tiny.patch_embed.data.tobytes() == stored("patch_embed.proj.weight").tobytes()
    assert tiny.patch_embed.shape == (64, 1536)
    assert tiny.merger_up.data.tobytes() == stored("merger.mlp.0.weight").tobytes()
    assert tiny.merger_down.data.tobytes() == stored("merger.mlp.2.weight").tobytes()
    assert np.array_equal(tiny.merger_norm, bf16_to_float32(stored("merger.ln_q.weight")))
    assert [block.kind for block in tiny.blocks] == [-1, 0, 1, -1]
    assert [block.sinks is not None for block in tiny.blocks] == [False, True, True, False]
    for i, block in enumerate(tiny.blocks):
        at = f"blocks.{i}."
        parts = {"attn.qkv": block.qkv, "attn.proj": block.proj, "mlp.gate_proj": block.gate, "mlp.up_proj": block.up,
                 "mlp.down_proj": block.down}  # fmt: skip
        for name, part in parts.items():
            assert part.matrix.data.tobytes() == stored(f"{at}{name}.weight").tobytes()
            assert np.array_equal(part.bias, bf16_to_float32(stored(f"{at}{name}.bias")))
        assert np.array_equal(block.norm1, bf16_to_float32(stored(at + "norm1.weight")))
        assert np.array_equal(block.norm2, bf16_to_float32(stored(at + "norm2.weight")))
        if block.sinks is not None:
            assert np.array_equal(block.sinks, bf16_to_float32(stored(at + "attn.sinks")))


def test_missing_extra_and_ill_shaped_tensors_are_named(tiny_files: tuple[Checkpoint, Config]) -> None:
    checkpoint, config = tiny_files
    assert config.tower is not None
    deeper = replace(config.tower, block_types=(-1, 0, 1, -1, 0), intermediate_size=97)
    shallower = replace(config.tower, block_types=(-1, 0, 1))
    with pytest.raises(CheckpointError) as caught:
        check_names(checkpoint, replace(config, tower=deeper))
    text = str(caught.value)
    assert "tensor visual.blocks.4.attn.sinks: missing" in text
    assert "tensor visual.blocks.0.mlp.down_proj.weight: expected BF16 [64, 97], found BF16 [64, 96]" in text
    with pytest.raises(CheckpointError) as caught:
        check_names(checkpoint, replace(config, tower=shallower))
    assert "tensor visual.blocks.3.mlp.up_proj.bias: unknown" in str(caught.value)
    assert any(name.startswith("visual.") for name in check_names(checkpoint, replace(config, tower=None))[1])


# Orders


def test_patches_go_unit_by_unit() -> None:
    row, column = positions((4, 6), 2)
    assert row.tolist() == [0, 0, 1, 1] * 3 + [2, 2, 3, 3] * 3
    assert column.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5] * 2


def test_columns_are_orders_of_whole_units(tiny: VisionWeights) -> None:
    """Two rows of three units: 0 1 2 / 3 4 5 read down the columns is 0 3 1 4 2 5."""
    order = column_order((4, 6), tiny.config).reshape(-1, 4)
    assert order[:, 0].tolist() == [0, 12, 4, 16, 8, 20]
    assert (order - order[:, :1] == [0, 1, 2, 3]).all()
    row, column = positions((4, 6), 2)
    assert list(zip(row[order[:, 0]].tolist(), column[order[:, 0]].tolist(), strict=True)) == [
        (0, 0), (2, 0), (0, 2), (2, 2), (0, 4), (2, 4)]  # fmt: skip


def test_the_first_half_of_the_angles_is_the_row(tiny: VisionWeights) -> None:
    cos, sin = VisionTower(tiny, ReferenceOps(), "key0").angles((4, 6))
    assert cos.shape == (24, 32)
    patch = 17  # unit 4 (row 1, column 1 of units), its second patch: row 2, column 3
    for j in (0, 1, 15):
        speed = 10000.0 ** (-2 * j / 32)
        assert math.isclose(cos[patch, j], math.cos(2 * speed), abs_tol=1e-6)
        assert math.isclose(sin[patch, 16 + j], math.sin(3 * speed), abs_tol=1e-6)


# The forward pass


@pytest.mark.parametrize("sink", ["key0", "denominator"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 5), (7, 3), (8, 9)])
def test_every_backend_gives_the_same_bytes(tiny: VisionWeights, rows: int, columns: int, sink: SinkReading) -> None:
    shown = picture(tiny.config, rows, columns)
    expected = VisionTower(tiny, ReferenceOps(), sink).forward(shown)
    assert expected.shape == (rows * columns, tiny.config.out_hidden_size) and np.isfinite(expected).all()
    for threads in (1, 2):
        assert VisionTower(tiny, CompiledOps(threads), sink).forward(shown).tobytes() == expected.tobytes()


def test_the_rows_taken_at_a_time_do_not_show(tiny: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = picture(tiny.config, 5, 6)
    tower = VisionTower(tiny, CompiledOps(2), "key0")
    expected = tower.forward(shown)
    for rows in (1, 7, 64):
        monkeypatch.setattr(vision, "ROWS", rows)
        assert tower.forward(shown).tobytes() == expected.tobytes()
    assert tower.forward(shown).tobytes() == expected.tobytes()


def test_the_readings_of_the_sink_differ(tiny: VisionWeights) -> None:
    shown = picture(tiny.config, 3, 4)
    rows = [VisionTower(tiny, CompiledOps(2), sink).forward(shown) for sink in ("key0", "denominator")]
    assert np.abs(rows[0] - rows[1]).max() > 0.01 * np.ptp(rows[0])


def without_attention(weights: VisionWeights) -> VisionWeights:
    """The tower whose attention adds nothing: each unit's row depends on its own pixels alone."""

    def silent(block: Any) -> Any:
        nothing = replace(block.proj, matrix=type(block.proj.matrix)(np.zeros_like(block.proj.matrix.data)))
        return replace(block, proj=nothing)

    return replace(weights, blocks=tuple(silent(block) for block in weights.blocks))


def test_rows_come_out_in_the_order_of_the_units(tiny: VisionWeights) -> None:
    """Also where the last block goes by columns: the order is undone."""
    mute = without_attention(tiny)
    for blocks in (mute.blocks, mute.blocks[:3]):
        tower = VisionTower(replace(mute, blocks=blocks), CompiledOps(2), "key0")
        shown = picture(tiny.config, 3, 4)
        rows = tower.forward(shown)
        for unit in (0, 5, 11):
            alone = tower.forward(Picture(shown.pixels[4 * unit : 4 * unit + 4], (2, 2)))
            assert alone.tobytes() == rows[unit : unit + 1].tobytes()


def test_progress_reaches_its_total_and_a_stop_stops(tiny: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "ROWS", 16)
    tower, told = VisionTower(tiny, CompiledOps(1), "key0"), list[tuple[int, int]]()
    shown = picture(tiny.config, 5, 4)
    tower.forward(shown, lambda done, total: told.append((done, total)))
    done = [step[0] for step in told]
    assert done == sorted(set(done)) and {step[1] for step in told} == {done[-1]}

    def stop_after(calls: int) -> Callable[[], None]:
        left = [calls]

        def checkpoint() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Cancelled("stopped by the caller")

        return checkpoint

    pixels = copy.deepcopy(shown.pixels)
    with pytest.raises(Cancelled):
        tower.forward(shown, None, stop_after(len(told) - 1))
    tower.forward(shown, None, stop_after(len(told)))
    assert np.array_equal(pixels, shown.pixels)


def test_a_nan_in_the_tower_is_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    info = Checkpoint.open(directory).tensors["visual.merger.ln_q.weight"]
    with info.path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xc0\x7f")
    with pytest.raises(CheckpointError, match=r"tensor visual\.merger\.ln_q\.weight: element 0"):
        load_weights(Checkpoint.open(directory), load_config(directory)[0])
