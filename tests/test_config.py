"""config.json: what is read, what is refused, and that a refusal names the key, the expected and the found."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo_vk.config import IGNORED, load_config, load_generation_config
from mimo_vk.errors import CheckpointError
from tests.build import SMALL_CONFIG

DATA = Path(__file__).parent / "data"


def write(tmp_path: Path, config: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def changed(**keys: Any) -> dict[str, Any]:
    config = copy.deepcopy(SMALL_CONFIG)
    config.update(keys)
    return config


def faults(tmp_path: Path, config: object) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_config(write(tmp_path, config))
    assert all(line.startswith(f"{tmp_path}/config.json: ") and "\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_flash_reads_as_released():
    config, warnings = load_config(DATA / "flash-config.json")
    assert warnings == []
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (152576, 4096, 48)
    assert (config.intermediate_size, config.moe_intermediate_size) == (16384, 2048)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (256, 8)
    assert (config.rope_dim, config.qkv_chunks) == (64, 4)
    assert (config.attention_value_scale, config.layernorm_epsilon, config.routed_scaling_factor) == (0.707, 1e-6, 1.0)
    assert (config.max_position_embeddings, config.eos_token_ids, config.image_token_id) == (1048576, (151645,), 151655)
    assert [s.index for s in config.layers if s.window is None] == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert [s.index for s in config.layers if not s.moe] == [0]
    full, window = config.layers[0], config.layers[1]
    assert (full.num_heads, full.num_kv_heads, full.rope_theta, full.has_sink) == (64, 4, 1e7, False)
    assert (window.num_heads, window.num_kv_heads, window.rope_theta, window.has_sink) == (64, 8, 1e4, True)
    assert (window.window, window.head_dim, window.v_head_dim) == (128, 192, 128)
    assert config.vision is not None and config.vision["depth"] == 28


def test_pro_reads_as_released():
    config, warnings = load_config(DATA / "pro-config.json")
    assert warnings == []
    assert (config.hidden_size, config.num_hidden_layers, config.n_routed_experts) == (6144, 70, 384)
    assert (config.attention_value_scale, config.layernorm_epsilon, config.qkv_chunks) == (0.612, 1e-5, 8)
    assert [s.index for s in config.layers if s.window is None] == [0, 7, 15, 23, 31, 39, 47, 55, 62, 69]
    assert {(s.num_heads, s.num_kv_heads) for s in config.layers} == {(128, 8)}


def test_a_directory_stands_for_its_config(tmp_path: Path):
    assert load_config(write(tmp_path, SMALL_CONFIG).parent) == load_config(tmp_path / "config.json")


def test_every_ignored_key_has_a_reason_and_no_key_is_both_used_and_ignored(tmp_path: Path):
    assert all(len(reason) > 10 for reason in IGNORED.values())
    _, warnings = load_config(write(tmp_path, SMALL_CONFIG))
    assert warnings == []
    assert not set(SMALL_CONFIG) & set(IGNORED)


def test_unknown_keys_are_named(tmp_path: Path):
    config = changed(new_thing=1)
    config["quantization_config"]["newer_thing"] = 2
    _, warnings = load_config(write(tmp_path, config))
    assert [line.split(": ", 1)[1] for line in warnings] == [
        "new_thing: unknown key, not used",
        "quantization_config.newer_thing: unknown key, not used",
    ]


MAY_BE_ABSENT = {"tie_word_embeddings", "attention_bias", "n_shared_experts"}


@pytest.mark.parametrize("key", sorted(set(SMALL_CONFIG) - MAY_BE_ABSENT))
def test_a_missing_key_is_named(tmp_path: Path, key: str):
    config = changed()
    del config[key]
    lines = [line for line in faults(tmp_path, config) if f"/config.json: {key}: " in line]
    assert len(lines) == 1
    assert lines[0].endswith("it is missing")


@pytest.mark.parametrize("key", sorted(MAY_BE_ABSENT))
def test_what_the_tensors_would_show_may_be_absent(tmp_path: Path, key: str):
    config = changed()
    del config[key]
    assert load_config(write(tmp_path, config))[0].num_hidden_layers == 2


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model_type", "mimo_v2_flash", '"mimo_v2"'),
        ("n_group", 2, "1"),
        ("topk_group", 2, "1"),
        ("n_group", True, "1"),
        ("scoring_func", "softmax", '"sigmoid"'),
        ("topk_method", "greedy", '"noaux_tc"'),
        ("norm_topk_prob", False, "true"),
        ("tie_word_embeddings", True, "false"),
        ("attention_bias", True, "false"),
        ("hidden_act", "gelu", '"silu"'),
        ("attention_projection_layout", "split", '"fused_qkv"'),
        ("n_shared_experts", 1, "null"),
        ("vocab_size", "40", "an integer of 1 or more"),
        ("vocab_size", True, "an integer of 1 or more"),
        ("vocab_size", 40.0, "an integer of 1 or more"),
        ("vocab_size", 0, "an integer of 1 or more"),
        ("vocab_size", 2**40, "under 2^31"),
        ("hidden_size", -160, "an integer of 1 or more"),
        ("hidden_size", 161, "a multiple of 32"),
        ("moe_intermediate_size", 48, "a multiple of 32"),
        ("num_experts_per_tok", 4, "at most n_routed_experts (3)"),
        ("swa_head_dim", 40, "head_dim (36)"),
        ("num_attention_heads", 5, "a multiple of num_key_value_heads (2)"),
        ("swa_num_attention_heads", 6, "a multiple of swa_num_key_value_heads (4)"),
        ("swa_num_key_value_heads", 1, "a multiple of num_key_value_heads (2)"),
        ("partial_rotary_factor", 0.2, "even and 2 or more, not 7"),
        ("partial_rotary_factor", 1.5, "at most 1"),
        ("partial_rotary_factor", 0, "above 0"),
        ("attention_value_scale", "0.7", "a number above 0 or null"),
        ("attention_value_scale", True, "a number above 0 or null"),
        ("routed_scaling_factor", -1, "a number above 0 or null"),
        ("layernorm_epsilon", None, "a number above 0"),
        ("layernorm_epsilon", math.inf, "a number above 0"),
        ("layernorm_epsilon", math.nan, "a number above 0"),
        ("rope_theta", 0, "a number above 0"),
        ("add_swa_attention_sink_bias", 1, "true or false"),
        ("sliding_window", 0, "an integer of 1 or more"),
        ("hybrid_layer_pattern", [0, 2], "each 0 or 1"),
        ("hybrid_layer_pattern", [False, True], "each 0 or 1"),
        ("hybrid_layer_pattern", 1, "a list of 2 entries"),
        ("moe_layer_freq", [0, 1, 1], "2 entries (num_hidden_layers), not 3"),
        ("num_hidden_layers", 10**6, "at most 10000"),
        ("eos_token_id", 40, "a token id from 0 to 39"),
        ("eos_token_id", [1, -1], "a token id from 0 to 39"),
        ("eos_token_id", [], "a token id from 0 to 39"),
        ("image_token_id", "x", "a token id from 0 to 39"),
        ("vision_config", [1], "an object or null"),
        ("quantization_config", None, "an object"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, key: str, value: Any, expected: str):
    lines = [line for line in faults(tmp_path, changed(**{key: value})) if f"/config.json: {key}: " in line]
    assert len(lines) == 1
    assert expected in lines[0]
    assert "found" in lines[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [("quant_method", "awq"), ("fmt", "e5m2"), ("weight_block_size", [128, 64]), ("weight_block_size", 128),
     ("store_dtype", "fp8"), ("mxfp4_block_size", 16)],
)  # fmt: skip
def test_another_quantization_is_refused(tmp_path: Path, key: str, value: Any):
    config = changed()
    config["quantization_config"][key] = value
    (line,) = faults(tmp_path, config)
    assert f"quantization_config.{key}: expected " in line
    assert f"found {json.dumps(value)}" in line


def test_all_faults_are_said_at_once(tmp_path: Path):
    config = changed(vocab_size="x", hidden_act="relu", rope_theta=None, sliding_window=-1)
    del config["head_dim"]
    keys = [line.split("config.json: ")[1].split(":")[0] for line in faults(tmp_path, config)]
    assert set(keys) == {"vocab_size", "hidden_act", "rope_theta", "sliding_window", "head_dim"}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("rope_type", "yarn"), ("type", "linear"), ("rope_theta", 5e6), ("partial_rotary_factor", 0.5), ("factor", 4.0)],
)
def test_rope_must_agree_with_the_flat_keys(tmp_path: Path, key: str, name: str, value: Any):
    (line,) = faults(tmp_path, changed(**{key: {"rope_type": "default", name: value}}))
    assert f"{key}.{name}: expected " in line
    assert f"found {json.dumps(value)}" in line


def test_rope_that_agrees_is_read(tmp_path: Path):
    rope = {"rope_type": "default", "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.334}
    load_config(write(tmp_path, changed(rope_parameters=rope, rope_scaling=None)))


def test_null_scales_mean_one(tmp_path: Path):
    config, _ = load_config(write(tmp_path, changed(attention_value_scale=None, routed_scaling_factor=None)))
    assert (config.attention_value_scale, config.routed_scaling_factor) == (1.0, 1.0)


def test_layer_kinds_keep_their_own_numbers(tmp_path: Path):
    keys = {"swa_num_attention_heads": 8, "swa_v_head_dim": 20, "add_full_attention_sink_bias": True}
    config, _ = load_config(write(tmp_path, changed(**keys)))
    full, window = config.layers
    assert (full.num_heads, full.v_head_dim, full.has_sink, full.window) == (4, 36, True, None)
    assert (window.num_heads, window.v_head_dim, window.has_sink, window.window) == (8, 20, True, 5)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model_type": "mimo_v2"', b"null"]
)
def test_what_is_not_an_object_is_refused(tmp_path: Path, text: bytes):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"config\.json: can't be read: No such file"):
        load_config(tmp_path)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.integers(-2, 40)
    | st.floats()
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.sampled_from([*SMALL_CONFIG, "rope_parameters", "vision_config"]), values, max_size=4)
)
def test_any_values_are_read_or_refused(tmp_path: Path, changes: dict[str, Any]):
    path = write(tmp_path, changed(**changes))
    try:
        config, _ = load_config(path)
    except CheckpointError as error:
        assert error.problems and all("\n" not in line for line in error.problems)
        assert len(error.problems) == len(set(error.problems))
        return
    for spec in config.layers:
        assert spec.num_heads % spec.num_kv_heads == 0
        assert spec.num_heads % config.qkv_chunks == spec.num_kv_heads % config.qkv_chunks == 0
    assert config.rope_dim % 2 == 0
    assert config.hidden_size % 32 == config.moe_intermediate_size % 32 == 0
    assert config.num_experts_per_tok <= config.n_routed_experts


def test_generation_config_as_released():
    generation = load_generation_config(DATA / "generation_config.json")
    assert (generation.temperature, generation.top_p) == (1.0, 0.95)
    assert generation.eos_token_ids == (151643, 151645, 151672)


def test_generation_config_absent_or_empty(tmp_path: Path):
    for _ in range(2):
        generation = load_generation_config(tmp_path)
        assert (generation.temperature, generation.top_p, generation.eos_token_ids) == (1.0, 1.0, None)
        (tmp_path / "generation_config.json").write_text("{}")


def test_generation_config_refuses_by_name(tmp_path: Path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": -1, "top_p": "x", "eos_token_id": [1, None]}))
    with pytest.raises(CheckpointError) as caught:
        load_generation_config(path)
    assert [line.split(".json: ")[1].split(":")[0] for line in caught.value.problems] == [
        "temperature", "top_p", "eos_token_id",
    ]  # fmt: skip
    assert "temperature: expected a number from 0, at most 100, found -1" in caught.value.problems[0]
    path.write_text(json.dumps({"temperature": 0, "eos_token_id": 7}))
    generation = load_generation_config(path)
    assert (generation.temperature, generation.eos_token_ids) == (0.0, (7,))
