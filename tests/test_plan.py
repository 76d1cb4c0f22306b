"""The resource plan: its numbers against sums written out by hand, the cache that fits, and what the command prints."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk import budget, plan
from mimo_vk.budget import (
    Plan,
    dense_bytes,
    disk_bytes,
    fit,
    kv_bytes,
    largest_picture,
    least_plan,
    make_plan,
    memory_limit,
    picture_bytes,
    snapshot_bytes,
)
from mimo_vk.checkpoint import Checkpoint
from mimo_vk.config import Config, load_config
from mimo_vk.errors import CheckpointError, UsageError
from mimo_vk.kv_cache import KvCache
from mimo_vk.settings import Settings
from mimo_vk.weights import check_names
from tests.build import small_tensors, write_model

DATA = Path(__file__).parent / "data"
FLASH: Config = load_config(DATA / "flash-config.json")[0]
PRO: Config = load_config(DATA / "pro-config.json")[0]


def tower_bytes(hidden: int) -> int:
    """BF16 matrices; biases, norms and sinks widened: 28 blocks, 24 of them with sinks, then the merger."""
    matrices = 28 * (3072 * 1280 + 1280 * 2048 + 3 * 4608 * 1280) + 1280 * 1536 + 5120 * 5120 + hidden * 5120
    vectors = 28 * (3072 + 1280 + 2 * 4608 + 1280 + 2 * 1280) + 24 * 32 + 1280
    return 2 * matrices + 4 * vectors


def test_flash_dense_weights_by_kind():
    hidden = 4096
    assert dense_bytes(FLASH) == {
        "embedding": 152576 * hidden * 2,
        "head": 152576 * hidden * 2,
        "qkv": 9 * (13568 * hidden + 108 * 32 * 4) + 39 * (14848 * hidden + 116 * 32 * 4),
        "o_proj": 48 * hidden * 64 * 128 * 2,
        "dense MLP": 3 * (16384 * hidden + 128 * 32 * 4),
        "router": 47 * (256 * hidden * 2 + 256 * 4),
        "norms": (2 * 48 + 1) * hidden * 4 + 39 * 64 * 4,
        "vision tower": tower_bytes(hidden),
    }


def test_pro_dense_weights_by_kind():
    hidden = 6144
    assert dense_bytes(PRO) == {
        "embedding": 152576 * hidden * 2,
        "head": 152576 * hidden * 2,
        "qkv": 70 * (27136 * hidden + 216 * 48 * 4),
        "o_proj": 70 * hidden * 128 * 128 * 2,
        "dense MLP": 3 * (16384 * hidden + 128 * 48 * 4),
        "router": 69 * (384 * hidden * 2 + 384 * 4),
        "norms": (2 * 70 + 1) * hidden * 4 + 60 * 128 * 4,
        "vision tower": tower_bytes(hidden),
    }


def test_requantised_dense_weights():
    exact, int8, wide = (dense_bytes(FLASH, bits) for bits in (0, 8, 32))
    assert int8["head"] == 152576 * (4096 + 4)
    assert wide["head"] == 152576 * 4096 * 4
    assert wide["o_proj"] == 2 * exact["o_proj"]
    for kind in ("embedding", "router", "norms", "vision tower"):
        assert exact[kind] == int8[kind] == wide[kind]


def test_keys_and_values():
    """Flash, float32: a full row has 4 heads of 192 + 128, a window row 8 of them, 128 rows in each ring."""
    assert kv_bytes(FLASH, 8192) == (9 * 8192 * 4 * 320 * 4, 39 * 128 * 8 * 320 * 4)
    assert kv_bytes(PRO, 1000) == (10 * 1000 * 8 * 320 * 4, 60 * 128 * 8 * 320 * 4)


def test_snapshots_and_the_server_s_own_process():
    """A snapshot of Flash is 39 rings of 128 rows, a row of logits, and 8192 ids of 40 bytes: 52 MB. Four are kept, and
    one more is read from. The server has 110 MB and 700 bytes for each of the tokenizer's ids."""
    one = 39 * 128 * 8 * 320 * 4 + 4 * 152576 + 40 * 8192
    assert one == 52_056_064
    least = least_plan(FLASH, ctx=8192, chunk=64)
    assert least.snapshots == 5 * one
    assert least_plan(FLASH, ctx=8192, chunk=64, pin_slots=1).snapshots == 2 * one
    serving = least_plan(FLASH, ctx=8192, chunk=64, serving=True)
    assert least.server == serving.server == 110_000_000 + 700 * 152576
    assert serving.fixed_bytes == least.fixed_bytes + serving.server


def test_what_pictures_take():
    """A patch of the release has 1536 numbers as it comes, 1280 in the residual, 3072 as queries, keys and values and
    two pairs of 32 angles' cos and sin. 4 of them are a token. 256 patches go through the products together. The rows
    of a whole context, and 64 MiB of rows seen before."""
    patch, piece = 1536 + 1280 + 3072 + 128, 2 * 3072 + 3 * 4608 + 4 * 1280
    whole = 4 * (4 * 8192 * patch + 256 * piece + 8192 * 4096) + 64 * 2**20
    assert least_plan(FLASH, ctx=8192, chunk=64).pictures == whole == picture_bytes(FLASH, 8192, 8192)
    small = least_plan(FLASH, ctx=8192, chunk=64, picture_tokens=256)
    assert whole - small.pictures == 4 * 4 * (8192 - 256) * patch
    assert least_plan(FLASH, ctx=8192, chunk=64).fixed_bytes - small.fixed_bytes == whole - small.pictures
    assert least_plan(FLASH, ctx=8192, chunk=64, picture_tokens=99999).pictures == whole
    assert least_plan(replace(FLASH, tower=None), ctx=8192, chunk=64).pictures == 0


def test_the_largest_picture(tmp_path: Path):
    """12845056 pixels in squares of 32 are 12544 tokens."""
    assert largest_picture(tmp_path, FLASH, Settings()) is None
    (tmp_path / "preprocessor_config.json").write_bytes((DATA / "preprocessor_config.json").read_bytes())
    assert largest_picture(tmp_path, FLASH, Settings()) == 12544
    assert largest_picture(tmp_path, FLASH, Settings(max_image_tokens=300)) == 300
    assert largest_picture(tmp_path, replace(FLASH, vision=None), Settings()) is None


def test_a_snapshot_has_the_bytes_that_the_plan_counts(tmp_path: Path):
    config = load_config(write_model(tmp_path, small_tensors()))[0]
    cache = KvCache(config, 100)
    snapshot = cache.snapshot(np.zeros((1, config.vocab_size), np.float32))
    held = sum(keys.nbytes + values.nbytes for keys, values in snapshot.rings.values()) + snapshot.logits.nbytes
    assert held > 0 and snapshot_bytes(config, 100) == held + 40 * 100


def test_experts_and_cold_reads():
    """12.75 MiB and 19.125 MiB an expert; 8 of them in each of 47 and 69 layers."""
    flash, pro = (least_plan(c, ctx=8192, chunk=64) for c in (FLASH, PRO))
    assert (flash.expert_bytes, pro.expert_bytes) == (12.75 * 2**20, 19.125 * 2**20)
    assert flash.cold_bytes_per_token == 47 * 8 * 12.75 * 2**20
    assert pro.cold_bytes_per_token == 69 * 8 * 19.125 * 2**20
    assert flash.experts_bytes_on_disk == 47 * 256 * 12.75 * 2**20
    text = sum(nbytes for kind, nbytes in dense_bytes(FLASH).items() if kind != "vision tower")
    norms_in_the_file = 2 * (97 * 4096 + 39 * 64)  # half as large
    assert disk_bytes(FLASH) == flash.experts_bytes_on_disk + text - norms_in_the_file


def test_a_slot_holds_an_expert_wherever_it_begins():
    for config in (FLASH, PRO):
        p = least_plan(config, ctx=1, chunk=1)
        assert p.slot_bytes % 4096 == 0
        for start in (0, 1, 512, 4095):  # whole pages around the expert's bytes, as direct reads need them
            assert p.slot_bytes >= -(-(start + p.expert_bytes) // 4096) * 4096


def test_the_peak_is_the_sum_of_its_parts():
    p = make_plan(FLASH, ctx=8192, chunk=64, cap=20)
    assert p.cap == 20
    parts = sum(p.dense.values()) + p.kv_full + p.kv_rings + p.snapshots + p.scratch + p.pictures + p.runtime
    assert p.peak_bytes == parts + 20 * 47 * p.slot_bytes
    assert p.runtime > 250e6
    assert p.scratch > 64 * 16384 * 3 * 4


def test_more_context_and_larger_blocks_cost_more():
    small, large = (make_plan(FLASH, ctx=c, chunk=k, cap=8) for c, k in ((1024, 16), (4096, 256)))
    assert large.kv_full == 4 * small.kv_full
    assert large.kv_rings == small.kv_rings
    assert large.scratch > small.scratch


def test_context_is_capped_by_the_checkpoint():
    config = replace(FLASH, max_position_embeddings=100)
    p = make_plan(config, ctx=8192, chunk=512, cap=8)
    assert (p.ctx, p.chunk) == (100, 100)


# The cache that fits


def test_ram_sizes_the_cache_to_the_byte():
    least = least_plan(FLASH, ctx=8192, chunk=64)
    step = 47 * least.slot_bytes
    assert fit(least, least.least_bytes).cap == 8
    assert fit(least, least.least_bytes + 3 * step - 1).cap == 10
    assert fit(least, least.least_bytes + 3 * step).cap == 11
    chosen = fit(least, least.least_bytes + 3 * step)
    assert chosen.peak_bytes == chosen.ram_bytes
    assert fit(least, 10**13).cap == 256


def test_with_ram_and_cap_the_smaller_holds():
    least = least_plan(FLASH, ctx=8192, chunk=64)
    ram = least.least_bytes + 3 * 47 * least.slot_bytes
    assert fit(least, ram, 9).cap == 9
    assert fit(least, ram, 200).cap == 11
    assert fit(least, None, 200).cap == 200
    assert fit(least, None, 500).cap == 256
    assert fit(least, None, None).cap == 256


def test_a_cap_under_one_routing_step_is_raised_to_it():
    assert make_plan(FLASH, ctx=8192, chunk=64, cap=1).cap == 8


def test_too_little_memory_says_what_would_do():
    least = least_plan(FLASH, ctx=8192, chunk=64)
    with pytest.raises(UsageError) as caught:
        fit(least, least.least_bytes - 1)
    text = str(caught.value)
    assert f"needs {least.least_bytes / 1e9:.2f} GB" in text
    assert f"--ram allows {(least.least_bytes - 1) / 1e9:.2f} GB" in text
    assert "8 experts in each of 47 layers" in text


def test_a_model_without_experts_needs_no_cache():
    dense = replace(FLASH, layers=tuple(replace(s, moe=False) for s in FLASH.layers[:2]))
    p = make_plan(dense, ctx=64, chunk=8, ram_bytes=10**11)
    assert (p.cache_bytes, p.cold_bytes_per_token) == (0, 0)


def test_the_limit_comes_from_ram_else_from_what_is_available(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budget, "memory_available", lambda: 10_000)
    assert memory_limit(Settings(ram=1.5))[0] == 1_500_000_000
    assert memory_limit(Settings(ram=1.5, cap=3))[0] == 1_500_000_000
    assert memory_limit(Settings(cap=3))[0] is None
    limit, source = memory_limit(Settings())
    assert limit == 7000
    assert source.startswith("70% of the available memory")
    monkeypatch.setattr(budget, "memory_available", lambda: 0)
    assert memory_limit(Settings())[0] is None


def test_the_plan_counts_the_bytes_of_the_files(tmp_path: Path):
    """The arithmetic on the Config against the headers of a checkpoint that has every tensor."""
    directory = write_model(tmp_path, small_tensors())
    checkpoint, (config, _) = Checkpoint.open(directory), load_config(directory)
    assert disk_bytes(config) == sum(info.nbytes for info in checkpoint.tensors.values())
    assert least_plan(config, ctx=8, chunk=8).expert_bytes == check_names(checkpoint, config)[0].expert_bytes


# The command


def run(capsys: pytest.CaptureFixture[str], directory: Path, as_json: bool = False, **settings: Any) -> str:
    assert plan.main(Settings(model=directory, **settings), argparse.Namespace(json=as_json)) == 0
    return capsys.readouterr().out


def config_only(tmp_path: Path, name: str) -> Path:
    (tmp_path / "config.json").write_bytes((DATA / name).read_bytes())
    return tmp_path


def test_plan_of_flash_before_its_download(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = run(capsys, config_only(tmp_path, "flash-config.json"), ram=64).splitlines()
    values = {line[:32].strip(): line[32:42].strip() for line in lines if line.startswith("  ")}
    expected = {
        "dense weights": "10.354", "embedding": "1.250", "head": "1.250", "qkv": "2.873", "o_proj": "3.221",
        "dense MLP": "0.201", "router": "0.099", "norms": "0.002", "vision tower": "1.458",
            "KV cache": "0.429", "9 full layers": "0.377",
        "39 window layers": "0.051", "one cached expert per layer": "0.629", "experts": "160.860",
        "snapshots": "0.260",
        "with serve, on top of it all": "0.217", "text model": "169.755",
        "read per token, cold": "5.027", "no shards found yet": "0.000",
    }  # fmt: skip
    assert {key: values.get(key) for key in expected} == expected
    cap = int(next(key for key in values if key.startswith("expert cache, cap ")).split()[-1])
    p = make_plan(FLASH, ctx=8192, chunk=64, ram_bytes=64 * 10**9)
    assert cap == p.cap
    assert values["peak"] == f"{p.peak_bytes / 1e9:.3f}"
    assert len({line[:42].rstrip()[-4] for line in lines if line.startswith("  ")}) == 1  # the points stand in a column


def test_plan_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    facts = json.loads(run(capsys, config_only(tmp_path, "pro-config.json"), as_json=True, ram=100, cap=20))
    p = make_plan(PRO, ctx=8192, chunk=64, ram_bytes=100 * 10**9, cap=20)
    assert (facts["cap"], facts["peak_bytes"], facts["ram_bytes"]) == (20, p.peak_bytes, 100 * 10**9)
    assert facts["dense"] == p.dense
    assert facts["cold_bytes_per_token"] == p.cold_bytes_per_token
    assert facts["disk_text_bytes"] == disk_bytes(PRO)
    assert (facts["misfit"], facts["warnings"], facts["disk_files"]) == (None, [], 0)


def test_plan_reads_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    directory = write_model(tmp_path, small_tensors())
    for name in ("read", "read_rows", "mapped"):
        monkeypatch.setattr(Checkpoint, name, None)
    out = run(capsys, directory, cap=2)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert f"  2 files found                 {size / 1e9:>10.3f}" in out
    facts = json.loads(run(capsys, directory, as_json=True))
    assert (facts["disk_files"], facts["disk_files_bytes"]) == (2, size)


def test_what_does_not_fit_is_printed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """By default a plan is only told; a --ram that can't hold the model is a bad call."""
    directory = config_only(tmp_path, "pro-config.json")
    monkeypatch.setattr(budget, "memory_available", lambda: 20 * 10**9)
    out = run(capsys, directory)
    assert "expert cache, cap" not in out
    least = least_plan(PRO, ctx=8192, chunk=64).least_bytes
    assert f"  least that can run            {least / 1e9:>10.3f}  --cap 8; more than the 14.000 GB" in out
    assert json.loads(run(capsys, directory, as_json=True))["cap"] is None
    with pytest.raises(UsageError, match=r"--ram allows 14.00 GB"):
        plan.main(Settings(model=directory, ram=14), argparse.Namespace())
    assert "o_proj" in capsys.readouterr().out


def test_a_broken_checkpoint_is_refused(tmp_path: Path):
    directory = write_model(tmp_path, small_tensors())
    os.truncate(directory / "odd name.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"odd name.safetensors: short: expected \d+ bytes, found 5000"):
        plan.main(Settings(model=directory), argparse.Namespace())


def test_unknown_keys_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = json.loads((DATA / "flash-config.json").read_text()) | {"brand_new": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(capsys, tmp_path, cap=8).splitlines()[-1].endswith("config.json: brand_new: unknown key, not used")


def test_plan_for_follows_the_settings(tmp_path: Path):
    directory = write_model(tmp_path, small_tensors())
    checkpoint, (config, _) = Checkpoint.open(directory), load_config(directory)
    chosen: Plan = plan.plan_for(checkpoint, config, Settings(cap=3, ctx=100, chunk=10, dense_bits=8))
    assert (chosen.cap, chosen.ctx, chosen.chunk, chosen.dense_bits) == (3, 100, 10, 8)
    with pytest.raises(UsageError, match=r"--ram allows 0.01 GB"):
        plan.plan_for(checkpoint, config, Settings(ram=0.01))
