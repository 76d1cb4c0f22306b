"""The ids of answers as they were generated, so that a conversation's next prompt extends what the model has read.

The text of an answer, tokenised again, can give other ids than the model chose. The template renders each request's
messages whole; where that text goes on from a remembered prompt with the text of the answer that followed, the prompt's
and the answer's own ids take their place, and only what stands behind is tokenised.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from mimo_vk.tokenizer import Tokenizer

KEPT = 16


@dataclass(frozen=True)
class Turn:
    """A prompt's rendered text (users' characters escaped) and ids; what was generated behind it."""

    rendered: str
    prompt_ids: list[int]
    answer: str
    ids: list[int]


class Turns:
    """The last answers, the least recently used first out. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, end_texts: list[str], kept: int = KEPT) -> None:
        self._tokenizer = tokenizer
        self._ends = end_texts  # the texts of the tokens that end a turn
        self._kept = kept
        self._turns: OrderedDict[tuple[str, str], Turn] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, rendered: str, prompt_ids: list[int], ids: list[int]) -> None:
        """Keep an answer. ids: as generated, without the stop id."""
        answer = self._tokenizer.decode(ids, keep_special=True)
        key = (rendered, answer)
        with self._lock:
            self._turns[key] = Turn(rendered, prompt_ids, answer, ids)
            self._turns.move_to_end(key)
            while len(self._turns) > self._kept:
                self._turns.popitem(last=False)

    def prompt_ids(self, rendered: str) -> list[int]:
        """The ids of a rendered prompt, the longest remembered beginning by its own ids."""
        best: tuple[int, Turn] | None = None
        with self._lock:
            turns = list(self._turns.values())
        for turn in turns:
            end = self._end_of_answer(rendered, turn)
            if end is not None and (best is None or end > best[0]):
                best = end, turn
        if best is None:
            return self._tokenizer.encode_rendered(rendered)
        end, turn = best
        with self._lock:
            if (turn.rendered, turn.answer) in self._turns:
                self._turns.move_to_end((turn.rendered, turn.answer))
        return turn.prompt_ids + turn.ids + self._tokenizer.encode_rendered(rendered[end:])

    def _end_of_answer(self, rendered: str, turn: Turn) -> int | None:
        """Where the turn's answer ends in the text, if it is this text's beginning."""
        if not rendered.startswith(turn.rendered):
            return None
        start = len(turn.rendered)
        ends = [at for end in self._ends if (at := rendered.find(end, start)) >= 0]
        if not ends:
            return None
        written = self._tokenizer.escapes.unescape(rendered[start : min(ends)])
        return min(ends) if written == turn.answer else None
