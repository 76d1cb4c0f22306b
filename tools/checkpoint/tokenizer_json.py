"""A byte-level BPE tokenizer with the release's control tokens, as the JSON that the ``tokenizers`` package reads."""

from __future__ import annotations

from typing import Any

from tools.checkpoint.geometry import Geometry

# In the release's order: there the first has id 151643 and the last 151674.
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_pad|>",
    "<|mimo_video_start|>",
    "<|mimo_video_end|>",
    "<|mimo_audio_eod|>",
    "<|mimo_audio_start|>",
    "<|mimo_audio_end|>",
)
# Control tokens that are ordinary text to a decoder that drops special tokens.
_NOT_SPECIAL = frozenset(t for t in CONTROL_TOKENS if not t.startswith("<|") or "fim_" in t) | {
    "<|repo_name|>",
    "<|file_sep|>",
}

# Letters, one digit at a time, punctuation, line ends, blanks: the split of Qwen2's tokenizer.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Pairs of text, then pairs of bytes that join a character (e acute, an ideograph) or half of one (an emoji).
_MERGES = (
    (" ", "t"), ("h", "e"), (" t", "he"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), ("r", "e"), (" ", "a"),
    (" ", "s"), ("o", "u"), ("i", "s"), ("a", "t"), (" ", "w"), ("e", "n"), ("o", "r"), ("i", "t"), ("in", "g"),
    (" ", "o"), (" a", "n"), (" an", "d"), ("l", "l"), ("e", "s"), (" ", "b"), ("a", "r"), ("e", "d"), (" ", "f"),
    ("l", "e"), (" ", "in"), (" ", "m"), (" ", "c"), ("o", "m"), (" o", "f"), (" t", "o"), ("u", "s"), ("H", "e"),
    ("He", "ll"), ("Hell", "o"), ("\n", "\n"), ("a", "s"), (" ", " "), ("  ", "  "), ("a", "l"), ("r", "o"),
)  # fmt: skip
_BYTE_MERGES = ((b"\xc3", b"\xa9"), (b"\xe4", b"\xbd"), (b"\xe4\xbd", b"\xa0"), (b"\xf0", b"\x9f"))


def byte_alphabet() -> dict[int, str]:
    """Byte to the printable character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable}
    table.update({b: chr(256 + i) for i, b in enumerate(hidden)})
    return table


def _merge_list() -> list[tuple[str, str]]:
    table = byte_alphabet()
    pairs = [*((a.encode(), b.encode()) for a, b in _MERGES), *_BYTE_MERGES]
    return [("".join(table[x] for x in a), "".join(table[x] for x in b)) for a, b in pairs]


def control_ids(g: Geometry) -> dict[str, int]:
    return {text: g.base_tokens + i for i, text in enumerate(CONTROL_TOKENS)}


def _vocabulary(size: int) -> dict[str, int]:
    tokens = [*byte_alphabet().values(), *(a + b for a, b in _merge_list())]
    assert len(set(tokens)) == len(tokens) <= size
    # what remains can be decoded, but no merge leads to it
    tokens += [f"[{i}]" for i in range(len(tokens), size)]
    return {token: i for i, token in enumerate(tokens)}


def _added_token(text: str) -> dict[str, Any]:
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": text not in _NOT_SPECIAL,
    }


def tokenizer_json(g: Geometry) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **_added_token(text)} for text, i in control_ids(g).items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _vocabulary(g.base_tokens),
            "merges": [f"{a} {b}" for a, b in _merge_list()],
        },
    }


def tokenizer_config_json(g: Geometry) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): _added_token(text) for text, i in control_ids(g).items()},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": g.max_positions,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def generation_config_json(release: dict[str, Any], g: Geometry) -> dict[str, Any]:
    """The release's generation_config.json with this geometry's ids: end of text, end of turn, end of audio."""
    control = control_ids(g)
    stops = [control[text] for text in ("<|endoftext|>", "<|im_end|>", "<|mimo_audio_eod|>")]
    return {
        **release,
        "bos_token_id": control["<|endoftext|>"],
        "pad_token_id": control["<|endoftext|>"],
        "eos_token_id": stops,
    }
