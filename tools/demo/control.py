"""The control tokens, which are the release's; their ids here are the demonstration's own."""

from __future__ import annotations

from tools.checkpoint.tokenizer_json import CONTROL_TOKENS

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
IMAGE = "<|image_pad|>"
STOP_TOKENS = (PAD, END, "<|mimo_audio_eod|>")
# Ordinary text to a decoder that drops control tokens, as in the release.
PLAIN = frozenset(
    t for t in CONTROL_TOKENS if not t.startswith("<|") or "fim_" in t or t in ("<|repo_name|>", "<|file_sep|>")
)

__all__ = ["CONTROL_TOKENS", "END", "END_THINK", "IMAGE", "PAD", "PLAIN", "START", "STOP_TOKENS", "THINK"]
