"""The engine against transformers' own implementation of the model, at every position, and what breaks the agreement.

The reference logits are float32, made by tools/make_reference.py from the bytes of the tiny checkpoint, seed 0.
``error`` is how far they are from the same model run in float64: 2.5e-6 of the logit range at most.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk import weights
from tests.engines import open_engine
from tests.vulkan_device import software_device

TOLERANCE = 1e-5  # of the logit range
LENGTHS = (1, 5, 127, 128, 129, 130, 300)


@dataclass(frozen=True)
class Reference:
    ids: list[int]
    logits: np.ndarray
    error: float

    @property
    def range(self) -> float:
        return float(np.ptp(self.logits))

    def first(self, tokens: int) -> Reference:
        """The prompt's beginning: attention is causal, so its logits are the first rows."""
        return replace(self, ids=self.ids[:tokens], logits=self.logits[:tokens])


@pytest.fixture(scope="module")
def references(project_root: Path) -> dict[int, Reference]:
    with np.load(project_root / "tests" / "reference" / "tiny.npz") as saved:
        return {
            n: Reference(saved[f"ids_{n}"].tolist(), saved[f"logits_{n}"], float(saved[f"error_{n}"])) for n in LENGTHS
        }


def logits_of(model: Path, ids: list[int]) -> np.ndarray:
    engine = open_engine(model)
    try:
        return engine.session().prompt(ids, all_logits=True)
    finally:
        engine.close()


def largest_difference(got: np.ndarray, reference: Reference) -> float:
    """Relative to the logit range; NaN counts as infinitely far."""
    return float(np.nan_to_num(np.abs(got - reference.logits), nan=np.inf).max()) / reference.range


@pytest.mark.parametrize("length", LENGTHS)
def test_every_position_agrees(tiny_checkpoint: Path, references: dict[int, Reference], length: int) -> None:
    reference = references[length]
    got = logits_of(tiny_checkpoint, reference.ids)
    assert got.shape == reference.logits.shape == (length, 600) and got.dtype == np.float32
    assert largest_difference(got, reference) < TOLERANCE
    second, first = np.sort(reference.logits, axis=1)[:, -2:].T
    clear = first - second > reference.error
    assert clear.sum() > 0.99 * length
    assert (got.argmax(axis=1) == reference.logits.argmax(axis=1))[clear].all()


@pytest.mark.bits
def test_every_position_agrees_with_experts_on_a_device(
    tiny_checkpoint: Path, references: dict[int, Reference]
) -> None:
    """Read twice: at first the device holds nothing, and then nearly all that the prompt uses."""
    info, reference, hits = software_device(), references[130], []
    changes = {"cpu": False, "device": str(info.index), "dense": "cpu", "tier_gb": 0.01, "tier_rate": 1000}
    with open_engine(tiny_checkpoint, threads=1, **changes) as engine:
        assert engine.notices[0].startswith(f"device {info.describe()}; room for 80 experts")
        for _ in range(2):
            got = engine.session().prompt(reference.ids, all_logits=True)
            assert largest_difference(got, reference) < TOLERANCE
            hits.append(engine.snapshot_stats().tier_hits)
        assert engine.tier is not None and not engine.tier.gone
    assert hits[1] - hits[0] > 150  # of 183 that the prompt's three blocks use in five layers


# What is wrong must be seen. The checkpoint is copied, one thing in the copy is changed, and the comparison must fail.


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy")


def change_tensor(model: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Let ``change`` modify the tensor's bytes, as uint8 of the stored shape (items of 2 or 4 bytes: [..., 2 or 4])."""
    index = json.loads((model / "model.safetensors.index.json").read_text("utf-8"))
    path = model / index["weight_map"][name]
    file = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", file[:8])
    entry = json.loads(file[8 : 8 + length])[name]
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    item = (end - start) // int(np.prod(entry["shape"]))
    data = np.frombuffer(file[start:end], np.uint8).reshape(*entry["shape"], *([item] if item > 1 else [])).copy()
    before = data.copy()
    change(data)
    assert (data != before).any(), f"{name}: nothing was changed"
    file[start:end] = data.tobytes()
    path.write_bytes(file)


def double_one_expert_scale(scales: np.ndarray) -> None:
    scales[10, 2] += 1


def swap_nibbles(codes: np.ndarray) -> None:
    codes[:] = codes << 4 | codes >> 4


def raise_one_fp8_scale(scales: np.ndarray) -> None:
    scales[1, 0].view("<f4")[:] *= np.float32(1.25)


def zero_one(values: np.ndarray) -> None:
    values[3] = 0


def zero_all(values: np.ndarray) -> None:
    values[:] = 0


LAYER = "model.layers"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{LAYER}.3.mlp.experts.8.gate_proj.weight_scale", double_one_expert_scale),
        (f"{LAYER}.5.mlp.experts.0.up_proj.weight_scale", double_one_expert_scale),
        (f"{LAYER}.2.mlp.experts.8.down_proj.weight", swap_nibbles),
        (f"{LAYER}.4.mlp.experts.9.up_proj.weight", swap_nibbles),
        (f"{LAYER}.0.self_attn.qkv_proj.weight_scale_inv", raise_one_fp8_scale),
        (f"{LAYER}.1.self_attn.qkv_proj.weight_scale_inv", raise_one_fp8_scale),
        (f"{LAYER}.0.mlp.down_proj.weight_scale_inv", raise_one_fp8_scale),
        (f"{LAYER}.4.self_attn.attention_sink_bias", zero_one),
        (f"{LAYER}.1.mlp.gate.e_score_correction_bias", zero_all),
    ],
)
def test_a_wrong_tensor_is_seen(
    copy: Path, references: dict[int, Reference], name: str, change: Callable[[np.ndarray], None]
) -> None:
    change_tensor(copy, name, change)
    first = references[127].first(40)
    assert largest_difference(logits_of(copy, first.ids), first) > 2 * TOLERANCE


@pytest.mark.parametrize(
    ("length", "change"),
    [
        (5, {"attention_value_scale": 0.707}),
        (5, {"attention_value_scale": None}),
        (129, {"sliding_window": 127}),
        (129, {"sliding_window": 129}),
        (5, {"layernorm_epsilon": 1e-6}),
        (5, {"rope_theta": 10000, "rope_parameters": None}),
        (5, {"swa_rope_theta": 10000000}),
        (5, {"routed_scaling_factor": 0.5}),
        (5, {"num_experts_per_tok": 3}),
    ],
)
def test_a_wrong_setting_is_seen(
    copy: Path, references: dict[int, Reference], length: int, change: dict[str, Any]
) -> None:
    config = json.loads((copy / "config.json").read_text("utf-8"))
    assert change.keys() <= config.keys()
    (copy / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    assert largest_difference(logits_of(copy, references[length].ids), references[length]) > 2 * TOLERANCE


def test_the_window_is_seen_no_earlier_than_it_must(copy: Path, references: dict[int, Reference]) -> None:
    """Positions 0..126 have at most 127 keys: a window of 127 may change position 127 and later ones only."""
    config = json.loads((copy / "config.json").read_text("utf-8"))
    (copy / "config.json").write_text(json.dumps({**config, "sliding_window": 127}), encoding="utf-8")
    difference = (
        np.abs(logits_of(copy, references[129].ids) - references[129].logits).max(axis=1) / references[129].range
    )
    assert (difference[:127] < TOLERANCE).all() and (difference[127:] > 2 * TOLERANCE).all()


def one_grid_over_all_rows(rows: int, scale_rows: int, chunks: int) -> np.ndarray:
    return (np.arange(rows) // 128).astype(np.int32)


@pytest.mark.parametrize("rows", [464, 544], ids=["full: as many scale rows", "window: fewer scale rows"])
def test_one_grid_over_all_chunks_is_seen(
    tiny_checkpoint: Path, references: dict[int, Reference], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Reading a qkv of so many rows with one grid over all of them, where each chunk has its own."""
    right = weights.qkv_scale_row

    def wrong(n: int, scale_rows: int, chunks: int) -> np.ndarray:
        return one_grid_over_all_rows(n, scale_rows, chunks) if n == rows else right(n, scale_rows, chunks)

    monkeypatch.setattr(weights, "qkv_scale_row", wrong)
    assert largest_difference(logits_of(tiny_checkpoint, references[5].ids), references[5]) > 2 * TOLERANCE
