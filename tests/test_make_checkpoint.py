"""What make_checkpoint writes, read back with nothing but json and struct: the claims that the reader relies on."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.checkpoint.contents import Contents
from tools.checkpoint.geometry import find_geometry
from tools.checkpoint.layout import files
from tools.make_checkpoint import make

TINY_SHA256 = "31cf1c01a7ae7030d5eb31184817778e964d461f4cb0ab76d665810c15e269ea"
TEMPLATE_SHA256 = "11ea52e156de38a458e6b7720ad45915d65b97d4ec979a09f55e3c9bd1b4d059"  # the release's file


@dataclass(frozen=True)
class Stored:
    """A tensor as its file's header has it; ``start`` counts from the file's first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def data(self) -> np.ndarray:
        with self.path.open("rb") as file:
            file.seek(self.start)
            return np.frombuffer(file.read(self.end - self.start), np.uint8)


def read_headers(model: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        assert header.pop("__metadata__") == {"format": "pt"}
        end = 0
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            assert start == end and name not in found  # back to back, and once in all files
            end = stop
            found[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, 8 + length + stop)
        assert path.stat().st_size == 8 + length + end
    return found


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def stored(tiny_checkpoint: Path) -> dict[str, Stored]:
    return read_headers(tiny_checkpoint)


def test_same_bytes_for_the_same_seed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        total = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            total.update(path.name.encode() + b"\0" + path.read_bytes())
        return total.hexdigest()

    assert digest(tiny_checkpoint) == TINY_SHA256
    make(tmp_path / "other", "tiny", seed=1)
    assert digest(tmp_path / "other") != TINY_SHA256


def test_names_dtypes_and_shapes(stored: dict[str, Stored]) -> None:
    """hidden 256, 16 heads of 24/16, 2 kv heads (4 in windows), experts of 64, layer 0 dense with 384."""
    expected = {
        "model.embed_tokens.weight": ("BF16", (600, 256)),
        "lm_head.weight": ("BF16", (600, 256)),
        "model.norm.weight": ("BF16", (256,)),
        "model.layers.0.input_layernorm.weight": ("BF16", (256,)),
        "model.layers.5.post_attention_layernorm.weight": ("BF16", (256,)),
        # 16*24 + 2*(24+16) = 464 rows in 2 chunks of 232, 2 scale rows each
        "model.layers.0.self_attn.qkv_proj.weight": ("F8_E4M3", (464, 256)),
        "model.layers.0.self_attn.qkv_proj.weight_scale_inv": ("F32", (4, 2)),
        # 16*24 + 4*(24+16) = 544 rows in 2 chunks of 272, 3 scale rows each
        "model.layers.1.self_attn.qkv_proj.weight": ("F8_E4M3", (544, 256)),
        "model.layers.1.self_attn.qkv_proj.weight_scale_inv": ("F32", (6, 2)),
        "model.layers.1.self_attn.o_proj.weight": ("BF16", (256, 256)),
        "model.layers.1.self_attn.attention_sink_bias": ("BF16", (16,)),
        "model.layers.0.mlp.gate_proj.weight": ("F8_E4M3", (384, 256)),
        "model.layers.0.mlp.gate_proj.weight_scale_inv": ("F32", (3, 2)),
        "model.layers.0.mlp.down_proj.weight": ("F8_E4M3", (256, 384)),
        "model.layers.0.mlp.down_proj.weight_scale_inv": ("F32", (2, 3)),
        "model.layers.2.mlp.gate.weight": ("BF16", (16, 256)),
        "model.layers.2.mlp.gate.e_score_correction_bias": ("F32", (16,)),
        "model.layers.2.mlp.experts.15.up_proj.weight": ("U8", (64, 128)),
        "model.layers.2.mlp.experts.15.up_proj.weight_scale": ("U8", (64, 8)),
        "model.layers.2.mlp.experts.15.down_proj.weight": ("U8", (256, 32)),
        "model.layers.2.mlp.experts.15.down_proj.weight_scale": ("U8", (256, 2)),
        "visual.patch_embed.proj.weight": ("BF16", (64, 3, 2, 16, 16)),
        "visual.merger.mlp.2.weight": ("BF16", (256, 256)),
    }
    for name, claim in expected.items():
        assert (stored[name].dtype, stored[name].shape) == claim, name
    windows = {name.split(".")[2] for name in stored if name.endswith("attention_sink_bias")}
    assert windows == {"1", "2", "4"}
    # 3 + 6 layers * 5 + 3 sinks + 6 dense + 5 * (2 + 16 * 6), 4 blocks * 12 + 2 sinks + 4 of the tower, 3 of audio
    assert len(stored) == 3 + 30 + 3 + 6 + 5 * 98 + 54 + 3


def test_files_and_index(tiny_checkpoint: Path, stored: dict[str, Stored]) -> None:
    index = load(tiny_checkpoint / "model.safetensors.index.json")
    assert index["weight_map"] == {name: tensor.path.name for name, tensor in stored.items()}
    assert index["metadata"] == {"total_size": sum(t.end - t.start for t in stored.values()), "tp_size": 2}
    first = "model_pp0_ep0_shard0.safetensors"
    others = {"model_pp0_ep0_shard1", "model_pp0_ep1_shard0", "model_pp0_ep2_shard0", "model_pp0_ep3_shard0"}
    for name, tensor in stored.items():
        assert (tensor.path.name == first) != (".experts." in name), name
    assert {t.path.stem for name, t in stored.items() if ".experts." in name} == others


def test_an_expert_is_one_run_of_bytes(stored: dict[str, Stored]) -> None:
    for layer in range(1, 6):
        for expert in range(16):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            parts = [
                stored[f"{prefix}.{part}_proj.{kind}"]
                for part in ("down", "gate", "up")
                for kind in ("weight", "weight_scale")
            ]
            assert len({part.path for part in parts}) == 1
            assert all(a.end == b.start for a, b in pairwise(parts)), prefix


def qkv_cells(codes: np.ndarray, starts: list[int]) -> list[np.ndarray]:
    """Cells of up to 128 rows that begin at ``starts``, by 128 columns."""
    bounds = [*starts, len(codes)]
    rows = [codes[a:b] for a, b in pairwise(bounds)]
    return [part[:, c : c + 128] for part in rows for c in range(0, codes.shape[1], 128)]


@pytest.mark.parametrize(("layer", "chunk"), [(0, 232), (1, 272)])
def test_every_cell_of_the_chunked_grid_peaks_at_448(stored: dict[str, Stored], layer: int, chunk: int) -> None:
    tensor = stored[f"model.layers.{layer}.self_attn.qkv_proj.weight"]
    codes = tensor.data().reshape(tensor.shape) & 0x7F
    chunked = [first + row for first in (0, chunk) for row in range(0, chunk, 128)]
    assert [cell.max() for cell in qkv_cells(codes, chunked)] == [0x7E] * (2 * len(chunked))


def test_dense_cells_peak_and_no_code_is_nan(stored: dict[str, Stored]) -> None:
    for name, tensor in stored.items():
        if tensor.dtype != "F8_E4M3":
            continue
        codes = tensor.data().reshape(tensor.shape) & 0x7F
        assert codes.max() == 0x7E, name
        scale = stored[f"{name}_scale_inv"].data().view("<f4")
        assert np.isfinite(scale).all() and (scale > 0).all(), name
        assert scale.max() > 1.3 * scale.min(), name  # cells differ, so that a wrong grid is seen
        if ".mlp." in name:
            assert all(cell.max() == 0x7E for cell in qkv_cells(codes, list(range(0, tensor.shape[0], 128)))), name


def test_expert_codes_and_scales_are_spread(stored: dict[str, Stored]) -> None:
    prefix = "model.layers.3.mlp.experts.7.gate_proj"
    codes = stored[f"{prefix}.weight"].data()
    assert set(codes & 15) == set(codes >> 4) == set(range(16))
    scales = stored[f"{prefix}.weight_scale"].data()
    assert len(set(scales)) == 4 and 100 < scales.min() < scales.max() < 135


def test_numbers_that_decide_the_traps(stored: dict[str, Stored]) -> None:
    def widened(name: str) -> np.ndarray:
        return (stored[name].data().view("<u2").astype("<u4") << 16).view("<f4")

    sinks = np.concatenate([widened(f"model.layers.{i}.self_attn.attention_sink_bias") for i in (1, 2, 4)])
    assert 1.4 < sinks.std() < 2.6
    bias = stored["model.layers.1.mlp.gate.e_score_correction_bias"].data().view("<f4")
    assert 0.05 < bias.std() < 0.3
    head = widened("lm_head.weight").reshape(600, 256)
    assert head[552:].std() > 1.8 * head[:552].std()  # the rows past the tokenizer would win


def test_config_has_the_release_keys_and_its_own_numbers(tiny_checkpoint: Path, project_root: Path) -> None:
    config = load(tiny_checkpoint / "config.json")
    assert config.keys() == load(project_root / "tools" / "data" / "config.json").keys()
    wanted = {
        "model_type": "mimo_v2",
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "num_key_value_heads": 2,
        "swa_num_key_value_heads": 4,
        "attention_value_scale": 0.612,
        "layernorm_epsilon": 1e-3,
        "rope_theta": 10000000,
        "swa_rope_theta": 10000,
        "sliding_window": 128,
        "vocab_size": 600,
        "eos_token_id": 522,
        "image_token_id": 532,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert int(config["head_dim"] * config["partial_rotary_factor"]) == 8
    assert load(tiny_checkpoint / "generation_config.json")["eos_token_id"] == [520, 522, 549]


def test_template_is_the_release_file(tiny_checkpoint: Path) -> None:
    assert hashlib.sha256((tiny_checkpoint / "chat_template.jinja").read_bytes()).hexdigest() == TEMPLATE_SHA256


def test_tokenizer_loads_and_is_shorter_than_the_vocabulary(tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 552 < load(tiny_checkpoint / "config.json")["vocab_size"]
    assert (tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|mimo_audio_end|>")) == (521, 551)
    text = "Hello the 123 \u4f60\u597d \U0001f600 caf\u00e9\n\n  don't<|im_end|>"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.tokens[:2] == ["Hello", "\u0120the"]  # merged
    assert {"1", "2", "3"} <= set(encoded.tokens)  # digits one by one
    assert encoded.ids[-1] == 522
    assert tokenizer.encode("cafe\u0301").ids == tokenizer.encode("caf\u00e9").ids  # NFC
    assert tokenizer.decode(tokenizer.encode("<|im_end|>").ids, skip_special_tokens=True) == ""
    assert tokenizer.decode(tokenizer.encode("<think>").ids, skip_special_tokens=True) == "<think>"


def test_flash_sparse_has_the_release_tensors_and_little_on_disk(tmp_path: Path) -> None:
    make(tmp_path / "flash", "flash-sparse")
    stored = read_headers(tmp_path / "flash")
    audio = [name for name in stored if name.startswith(("audio_encoder.", "speech_embeddings."))]
    assert (len(stored) - len(audio), len(audio)) == (72_938, 143)
    assert sum(name.startswith("visual.") for name in stored) == 364
    paths = list((tmp_path / "flash").glob("*.safetensors"))
    assert len(paths) == 65
    assert sum(path.stat().st_size for path in paths) > 170e9
    assert sum(path.stat().st_blocks * 512 for path in paths) < 150e6
    shapes = {
        "model.layers.0.self_attn.qkv_proj.weight": (13568, 4096),
        "model.layers.0.self_attn.qkv_proj.weight_scale_inv": (108, 32),
        "model.layers.1.self_attn.qkv_proj.weight": (14848, 4096),
        "model.layers.1.self_attn.qkv_proj.weight_scale_inv": (116, 32),
        "model.layers.47.mlp.experts.255.down_proj.weight_scale": (4096, 64),
    }
    assert {name: stored[name].shape for name in shapes} == shapes
    expert = [t for name, t in stored.items() if name.startswith("model.layers.5.mlp.experts.9.")]
    assert max(t.end for t in expert) - min(t.start for t in expert) == 12.75 * 2**20
    router = stored["model.layers.30.mlp.gate.weight"].data()
    assert len(np.unique(router[:4096])) > 100  # written
    assert not stored["model.layers.30.mlp.experts.3.up_proj.weight"].data().any()  # a hole


def test_slice_has_true_dimensions_and_peaking_cells() -> None:
    """From the contents as they are generated: the files would be gigabytes."""
    g = find_geometry("flash-slice", experts=8)
    contents = Contents(g, seed=0)
    specs = {spec.name: spec for tensors in files(g).values() for spec in tensors}
    codes = np.zeros(13568 * 4096, np.uint8)
    for offset, data in contents.pieces(specs["model.layers.0.self_attn.qkv_proj.weight"]):
        codes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    starts = [chunk + row for chunk in range(0, 13568, 3392) for row in range(0, 3392, 128)]
    assert [cell.max() for cell in qkv_cells(codes.reshape(13568, 4096) & 0x7F, starts)] == [0x7E] * (108 * 32)
    ((offset, scales),) = contents.pieces(specs["model.layers.0.self_attn.qkv_proj.weight_scale_inv"])
    assert (offset, len(scales)) == (0, 108 * 32 * 4)
    head = b"".join(data for _, data in islice(contents.pieces(specs["lm_head.weight"]), 20))
    rows = np.frombuffer(head, np.uint8)[: 20_000 * 8192].reshape(20_000, 8192)
    assert len(np.unique(rows[:, :16], axis=0)) > 19_990  # tiled, and yet hardly a row twice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"geometry": "huge"}, "geometry 'huge'"),
        ({"geometry": "tiny", "experts": 3}, "experts 3: tiny has 4 to 16"),
        ({"geometry": "tiny", "layers": 7}, "layers 7: tiny has 1 to 6"),
    ],
)
def test_refuses_what_it_cannot_make(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out", **change)


def test_refuses_a_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        make(tmp_path, "tiny")
    assert (tmp_path / "note").read_text() == "mine"
