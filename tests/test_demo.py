"""The shipped demonstration model: its files, and what it answers to the held-out list."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mimo_vk.checkpoint import Checkpoint
from mimo_vk.config import load_config
from mimo_vk.engine import Engine, shipped_model
from mimo_vk.expert_table import ExpertTable
from mimo_vk.tokenizer import Tokenizer
from mimo_vk.weights import load_weights
from tests.engines import open_engine
from tools.demo.checks import Answer
from tools.demo.heldout import read
from tools.eval_demo import REQUIRED, Outcome, evaluate, table


@pytest.fixture(scope="module")
def engine():
    with open_engine(shipped_model(), ctx=1024, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def outcomes(engine: Engine) -> list[Outcome]:
    return list(evaluate(engine, read()))


def shares(outcomes: list[Outcome]) -> dict[str, float]:
    asked = Counter(o.entry["skill"] for o in outcomes)
    right = Counter(o.entry["skill"] for o in outcomes if o.right)
    return {skill: right[skill] / count for skill, count in asked.items()}


def test_it_is_small_and_says_nothing_unknown(engine):
    assert sum(path.stat().st_size for path in shipped_model().iterdir()) < 20e6
    assert engine.warnings == []


def test_every_feature_is_on():
    config, _ = load_config(shipped_model() / "config.json")
    full = [layer for layer in config.layers if layer.window is None]
    window = [layer for layer in config.layers if layer.window is not None]
    assert full and window and all(layer.has_sink for layer in window)
    assert window[0].num_kv_heads == 2 * full[0].num_kv_heads
    assert window[0].rope_theta != full[0].rope_theta
    assert config.attention_value_scale != 1.0
    assert config.vocab_size > Tokenizer.load(shipped_model()).size
    for layer in config.layers:
        rows = layer.num_heads * layer.head_dim + layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
        assert rows // config.qkv_chunks % 128


def test_every_cell_of_the_chunked_fp8_grid_holds_a_largest_code():
    config, _ = load_config(shipped_model() / "config.json")
    checkpoint = Checkpoint.open(shipped_model())
    for layer in range(config.num_hidden_layers):
        codes = checkpoint.read(f"model.layers.{layer}.self_attn.qkv_proj.weight") & 0x7F
        for chunk in np.split(codes, config.qkv_chunks):
            for top in range(0, len(chunk), 128):
                for left in range(0, chunk.shape[1], 128):
                    assert chunk[top : top + 128, left : left + 128].max() == 0x7E, (layer, top, left)


def test_each_expert_is_one_piece_of_a_file():
    config, _ = load_config(shipped_model() / "config.json")
    experts: ExpertTable = load_weights(Checkpoint.open(shipped_model()), config).experts
    moe = [spec.index for spec in config.layers if spec.moe]
    assert len(moe) == config.num_hidden_layers - 1
    assert all(experts[layer][e].contiguous for layer in moe for e in range(config.n_routed_experts))


def test_the_router_biases_are_at_work():
    config, _ = load_config(shipped_model() / "config.json")
    checkpoint = Checkpoint.open(shipped_model())
    for spec in config.layers:
        if spec.moe:
            bias = checkpoint.read(f"model.layers.{spec.index}.mlp.gate.e_score_correction_bias")
            assert np.ptp(bias) > 0.01


def test_the_held_out_list_on_the_compiled_path(outcomes):
    reached = shares(outcomes)
    assert all(reached[skill] >= 0.95 for skill in REQUIRED), table(outcomes)


@pytest.mark.parametrize(
    ("every", "changes"),
    [
        pytest.param(60, {"backend": "numpy"}, id="numpy"),
        pytest.param(10, {"cpu": False, "device": "llvmpipe", "tier_gb": 0.001}, id="device"),
    ],
)
def test_a_part_of_it_elsewhere_has_the_same_bytes(outcomes, every, changes):
    """By numpy; and with some of the experts on a device."""
    part = outcomes[5::every]
    with open_engine(shipped_model(), ctx=1024, threads=1, **changes) as engine:
        again = list(evaluate(engine, [o.entry for o in part]))
        assert "device" not in changes or engine.snapshot_stats().tier_hits > 1000
    assert [o.ids for o in again] == [o.ids for o in part]
    assert [o.logits for o in again] == [o.logits for o in part]


def test_the_readme_example(engine):
    """A conversation of two lines, as `mimo-vk chat` has it."""
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    first = say(engine, messages)
    assert first.content == "42"
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "What is the capital of Peru?"},
    ]
    assert "Lima" in say(engine, messages).content


def say(engine: Engine, messages: list[dict[str, str]]) -> Answer:
    entry = {"messages": messages, "think": False, "skill": "", "check": {"type": "exact", "any": []}}
    return next(evaluate(engine, [entry])).answer


def test_it_says_what_it_is_in_two_languages(engine):
    assert "demonstration model" in say(engine, [{"role": "user", "content": "Who are you?"}]).content
    assert "modello dimostrativo" in say(engine, [{"role": "user", "content": "Chi sei?"}]).content


def test_the_model_is_package_data(project_root: Path):
    assert shipped_model() == project_root / "mimo_vk" / "demo"
