"""Conversations to text by the chat template, to ids, and to the places whose prediction is trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from tools.demo.control import END, END_THINK, START, THINK
from tools.demo.draw import Turn
from tools.demo.mix import Conversation

TEMPLATE = Path(__file__).parents[1] / "data" / "chat_template.jinja"


@dataclass(frozen=True)
class Example:
    """A conversation's ids; ``counts[i]`` says whether predicting ids[i] from what precedes it is trained."""

    ids: list[int]
    counts: list[bool]
    tag: int


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
                "content": turn.user if turn.result is None else turn.result,
            }
        )
        answer: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        if think and (keep_thoughts or i == len(turns) - 1):
            answer["reasoning_content"] = turn.thought
        if turn.call:
            answer["tool_calls"] = [{"type": "function", "function": turn.call}]
        messages.append(answer)
    return messages


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
        encoded = self.tokenizer.encode(self.text(conv, keep_thoughts), add_special_tokens=False)
        return Example(encoded.ids, self.trained(encoded.tokens, conv.turns), conv.tag)

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
