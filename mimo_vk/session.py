"""A session: one live state (token ids and the KV cache), fed in blocks, and the tokens that it generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mimo_vk.errors import Cancelled, UsageError
from mimo_vk.formats import F32
from mimo_vk.kv_cache import KvCache
from mimo_vk.model import as_ids
from mimo_vk.sampling import Sampler

if TYPE_CHECKING:
    from mimo_vk.engine import Engine

Cancel = Callable[[], bool]
Progress = Callable[[int, int], None]


class Session:
    """What one conversation has fed to the model. Not safe for two threads at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cache = KvCache(engine.config, engine.ctx)
        self._last: F32 | None = None  # the logits [1, V] after the last id of the live state
        self.ids: list[int] = []
        self.finish_reason = ""

    def reset(self) -> None:
        """Forget the live state."""
        self._cache.reset()
        self._last = None
        self.ids = []

    def prompt(
        self,
        ids: list[int],
        *,
        all_logits: bool = False,
        on_progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> F32:
        """Read a prompt and return its last position's raw logits [1, V], or every position's [len(ids), V].

        A prompt that begins with the ids of the live state feeds only the rest; any other starts afresh, and so does
        ``all_logits``. Errors: UsageError for an empty prompt, one longer than the context, an id outside the vocabulary;
        ReadError and Cancelled leave the state at the last whole block.
        """
        self._check(ids)
        if all_logits or ids[: len(self.ids)] != self.ids or (len(ids) == len(self.ids) and self._last is None):
            self.reset()
        began, reused = time.perf_counter(), len(self.ids)
        try:
            rows = self._feed_blocks(ids, all_logits, on_progress, cancel)
        finally:
            stats = self._engine.stats
            stats.prefill_seconds += time.perf_counter() - began
            stats.prefill_tokens += len(self.ids) - reused
            stats.reused_tokens += reused
        if all_logits:
            return np.concatenate(rows)
        assert self._last is not None
        return self._last

    def generate(
        self,
        logits: F32,
        *,
        max_tokens: int,
        sampler: Sampler,
        stop_ids: frozenset[int] | None = None,
        cancel: Cancel | None = None,
    ) -> Iterator[int]:
        """Yield the ids that follow ``logits`` [1, V], at most ``max_tokens``; a stop id ends them and is not yielded.

        ``finish_reason`` is then "stop", "length" (also: the context is full) or "cancelled". Every id yielded is part of
        the live state once the next is asked for; the last one may still be pending.
        """
        engine = self._engine
        stops = engine.stop_ids if stop_ids is None else stop_ids
        self.finish_reason = "length"
        for count in range(max_tokens):
            token = sampler.pick(logits[-1], engine.vocab_limit)
            if token in stops:
                self.finish_reason = "stop"
                return
            yield token
            if count + 1 == max_tokens or len(self.ids) >= engine.ctx:
                return
            began = time.perf_counter()
            try:
                logits = self._feed([token], False, cancel)
            except Cancelled:
                self.finish_reason = "cancelled"
                return
            engine.stats.decode_seconds += time.perf_counter() - began
            engine.stats.decode_tokens += 1

    def _check(self, ids: list[int]) -> None:
        engine = self._engine
        if not ids:
            raise UsageError("the prompt is empty: at least one token id is needed")
        if len(ids) > engine.ctx:
            raise UsageError(f"the prompt has {len(ids)} tokens, but the context holds {engine.ctx} (--ctx)")
        vocab = engine.config.vocab_size
        bad = next((i for i in ids if not 0 <= i < vocab), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is outside the vocabulary (0 to {vocab - 1})")

    def _feed_blocks(
        self, ids: list[int], all_logits: bool, on_progress: Progress | None, cancel: Cancel | None
    ) -> list[F32]:
        rows = []
        while len(self.ids) < len(ids):
            block = ids[len(self.ids) : len(self.ids) + self._engine.chunk]
            is_last = len(self.ids) + len(block) == len(ids)
            if all_logits:
                rows.append(self._feed(block, True, cancel))
            elif is_last:
                self._feed(block, False, cancel)
            else:
                self._feed(block, None, cancel)
            if on_progress is not None:
                on_progress(len(self.ids), len(ids))
        return rows

    def _feed(self, block: list[int], every_row: bool | None, cancel: Cancel | None) -> F32:
        """Feed one block; logits of every row, of the last row (False), or of none (None: an empty array)."""

        def checkpoint() -> None:
            if cancel is not None and cancel():
                raise Cancelled("stopped by the caller")

        self._last = None
        h = self._engine.model.forward(as_ids(block), self._cache, checkpoint)
        self.ids.extend(block)
        if every_row is None:
            return h[:0]
        logits = self._engine.head(h if every_row else h[-1:])
        self._last = logits[-1:]
        return logits
