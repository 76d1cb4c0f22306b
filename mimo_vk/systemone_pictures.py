"""A System One request's pictures: each placeholder in a text becomes the picture that it stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mimo_vk.chat_format import ChatTemplate
from mimo_vk.pictures import NONE, Picture, Pictures, PictureTools
from mimo_vk.systemone_request import Question
from mimo_vk.tokenizer import Tokenizer

# Where a picture stands while texts are put together: JSON would write a placeholder's own characters differently.
_MARK = "\U0010fffd\ue001picture{}\ue001\U0010fffd"
_MARKED = re.compile(_MARK.format("([0-9]+)"))


@dataclass(frozen=True)
class Inlay:
    """Pictures by placeholder, and what finds room for them. ``Inlay({})`` has none."""

    pictures: Mapping[str, Picture]
    tools: PictureTools | None = None

    def marked(self, content: Any) -> Any:
        """A JSON value with a mark for each placeholder in its strings; keys stay."""
        if not self.pictures:
            return content
        if isinstance(content, str):
            return self._pattern().sub(lambda match: _MARK.format(self._names().index(match[0])), content)
        if isinstance(content, Mapping):
            return {key: self.marked(item) for key, item in content.items()}
        if isinstance(content, Sequence):
            return [self.marked(item) for item in content]
        return content

    def marked_question(self, question: Question) -> Question:
        """The question with marks in its instructions and criteria; the answers' own texts stay."""
        options = tuple(replace(option, description=self.marked(option.description)) for option in question.options)
        return replace(question, instructions=self.marked(question.instructions), options=options)

    def prompt(self, tokenizer: Tokenizer, template: ChatTemplate, text: str) -> tuple[list[int], Pictures]:
        """The prompt of a user's turn that says a marked text: ids, and where its pictures stand."""
        pieces = _MARKED.split(text) if self.pictures else [text]
        shown = [self.pictures[self._names()[int(number)]] for number in pieces[1::2]]
        if not shown:
            turns: list[dict[str, Any]] = [{"role": "user", "content": text}]
            return template.prompt_ids(tokenizer, turns, enable_thinking=False), NONE
        parts = [{"type": "image"} if i % 2 else {"type": "text", "text": piece} for i, piece in enumerate(pieces)]
        turns = [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}]
        assert self.tools is not None, "whoever has pictures can find room for them"
        return self.tools.place(template.prompt_ids(tokenizer, turns, enable_thinking=False), shown)

    def text_alone(self, text: str) -> str:
        """A marked text without its marks."""
        return _MARKED.sub("", text) if self.pictures else text

    def _names(self) -> list[str]:
        return list(self.pictures)

    def _pattern(self) -> re.Pattern[str]:
        """The longest placeholder first: one may be another's beginning."""
        return re.compile("|".join(map(re.escape, sorted(self.pictures, key=len, reverse=True))))


NO_PICTURES = Inlay({})
