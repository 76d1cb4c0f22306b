"""A tokenizer.json like the release's, made on the spot: byte-level BPE, NFC, digits one by one, control tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mimo_vk.tokenizer import Tokenizer

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|eot|>",
]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "You are provided with the following tools:\n\n<tools>\n</tools>",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}',
    "<function=name><parameter=key>value</parameter></function> <|im_start|>system <|im_end|>assistant user tool think",
    "the quick brown fox jumps over the lazy dog; wie geht's? ça va très bien, mañana",
    "à l'école 你好，世界 こんにちは 🙂🎉",
]


@cache
def tokenizer_json() -> str:
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(CORPUS * 2, trainer)
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    made.add_tokens([tokenizers.AddedToken(text, normalized=False, special=False) for text in TAGS])
    return str(made.to_str())


def tokenizer_data() -> dict[str, Any]:
    """A fresh copy, to be changed at will."""
    data: dict[str, Any] = json.loads(tokenizer_json())
    return data


@cache
def ordinary() -> tokenizers.Tokenizer:
    """The package's own tokenizer on the same file: what every model was trained with."""
    return tokenizers.Tokenizer.from_str(tokenizer_json())


@cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_json().encode(), "tokenizer.json")
