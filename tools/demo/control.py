"""The control tokens of the release's tokenizer, in the release's order; the ids here are the demonstration's own."""

from __future__ import annotations

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
IMAGE_PAD = "<|image_pad|>"
THINK = "<think>"
END_THINK = "</think>"
END_OF_AUDIO_TURN = "<|mimo_audio_eod|>"

# (text, special): special ones are control tokens, the others are plain added tokens that stay in decoded text.
CONTROL_TOKENS: tuple[tuple[str, bool], ...] = (
    (PAD, True),
    (START, True),
    (END, True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    (IMAGE_PAD, True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    (THINK, False),
    (END_THINK, False),
    ("<|audio_pad|>", True),
    ("<|mimo_audio_start|>", True),
    ("<|mimo_audio_end|>", True),
    (END_OF_AUDIO_TURN, True),
)
STOP_TOKENS = (PAD, END, END_OF_AUDIO_TURN)
