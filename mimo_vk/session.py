"""A session: one live state (token ids and KV cache), fed in blocks, resumed where it can be; and what it generates."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mimo_vk.errors import Cancelled, MimoError, UsageError
from mimo_vk.formats import F32
from mimo_vk.kv_cache import NO_ID, KvCache, RowsLost, Snapshot
from mimo_vk.model import PictureRows, as_ids
from mimo_vk.pictures import NONE, Pictures
from mimo_vk.sampling import F64, Sampler, log_softmax

if TYPE_CHECKING:
    from mimo_vk.engine import Engine

Cancel = Callable[[], bool]
Progress = Callable[[int, int], None]

_NOTED = 256  # beginnings of prompts that a session remembers having met


class Session:
    """What one conversation has fed to the model. Not safe for two threads at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cache: KvCache = engine.new_cache()
        self._last: F32 | None = None  # the logits [1, V] after the last id of the live state
        self._snapshots: list[Snapshot] = []  # the least recently used first
        self._pictures: PictureRows | None = None  # of the live state
        self._noted: dict[bytes, None] = {}  # digests, the oldest first
        self.finish_reason = ""

    @property
    def ids(self) -> list[int]:
        """The token ids of the live state; NO_ID where a picture's rows are."""
        return self._cache.ids

    def reset(self) -> None:
        """Forget the live state. Snapshots stay until their rows are rewritten."""
        self._cache.rewind()
        self._last = None
        self._pictures = None

    def prompt(
        self,
        ids: list[int],
        *,
        pictures: Pictures = NONE,
        all_logits: bool = False,
        live: bool = True,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> F32:
        """Read a prompt and return its last position's raw logits [1, V], or every position's [len(ids), V].

        The prompt resumes from the deepest of the live state and the snapshots that it extends; with ``all_logits`` or
        pictures it is read whole, and without ``live`` it resumes from snapshots alone. Errors: UsageError for an empty
        prompt, one longer than the context, an unknown id; ImageError; ReadError and Cancelled leave the state at the
        last whole block, or empty where there are pictures.
        """
        if all_logits or pictures:
            read = self.prompt_blocks(
                ids,
                pictures=pictures,
                every_row=all_logits,
                on_progress=on_progress,
                on_picture=on_picture,
                cancel=cancel,
            )
            blocks = list(read)
            return np.concatenate(blocks) if all_logits else blocks[-1]
        self._check(ids)
        self._resume(ids, live)
        self._read(ids, on_progress, cancel)
        assert self._last is not None
        return self._last

    def prompt_blocks(
        self,
        ids: list[int],
        *,
        pictures: Pictures = NONE,
        every_row: bool = True,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Iterator[F32]:
        """The logits of every position, block by block [n, V]: all of them may be more than memory holds.

        Without ``every_row`` only the last position's are calculated; they are the last array. Errors as ``prompt``.
        """
        self._check(ids)
        self.reset()
        rows = self._engine.picture_rows(pictures, on_picture, _checkpoint(cancel)) if pictures else None
        try:
            yield from self._blocks(ids, every_row, on_progress, cancel, rows)
        except MimoError:
            if pictures:
                self.reset()
            raise

    def pin(self) -> Snapshot:
        """Snapshot the live state, which must have been read by ``prompt``; the oldest used makes room.

        A state that holds a picture can't be pinned: its ids don't say which picture it was.
        """
        assert self._last is not None, "a state is pinned after its logits are known"
        assert NO_ID not in self._cache.ids, "a prompt with a picture leaves nothing to reuse"
        self._snapshots = [s for s in self._snapshots if self._cache.holds(s) and s.ids != self._cache.ids]
        limit = self._engine.settings.pin_slots
        self._snapshots = self._snapshots[max(0, len(self._snapshots) - limit + 1) :]
        self._snapshots.append(self._cache.snapshot(self._last))
        return self._snapshots[-1]

    def read_out(self, ids: list[int], count: int, *, cancel: Cancel | None = None) -> F32:
        """The raw logits [count, V] that predict the last ``count`` ids of a prompt.

        It resumes only from a snapshot of a part before those ids, never from the live state; the last id itself is not
        processed. Errors as for ``prompt``; UsageError where ``count`` would need a prediction of the first id.
        """
        return np.concatenate(list(self.read_out_blocks(ids, count, cancel=cancel)))

    def read_out_blocks(self, ids: list[int], count: int, *, cancel: Cancel | None = None) -> Iterator[F32]:
        """What ``read_out`` returns, block by block [n, V]: a long prompt's logits are more than memory may hold."""
        self._check(ids)
        if not 0 < count < len(ids):
            raise UsageError(
                f"the first of the prompt's {len(ids)} tokens has no prediction: at most {len(ids) - 1} can be read"
            )
        first = len(ids) - count  # the position of the first id to be predicted
        self._resume(ids[:first], live=False)
        if self._last is not None and self._cache.length == first:
            yield self._last
        self._read(ids[: first - 1], None, cancel)
        yield from self._blocks(ids[:-1], True, None, cancel)

    def read_options(
        self,
        ids: list[int],
        options: Sequence[list[int]],
        *,
        pictures: Pictures = NONE,
        on_picture: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> list[F64]:
        """For each option the log-probabilities [len(option)] of its ids, read as what follows the prompt ``ids``.

        As a read-out it resumes only from a snapshot. The prompt is read once, into a snapshot of its own that takes no
        slot; each option then feeds only its own ids, but for the last. Errors as for ``prompt``; MimoError for NaN.
        """
        for option in options:
            assert option, "an option has at least the id that ends it"
            self._check(ids + option)
        self.prompt(ids, pictures=pictures, live=False, on_picture=on_picture, cancel=cancel)
        assert self._last is not None
        snapshot = self._cache.snapshot(self._last)
        found = []
        for option in options:
            snapshot = self._back_to(snapshot, _checkpoint(cancel))
            found.append(self._read_option(snapshot, option, cancel))
        return found

    def note(self, ids: list[int]) -> bool:
        """Whether this beginning of a prompt was noted before; from now on it was. The last few hundred are kept."""
        digest = hashlib.blake2b(as_ids(ids).tobytes(), digest_size=16).digest()
        before = digest in self._noted
        self._noted.pop(digest, None)
        self._noted[digest] = None
        if len(self._noted) > _NOTED:
            del self._noted[next(iter(self._noted))]
        return before

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

        ``finish_reason`` is then "stop", "length" (also: the context is full) or "cancelled". Every id yielded is part
        of the live state once the next is asked for; the last one may still be pending.
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
            if count + 1 == max_tokens or self._cache.length >= engine.ctx:
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

    def _resume(self, ids: list[int], live: bool = True) -> None:
        """Make the live state the deepest known prefix of ``ids``: a snapshot, or (``live``) what is there already."""
        self._snapshots = [s for s in self._snapshots if self._cache.holds(s)]
        depth = self._cache.length if live and self._extends_live(ids) else 0
        deeper = [s for s in self._snapshots if len(s.ids) > depth and ids[: len(s.ids)] == s.ids]
        if deeper:
            snapshot = max(deeper, key=lambda s: len(s.ids))
            self._snapshots.remove(snapshot)
            self._snapshots.append(snapshot)
            self._cache.restore(snapshot)
            self._last = snapshot.logits
        elif not depth:
            self.reset()
        self._engine.stats.reused_tokens += self._cache.length

    def _extends_live(self, ids: list[int]) -> bool:
        held = self._cache.ids
        return ids[: len(held)] == held and (len(ids) > len(held) or self._last is not None)

    def _read_option(self, snapshot: Snapshot, option: list[int], cancel: Cancel | None) -> F64:
        limit = self._engine.vocab_limit
        self._last = snapshot.logits
        found = [log_softmax(snapshot.logits[-1], limit)[option[0]]]
        for rows in self._blocks(snapshot.ids + option[:-1], True, None, cancel):
            for row in rows:  # one at a time: a long option's rows in float64 would fill the memory
                found.append(log_softmax(row, limit)[option[len(found)]])
        if not np.isfinite(found).all():
            raise MimoError(f"the logits can't be read: an option's log-probabilities are {[float(f) for f in found]}")
        return np.array(found)

    def _back_to(self, snapshot: Snapshot, checkpoint: Callable[[], None]) -> Snapshot:
        """Make a snapshot the live state, or one like it where a device was lost with it."""
        if self._cache.length == len(snapshot.ids):  # nothing has moved on
            return snapshot
        if self._cache.holds(snapshot):
            self._cache.restore(snapshot)
            return snapshot
        self._cache.rewind()
        self._reach(snapshot.ids, checkpoint)
        return self._cache.snapshot(snapshot.logits)

    def _read(self, ids: list[int], on_progress: Progress | None, cancel: Cancel | None) -> None:
        """Feed what the live state lacks of ``ids``, for the logits of the last row only."""
        for _ in self._blocks(ids, False, on_progress, cancel):
            pass

    def _blocks(
        self,
        ids: list[int],
        all_logits: bool,
        on_progress: Progress | None,
        cancel: Cancel | None,
        pictures: PictureRows | None = None,
    ) -> Iterator[F32]:
        """Feed what the live state lacks of ``ids``, in blocks, and yield each block's logits."""
        stats = self._engine.stats
        while (at := self._cache.length) < len(ids):
            block = ids[at : at + self._engine.chunk]
            is_last = at + len(block) == len(ids)
            began = time.perf_counter()
            try:
                logits = self._feed(block, True if all_logits else (False if is_last else None), cancel, pictures)
            finally:
                stats.prefill_seconds += time.perf_counter() - began
                stats.prefill_tokens += self._cache.length - at
            if on_progress is not None:
                on_progress(self._cache.length, len(ids))
            yield logits

    def _feed(
        self, block: list[int], every_row: bool | None, cancel: Cancel | None, pictures: PictureRows | None = None
    ) -> F32:
        """Feed one block; logits of every row, of the last row (False), or of none (None: an empty array)."""
        if pictures is not None:
            self._pictures = pictures
        h = self._forward(block, _checkpoint(cancel), pictures)
        self._last = None
        if every_row is None:
            return h[:0]
        logits = self._engine.head(h if every_row else h[-1:])
        self._last = logits[-1:]
        return logits

    def _forward(self, block: list[int], checkpoint: Callable[[], None], pictures: PictureRows | None) -> F32:
        """The block's hidden rows. Where a device is lost with the live state's rows, they are read again first."""
        ids = self._cache.ids
        while True:
            try:
                return self._engine.model.forward(as_ids(block), self._cache, checkpoint, pictures)
            except RowsLost:
                self._lost()
            self._reach(ids, checkpoint)

    def _reach(self, ids: list[int], checkpoint: Callable[[], None]) -> None:
        """Read what the live state lacks of ``ids``, which were read before; NO_ID stands for a kept picture's rows."""
        pictures = self._pictures if NO_ID in ids else None
        known = [max(0, i) for i in ids]
        while (at := self._cache.length) < len(ids):
            block = known[at : at + self._engine.chunk]
            try:
                self._engine.model.forward(as_ids(block), self._cache, checkpoint, pictures)
            except RowsLost:
                self._lost()

    def _lost(self) -> None:
        """The live state's rows are gone, and the snapshots' too."""
        self._cache.forget()
        self._snapshots.clear()
        self._last = None


def _checkpoint(cancel: Cancel | None) -> Callable[[], None]:
    """What long work calls in between."""

    def checkpoint() -> None:
        if cancel is not None and cancel():
            raise Cancelled("stopped by the caller")

    return checkpoint
