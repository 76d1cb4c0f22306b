"""Choosing tokens under a request's terms: a call's beginning that is required, or calls that are ruled out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from mimo_vk.formats import F32
from mimo_vk.sampling import Sampler
from mimo_vk.stream import END_THINK, THINK
from mimo_vk.tokenizer import Tokenizer
from mimo_vk.tool_calls import OPEN

FUNCTION = "<function="


class Chooser(Sampler):
    """A sampler that keeps the raw logits of its last choice, for log-probabilities.

    call_names: the answer must begin (behind its reasoning, if there is any) with a call of one of these functions:
    the call's opening is forced token by token, and where there are several names, the model chooses among them.
    forbidden: ids that are never chosen.
    """

    def __init__(
        self,
        temperature: float,
        top_p: float,
        seed: int | None,
        *,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        call_names: Sequence[str] = (),
        may_think: bool = False,
        forbidden: Iterable[int | None] = (),
    ) -> None:
        super().__init__(temperature, top_p, seed)
        self.logits: F32 | None = None
        self.token = -1  # the last choice
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._forbidden = [token for token in forbidden if token is not None]
        self._forced: list[int] = []
        self._names: list[str] = []  # what may still be written of the name, with the bracket that ends it
        self._call_names = list(call_names)
        self._phase: Literal["free", "start", "reasoning", "call"] = "free"
        if call_names:
            self._phase = "start" if may_think else "call"

    def pick(self, logits: F32, limit: int) -> int:
        """The next id by logits [V]."""
        self.logits = logits
        self.token = self._pick(logits, limit)
        return self.token

    def _pick(self, logits: F32, limit: int) -> int:
        if self._phase == "call":
            self._begin_call()
        if self._forced:
            return self._forced.pop(0)
        if self._names:
            return self._pick_name(logits, limit)
        token = self._pick_allowed(logits, limit)
        if self._phase in ("start", "reasoning"):
            return self._before_call(token)
        return token

    def _pick_allowed(self, logits: F32, limit: int) -> int:
        if self._forbidden:
            logits = logits.copy()
            logits[self._forbidden] = -np.inf
        return super().pick(logits, limit)

    def _before_call(self, token: int) -> int:
        """Reasoning goes its way; whatever else would come first, the call comes instead."""
        tokenizer = self._tokenizer
        if token == tokenizer.token_id(OPEN):
            self._begin_call()
            return self._forced.pop(0)
        if self._phase == "start":
            if token == tokenizer.token_id(THINK):
                self._phase = "reasoning"
                return token
            self._begin_call()
            return self._forced.pop(0)
        end = tokenizer.token_id(END_THINK)
        if end is not None and (token == end or token in self._stop_ids):
            self._phase = "call"
            return end
        if token in self._stop_ids:
            self._begin_call()
            return self._forced.pop(0)
        return token

    def _begin_call(self) -> None:
        """The opening of a call, up to where the names differ."""
        self._phase = "free"
        if len(self._call_names) == 1:
            self._forced = self._tokenizer.encode(f"{OPEN}{FUNCTION}{self._call_names[0]}>", special=True)
        else:
            self._forced = self._tokenizer.encode(OPEN + FUNCTION, special=True)
            self._names = [name + ">" for name in self._call_names]

    def _pick_name(self, logits: F32, limit: int) -> int:
        """One more piece of one of the names that are still possible."""
        pieces: dict[int, str] = {}
        for name in self._names:
            for end in range(1, len(name) + 1):
                token = self._tokenizer.token_id(name[:end])
                if token is not None and token < limit:
                    pieces[token] = name[:end]
        assert pieces, "every printable ASCII character is a token of its own"
        allowed = np.full_like(logits, -np.inf)
        ids = list(pieces)
        allowed[ids] = logits[ids]
        token = super().pick(allowed, limit)
        piece = pieces[token]
        self._names = [rest for name in self._names if name.startswith(piece) and (rest := name[len(piece) :])]
        return token
