"""The tree of weights: each tensor used once, the two qkv grids, and every fault named with its place."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from mimo_vk.checkpoint import Checkpoint
from mimo_vk.config import load_config
from mimo_vk.errors import CheckpointError
from mimo_vk.formats import E4M3FN, MatrixBF16, MatrixF32, MatrixFP8, MatrixInt8, dequantize, quantize_int8
from mimo_vk.weight_check import Checked, check_tensors
from mimo_vk.weights import Weights, check_names, load_weights
from tests.build import (
    DENSE_INNER,
    EXPERTS,
    FULL_ROWS,
    HIDDEN,
    INNER,
    O_COLUMNS,
    SMALL_CONFIG,
    VOCAB,
    WINDOW_ROWS,
    Tensor,
    bf16,
    f32,
    small_tensors,
    write_model,
    write_sharded,
)

FULL_QKV = "model.layers.0.self_attn.qkv_proj.weight"
WINDOW_QKV = "model.layers.1.self_attn.qkv_proj.weight"
SINK = "model.layers.1.self_attn.attention_sink_bias"
EXPERT = "model.layers.1.mlp.experts.2."


def load(directory: Path, dense_bits: int = 0) -> Weights:
    config, _ = load_config(directory)
    return load_weights(Checkpoint.open(directory), config, dense_bits)


def loaded(tmp_path: Path, changes: dict[str, Tensor] | None = None, dense_bits: int = 0) -> Weights:
    return load(write_model(tmp_path, small_tensors() | (changes or {})), dense_bits)


def faults(tmp_path: Path, tensors: dict[str, Tensor], dense_bits: int = 0) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load(write_model(tmp_path, tensors), dense_bits)
    return caught.value.problems


def patched(tensor: Tensor, at: int, data: bytes) -> Tensor:
    dtype, shape, old = tensor
    return dtype, shape, old[:at] + data + old[at + len(data) :]


# What the tree holds


def test_every_tensor_is_where_it_belongs(tmp_path: Path):
    tensors, weights = small_tensors(), loaded(tmp_path)

    def stored(name: str) -> bytes:
        return tensors[name][2]

    assert weights.embed.data.tobytes() == stored("model.embed_tokens.weight")
    assert isinstance(weights.lm_head, MatrixBF16)
    assert weights.lm_head.data.tobytes() == stored("lm_head.weight")
    full, window = weights.layers
    for layer in (full, window):
        at = f"model.layers.{layer.spec.index}."
        assert isinstance(layer.attention.qkv_proj, MatrixFP8)
        assert layer.attention.qkv_proj.codes.tobytes() == stored(at + "self_attn.qkv_proj.weight")
        assert layer.attention.qkv_proj.scales.tobytes() == stored(at + "self_attn.qkv_proj.weight_scale_inv")
        assert isinstance(layer.attention.o_proj, MatrixBF16)
        assert layer.attention.o_proj.data.tobytes() == stored(at + "self_attn.o_proj.weight")
        for norm, name in ((layer.input_norm, "input"), (layer.post_attention_norm, "post_attention")):
            assert norm.dtype == np.float32
            assert (norm.view("<u4") >> 16).astype("<u2").tobytes() == stored(f"{at}{name}_layernorm.weight")
    assert (full.mlp is not None, full.router, window.mlp, window.router is not None) == (True, None, None, True)
    assert full.mlp is not None and window.router is not None
    for name in ("gate", "up", "down"):
        matrix = getattr(full.mlp, name)
        assert matrix.codes.tobytes() == stored(f"model.layers.0.mlp.{name}_proj.weight")
        assert matrix.scale_row.tolist() == [row // 128 for row in range(matrix.shape[0])]
    assert full.mlp.down.shape == (HIDDEN, DENSE_INNER)
    assert window.router.gate.data.tobytes() == stored("model.layers.1.mlp.gate.weight")
    assert window.router.bias.tobytes() == stored("model.layers.1.mlp.gate.e_score_correction_bias")
    assert full.attention.sink is None
    assert window.attention.sink is not None
    assert (window.attention.sink.view("<u4") >> 16).astype("<u2").tobytes() == stored(SINK)
    assert weights.skipped == []


def test_layouts_name_the_chunks(tmp_path: Path):
    full, window = (layer.attention.layout for layer in loaded(tmp_path).layers)
    assert (full.chunks, full.num_heads, full.num_kv_heads, full.head_dim, full.v_head_dim) == (2, 4, 2, 36, 36)
    assert (window.chunks, window.num_heads, window.num_kv_heads) == (2, 4, 4)


def test_dense_weights_are_the_mapped_file(tmp_path: Path):
    directory = write_model(tmp_path, small_tensors())
    checkpoint = Checkpoint.open(directory)
    weights = load_weights(checkpoint, load_config(directory)[0])
    qkv = weights.layers[0].attention.qkv_proj
    assert isinstance(qkv, MatrixFP8)
    assert np.shares_memory(qkv.codes, checkpoint.mapped(FULL_QKV))
    assert np.shares_memory(weights.embed.data, checkpoint.mapped("model.embed_tokens.weight"))


def test_the_expert_table_knows_places_and_packing(tmp_path: Path):
    tensors = small_tensors()
    table = loaded(tmp_path).experts
    assert (list(table), len(table[1])) == ([1], EXPERTS)
    assert table.expert_bytes == 3 * HIDDEN * INNER // 2 + 3 * HIDDEN * INNER // 32
    location = table[1][2]
    assert location.contiguous
    content = (tmp_path / "odd name.safetensors").read_bytes()
    parts = ["down_proj.weight", "down_proj.weight_scale", "gate_proj.weight", "gate_proj.weight_scale",
             "up_proj.weight", "up_proj.weight_scale"]  # fmt: skip
    assert [part.name for part in location.parts] == [EXPERT + part for part in parts]
    for part in location.parts:
        assert content[part.offset : part.offset + part.nbytes] == tensors[part.name][2]
    assert [e.parts[0].name for e in table[1]] == [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(3)]


def test_weight_and_scale_in_different_files(tmp_path: Path):
    tensors = small_tensors()
    scales = {name: t for name, t in tensors.items() if "scale" in name}
    directory = write_model(tmp_path, tensors)
    write_sharded(directory, {"w": {n: t for n, t in tensors.items() if n not in scales}, "s": scales})
    weights = load(directory)
    assert not weights.experts[1][0].contiguous
    assert {part.path.name for part in weights.experts[1][0].parts} == {"w", "s"}
    qkv = weights.layers[0].attention.qkv_proj
    assert isinstance(qkv, MatrixFP8)
    assert qkv.scales.tobytes() == scales[FULL_QKV + "_scale_inv"][2]


def test_expert_parts_in_another_order_are_not_contiguous(tmp_path: Path):
    tensors = small_tensors()
    names = list(tensors)
    i, j = names.index(EXPERT + "gate_proj.weight"), names.index(EXPERT + "up_proj.weight")
    names[i], names[j] = names[j], names[i]
    table = load(write_model(tmp_path, {name: tensors[name] for name in names})).experts
    assert [location.contiguous for location in table[1]] == [True, True, False]


def test_expert_scales_may_read_as_e8m0(tmp_path: Path):
    tensors = {n: ("F8_E8M0", t[1], t[2]) if n.endswith("weight_scale") else t for n, t in small_tensors().items()}
    assert load(write_model(tmp_path, tensors)).experts[1][0].parts[1].dtype == "F8_E8M0"


# The qkv grids


def scale_rows(weights: Weights, layer: int) -> list[int]:
    qkv = weights.layers[layer].attention.qkv_proj
    assert isinstance(qkv, MatrixFP8)
    return [int(v) for v in qkv.scale_row]


def test_the_grid_restarts_at_each_chunk(tmp_path: Path):
    """Full: chunks of 144 rows, so 128 + 16 rows a chunk. Window: 216 rows, 128 + 88."""
    weights = loaded(tmp_path)
    assert scale_rows(weights, 0) == [0] * 128 + [1] * 16 + [2] * 128 + [3] * 16
    assert scale_rows(weights, 1) == [0] * 128 + [1] * 88 + [2] * 128 + [3] * 88


def test_one_grid_over_all_rows_where_the_count_says_so(tmp_path: Path):
    weights = loaded(tmp_path, {FULL_QKV + "_scale_inv": f32((3, 2), 5)})
    assert scale_rows(weights, 0) == [0] * 128 + [1] * 128 + [2] * 32


@pytest.mark.parametrize(
    ("name", "rows", "legal"),
    [
        (FULL_QKV, 5, "[4, 2] or [3, 2]"),
        (FULL_QKV, 2, "[4, 2] or [3, 2]"),
        (WINDOW_QKV, 3, "[4, 2]"),
        (WINDOW_QKV, 6, "[4, 2]"),
    ],
)
def test_any_other_count_is_refused(tmp_path: Path, name: str, rows: int, legal: str):
    scale = name + "_scale_inv"
    assert faults(tmp_path, small_tensors() | {scale: f32((rows, 2), 5)}) == [
        f"{tmp_path}/model_pp0_ep0_shard0.safetensors: tensor {scale}: expected F32 {legal}, found F32 [{rows}, 2]"
    ]


def test_qkv_decodes_with_its_own_scale(tmp_path: Path):
    tensors, weights = small_tensors(), loaded(tmp_path)
    codes = np.frombuffer(tensors[FULL_QKV][2], np.uint8).reshape(FULL_ROWS, HIDDEN)
    scales = np.frombuffer(tensors[FULL_QKV + "_scale_inv"][2], "<f4").reshape(4, 2)
    decoded = dequantize(weights.layers[0].attention.qkv_proj)
    for row, scale_row in ((0, 0), (127, 0), (128, 1), (143, 1), (144, 2), (271, 2), (272, 3), (287, 3)):
        for column in (0, 127, 128, 159):
            assert decoded[row, column] == E4M3FN[codes[row, column]] * scales[scale_row, column // 128]


# Names


@pytest.mark.parametrize("name", ["model.norm.weight", SINK, FULL_QKV, EXPERT + "up_proj.weight_scale"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str):
    tensors = small_tensors()
    del tensors[name]
    assert faults(tmp_path, tensors) == [f"{tmp_path}: tensor {name}: missing"]


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.attention_sink_bias", "lm_head.bias",
     "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.3.up_proj.weight", FULL_QKV + "_scale"],
)  # fmt: skip
def test_an_unknown_tensor_is_refused(tmp_path: Path, name: str):
    (line,) = faults(tmp_path, small_tensors() | {name: bf16((4,), 0)})
    assert line.startswith(f"{tmp_path}/")
    assert f": tensor {name}: unknown: " in line


def test_what_other_parts_of_the_release_use_is_skipped(tmp_path: Path):
    names = ["visual.blocks.0.norm1.weight", "model.visual.x", "audio_encoder.x", "speech_embeddings.3.weight",
             "model.mtp.layers.0.x", "mtp.x", "dflash.x"]  # fmt: skip
    weights = loaded(tmp_path, {name: bf16((4,), 0) for name in names})
    assert weights.skipped == sorted(names)


def test_what_lies_in_the_optional_files_is_skipped_there_or_not(tmp_path: Path):
    tensors = small_tensors()
    write_model(tmp_path, tensors)
    write_sharded(tmp_path, {"all": tensors, "model_mtp.safetensors": {"model.layers.9.x": bf16((4,), 0)}})
    assert load(tmp_path).skipped == ["model.layers.9.x"]
    (tmp_path / "model_mtp.safetensors").unlink()
    assert load(tmp_path).skipped == ["model.layers.9.x"]


def test_a_needed_tensor_in_an_absent_optional_file_is_told(tmp_path: Path):
    tensors = small_tensors()
    write_model(tmp_path, tensors)
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    write_sharded(tmp_path, {"all": tensors, "model_mtp.safetensors": head})
    assert load(tmp_path).lm_head.shape == (VOCAB, HIDDEN)
    (tmp_path / "model_mtp.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor lm_head.weight: missing: the index puts it in model_mtp"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("lm_head.weight", bf16((VOCAB + 1, HIDDEN), 0), f"BF16 [40, {HIDDEN}], found BF16 [41, {HIDDEN}]"),
        ("lm_head.weight", f32((VOCAB, HIDDEN), 0), f"BF16 [{VOCAB}, {HIDDEN}], found F32 [{VOCAB}, {HIDDEN}]"),
        (SINK, bf16((8,), 0), "BF16 [4], found BF16 [8]"),
        (WINDOW_QKV, ("U8", (WINDOW_ROWS, HIDDEN), bytes(WINDOW_ROWS * HIDDEN)),
         f"F8_E4M3 [{WINDOW_ROWS}, {HIDDEN}], found U8 [{WINDOW_ROWS}, {HIDDEN}]"),
        (EXPERT + "gate_proj.weight", ("U8", (HIDDEN, 16), bytes(HIDDEN * 16)), "U8 [32, 80], found U8 [160, 16]"),
        (EXPERT + "gate_proj.weight_scale", f32((INNER, HIDDEN // 32), 0), "U8 or F8_E8M0 [32, 5], found F32 [32, 5]"),
    ],
)  # fmt: skip
def test_a_wrong_shape_or_dtype_is_told(tmp_path: Path, name: str, tensor: Tensor, expected: str):
    (line,) = faults(tmp_path, small_tensors() | {name: tensor})
    assert f".safetensors: tensor {name}: expected {expected}" in line


def test_all_faults_of_the_names_are_told_with_a_count(tmp_path: Path):
    tensors = {n: t for n, t in small_tensors().items() if ".experts." not in n}
    tensors["extra"] = bf16((4,), 0)
    lines = faults(tmp_path, tensors | {"lm_head.weight": bf16((1, HIDDEN), 0), EXPERT + "x": bf16((1,), 0)})
    assert len([line for line in lines if line.endswith(": missing")]) == 18  # all six of each of three experts
    assert len(lines) == 21
    tensors = {n: t for n, t in small_tensors().items() if "experts" not in n and "layers.0" not in n}
    tensors[EXPERT + "x"] = bf16((1,), 0)
    lines = faults(tmp_path / "more", tensors)
    assert sum(line.endswith(": missing") for line in lines) == 20
    assert "... and 9 more like these, 29 in all" in lines


# Numbers that no checkpoint may hold


def test_a_nan_code_is_told_with_its_place(tmp_path: Path):
    for code, row, column in ((0x7F, 200, 33), (0xFF, FULL_ROWS - 1, HIDDEN - 1), (0x7F, 0, 0)):
        broken = patched(small_tensors()[FULL_QKV], row * HIDDEN + column, bytes([code]))
        assert faults(tmp_path, small_tensors() | {FULL_QKV: broken}) == [
            f"{tmp_path}/model_pp0_ep0_shard0.safetensors: tensor {FULL_QKV}: row {row}, column {column}: "
            f"FP8 code 0x{code:02X} is NaN"
        ]


def test_the_largest_codes_are_no_nan(tmp_path: Path):
    broken = patched(small_tensors()[FULL_QKV], 0, b"\x7e\xfe\x00\x80")
    assert dequantize(loaded(tmp_path, {FULL_QKV: broken}).layers[0].attention.qkv_proj).shape[0] == FULL_ROWS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dense_bits", [0, 8, 32])
def test_a_scale_that_is_not_finite_is_told(tmp_path: Path, value: float, dense_bits: int):
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    lines = faults(
        tmp_path, small_tensors() | {name: patched(small_tensors()[name], 12, struct.pack("<f", value))}, dense_bits
    )
    assert (
        f"{tmp_path}/model_pp0_ep0_shard0.safetensors: tensor {name}: row 1, column 1: "
        f"expected a finite number, found {value}" in lines
    )


@pytest.mark.parametrize(
    ("name", "index", "code", "place"),
    [
        ("lm_head.weight", 3 * HIDDEN + 7, 0x7FC0, "row 3, column 7: bfloat16 0x7FC0 is NaN"),
        ("model.layers.1.self_attn.o_proj.weight", O_COLUMNS, 0xFF80, "row 1, column 0: bfloat16 0xFF80 is infinite"),
        ("model.layers.1.mlp.gate.weight", 5, 0x7F80, "row 0, column 5: bfloat16 0x7F80 is infinite"),
        ("model.norm.weight", 159, 0xFF81, "element 159: bfloat16 0xFF81 is NaN"),
        (SINK, 2, 0x7F80, "element 2: bfloat16 0x7F80 is infinite"),
    ],
)
def test_bfloat16_that_is_not_finite_is_told(tmp_path: Path, name: str, index: int, code: int, place: str):
    broken = patched(small_tensors()[name], 2 * index, code.to_bytes(2, "little"))
    (line,) = faults(tmp_path, small_tensors() | {name: broken})
    assert line.endswith(f"tensor {name}: {place}")


def test_pieces_and_blocks_give_the_same_places(monkeypatch: pytest.MonkeyPatch):
    """A NaN at each place in turn, with the array cut every way into stored stretches, pieces and blocks."""
    for dtype, good, bad in (("<u2", 0x3F80, 0x7F80), ("u1", 0x7E, 0xFF)):
        for block, piece in ((1, 2), (3, 10), (64, 4096)):
            monkeypatch.setattr("mimo_vk.weight_check.BLOCK", block)
            monkeypatch.setattr("mimo_vk.weight_check.PIECE", piece)
            for place in range(35):
                array = np.full((5, 7), good, dtype)
                array[place // 7, place % 7] = bad
                whole, cut = [(0, array.nbytes)], [(0, 11), (11, 12), (12, array.nbytes)]
                for ranges in (whole, cut):
                    (line,) = check_tensors([Checked("t", array, ranges)])
                    assert f"t: row {place // 7}, column {place % 7}: " in line
    kernels = np.zeros((4, 3, 2, 2, 2), np.uint16)  # as a picture tower's first matrix lies in the file
    kernels[2, 1, 0, 1, 1] = 0x7F80
    (line,) = check_tensors([Checked("t", kernels, [(0, kernels.nbytes)])])
    assert line == "t: element 2, 1, 0, 1, 1: bfloat16 0x7F80 is infinite"
    assert check_tensors([Checked("t", np.full((5, 7), 0x7E, np.uint8), [(0, 35)])]) == []
    assert check_tensors([Checked("t", np.full((5, 7), 0x7F7F, np.uint16), [(0, 70)])]) == []


def test_each_faulty_tensor_is_told_once(tmp_path: Path):
    tensors = small_tensors()
    names = [FULL_QKV, WINDOW_QKV, "lm_head.weight"]
    broken = {name: (tensors[name][0], tensors[name][1], b"\xff" * len(tensors[name][2])) for name in names}
    lines = faults(tmp_path, tensors | broken)
    assert [line.split("tensor ")[1].split(":")[0] for line in lines] == names


# --dense-bits


def each_dense(weights: Weights) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = [("head", weights.lm_head)]
    for layer in weights.layers:
        found += [("qkv", layer.attention.qkv_proj), ("o", layer.attention.o_proj)]
        if layer.mlp is not None:
            found += [("mlp", m) for m in (layer.mlp.gate, layer.mlp.up, layer.mlp.down)]
    return found


@pytest.mark.parametrize(("dense_bits", "kind"), [(8, MatrixInt8), (32, MatrixF32)])
def test_dense_bits_change_the_dense_matrices_only(tmp_path: Path, dense_bits: int, kind: type):
    exact, other = loaded(tmp_path), load(tmp_path, dense_bits)
    for (name, matrix), (_, changed) in zip(each_dense(exact), each_dense(other), strict=True):
        assert type(changed) is kind, name
        values = dequantize(matrix)  # type: ignore[arg-type]
        if isinstance(changed, MatrixF32):
            assert changed.data.tobytes() == values.tobytes(), name
        elif isinstance(changed, MatrixInt8):
            expected = quantize_int8(values)
            assert changed.codes.tobytes() == expected.codes.tobytes(), name
            assert changed.scales.tobytes() == expected.scales.tobytes(), name
    router = other.layers[1].router
    assert router is not None
    assert isinstance(router.gate, MatrixBF16)
    assert isinstance(other.embed, MatrixBF16)


def test_conversion_by_blocks_equals_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = loaded(tmp_path, dense_bits=8)
    monkeypatch.setattr("mimo_vk.weights._BLOCK", 4 * HIDDEN * 7)
    for (name, a), (_, b) in zip(each_dense(whole), each_dense(load(tmp_path, 8)), strict=True):
        assert isinstance(a, MatrixInt8) and isinstance(b, MatrixInt8)
        assert (a.codes == b.codes).all() and (a.scales == b.scales).all(), name


@pytest.mark.parametrize("dense_bits", [8, 32])
def test_conversion_tells_the_place_of_a_nan(tmp_path: Path, dense_bits: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mimo_vk.weights._BLOCK", 4 * HIDDEN * 7)
    broken = patched(small_tensors()[FULL_QKV], 200 * HIDDEN + 33, b"\xff")
    (line,) = faults(tmp_path, small_tensors() | {FULL_QKV: broken}, dense_bits)
    assert line.endswith(f"tensor {FULL_QKV}: row 200, column 33: expected a finite number, found nan")


def steps_of(directory: Path, dense_bits: int) -> list[tuple[str, int, int]]:
    steps: list[tuple[str, int, int]] = []
    config, _ = load_config(directory)
    load_weights(Checkpoint.open(directory), config, dense_bits, lambda *step: steps.append(step))
    return steps


def test_progress_counts_to_the_total(tmp_path: Path):
    directory = write_model(tmp_path, small_tensors())
    for dense_bits in (0, 8):
        steps = steps_of(directory, dense_bits)
        for what in {step[0] for step in steps}:
            done = [step[1] for step in steps if step[0] == what]
            assert done == sorted(done)
            assert done[-1] == next(step[2] for step in steps if step[0] == what)


# Whole checkpoints


def test_the_tiny_checkpoint_loads_and_skips_sound(tiny_checkpoint: Path):
    weights = load(tiny_checkpoint)
    assert len(weights.layers) == weights.config.num_hidden_layers
    assert weights.vision is not None and len(weights.vision.blocks) == 4
    assert weights.skipped
    assert all(name.startswith(("audio", "speech", "model.mtp", "mtp")) for name in weights.skipped)


def test_names_are_checked_without_reading_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = write_model(tmp_path, small_tensors())
    checkpoint = Checkpoint.open(directory)
    monkeypatch.setattr(Checkpoint, "read", None)
    monkeypatch.setattr(Checkpoint, "mapped", None)
    table, skipped = check_names(checkpoint, load_config(directory)[0])
    assert (len(table[1]), skipped) == (EXPERTS, [])
    assert SMALL_CONFIG["n_routed_experts"] == EXPERTS
