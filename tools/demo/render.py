"""Conversations to text by the chat template, to ids, and to the places whose prediction is trained."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from mimo_vk.image import Patches
from tools.demo.control import END, END_THINK, IMAGE, START, THINK
from tools.demo.draw import Turn
from tools.demo.mix import Conversation
from tools.demo.patches import patches_of
from tools.demo.pictures import paint

TEMPLATE = Path(__file__).parents[1] / "data" / "chat_template.jinja"


@dataclass(frozen=True)
class Example:
    """A conversation's ids; ``counts[i]`` says whether predicting ids[i] from what precedes it is trained."""

    ids: list[int]
    counts: list[bool]
    tag: int
    pictures: list[Patches] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of the pictures' tokens among the ids
    seen: list[list[int]] = field(default_factory=list)  # the pieces of what is on each picture


def load_template(path: Path = TEMPLATE) -> jinja2.Template:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(value, ensure_ascii=ensure_ascii)
    return env.from_string(path.read_text(encoding="utf-8"))


def messages_of(
    turns: list[Turn], system: str | None, think: bool, keep_thoughts: bool = False
) -> list[dict[str, Any]]:
    """The messages of a conversation. With ``think`` the last answer has its thought, and earlier ones if kept."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        messages.append(
            {
                "role": "tool" if turn.result is not None else "user",
                "content": content_of(turn),
            }
        )
        answer: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        if think and (keep_thoughts or i == len(turns) - 1):
            answer["reasoning_content"] = turn.thought
        if turn.call:
            answer["tool_calls"] = [{"type": "function", "function": turn.call}]
        messages.append(answer)
    return messages


def content_of(turn: Turn) -> Any:
    if turn.result is not None:
        return turn.result
    if turn.picture is None:
        return turn.user
    parts = [{"type": "image", "picture": turn.picture}, {"type": "text", "text": turn.user}]
    return parts[::-1] if turn.picture_last else parts


def with_pads(text: str, pictures: list[Patches]) -> str:
    """The template's one placeholder a picture, repeated for each of its tokens."""
    before, *rest = text.split(IMAGE)
    return before + "".join(IMAGE * p.tokens + part for p, part in zip(pictures, rest, strict=True))


def pieces(tokenizer: Tokenizer, words: str) -> list[int]:
    """The distinct ids of some words inside a sentence."""
    return sorted(set(tokenizer.encode(" " + words, add_special_tokens=False).ids))


class Renderer:
    def __init__(self, tokenizer: Tokenizer | None, template: jinja2.Template | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template or load_template()

    def text(self, conv: Conversation, keep_thoughts: bool) -> str:
        messages = messages_of(conv.turns, conv.system, conv.think, keep_thoughts)
        return self.template.render(messages=messages, tools=conv.tools, add_generation_prompt=False)

    def example(self, conv: Conversation, keep_thoughts: bool) -> Example:
        """Trained: what an assistant turn says after its cue, up to and with the turn's end."""
        assert self.tokenizer is not None
        pictures = [patches_of(paint(turn.picture)) for turn in conv.turns if turn.picture is not None]
        encoded = self.tokenizer.encode(with_pads(self.text(conv, keep_thoughts), pictures), add_special_tokens=False)
        places = [i for i, token in enumerate(encoded.tokens) if token == IMAGE]
        seen = [pieces(self.tokenizer, turn.seen) for turn in conv.turns if turn.picture is not None]
        return Example(encoded.ids, self.trained(encoded.tokens, conv.turns), conv.tag, pictures, places, seen)

    def trained(self, tokens: list[str], turns: list[Turn]) -> list[bool]:
        counts, answer, i = [False] * len(tokens), 0, 0
        while i < len(tokens):
            if tokens[i] == START and tokens[i + 1] == "assistant":
                first = i + 3  # after the role and the newline
                last = tokens.index(END, first)
                if tokens[first] == THINK and tokens[first + 1] == END_THINK:
                    first += 2
                mark_answer(tokens, counts, first, last, turns[answer].learn_after)
                answer, i = answer + 1, last
            i += 1
        return counts


def mark_answer(tokens: list[str], counts: list[bool], first: int, last: int, after: str | None) -> None:
    """Mark first..last, or only the digits (and what ends them) that follow a character."""
    on = after is None
    for i in range(first, last + 1):
        counts[i] = on
        if after is not None:
            on = tokens[i] == after or (on and tokens[i].isdigit())
