"""The jobs of the two OpenAI routes: a chat's answer, and completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from mimo_vk.engine import Engine
from mimo_vk.errors import Cancelled
from mimo_vk.pictures import NONE, Pictures
from mimo_vk.server.chooser import Chooser
from mimo_vk.server.completion_text import AnswerText, CompletionText, Piece
from mimo_vk.server.jobs import Cancel, Emit
from mimo_vk.server.logprobs import Scored, TokenLogprob, score, token_text
from mimo_vk.session import Session
from mimo_vk.stream import FinishReason
from mimo_vk.tokenizer import Tokenizer
from mimo_vk.tool_calls import OPEN


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen, and when to stop."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Begun:
    """A prompt has been read: its tokens, and how many of them were there already."""

    tokens: int
    cached: int
    index: int = 0


@dataclass(frozen=True)
class Ended:
    """An answer is complete. ids: all that was generated, without the id that stopped it."""

    reason: FinishReason
    ids: list[int]
    reasoning_tokens: int = 0
    index: int = 0


@dataclass(frozen=True)
class ChatJob:
    """Emits Begun, then a Delta for every generated id and one for the end; returns Ended.

    call_names, may_think: see ``Chooser``. may_call False: the token that opens a call is never chosen.
    top_logprobs: None where none are wanted.
    """

    prompt_ids: list[int]
    choice: Choice
    tools: list[dict[str, Any]] | None = None
    may_call: bool = True
    call_names: tuple[str, ...] = ()
    may_think: bool = True
    single_call: bool = False
    top_logprobs: int | None = None
    pictures: Pictures = NONE

    def run(self, engine: Engine, session: Session, emit: Emit, cancel: Cancel) -> Ended:
        """Read the prompt, snapshot it for a turn that goes on from here in another way, and generate."""
        tokenizer, choice = _tokenizer(engine), self.choice
        before = engine.stats.reused_tokens
        logits = session.prompt(self.prompt_ids, pictures=self.pictures, cancel=cancel)
        if not self.pictures:
            session.pin()
        emit(Begun(len(self.prompt_ids), engine.stats.reused_tokens - before))
        chooser = Chooser(
            choice.temperature,
            choice.top_p,
            choice.seed,
            tokenizer=tokenizer,
            stop_ids=engine.stop_ids,
            call_names=self.call_names,
            may_think=self.may_think,
            forbidden=() if self.may_call else (tokenizer.token_id(OPEN),),
        )
        text = AnswerText(tokenizer, self.tools, choice.stop, self.single_call, self.may_call)
        ids: list[int] = []
        for token in _generated(engine, session, logits, choice, chooser, cancel):
            ids.append(token)
            emit(text.push(token, self._score(engine, chooser, token)))
            if text.complete:
                break
        reason = cast(FinishReason, "stop" if text.complete else session.finish_reason)
        emit(text.finish(reason))
        return Ended("stop" if text.complete else reason, ids, text.reasoning_tokens)

    def _score(self, engine: Engine, chooser: Chooser, token: int) -> Any:
        top = self.top_logprobs
        return None if top is None else lambda: _scored(engine, chooser, token, top)


@dataclass(frozen=True)
class CompletionJob:
    """For each prompt in turn, emits Begun, IndexedPieces (also for an echo) and Ended; returns None."""

    prompts: list[list[int]]
    choice: Choice
    echo: bool = False
    logprobs: int | None = None

    def run(self, engine: Engine, session: Session, emit: Emit, cancel: Cancel) -> None:
        """One prompt after the other."""
        for index, ids in enumerate(self.prompts):
            _Completion(self, index, ids, engine, session, emit, cancel).run()


@dataclass(frozen=True)
class IndexedPiece:
    """A piece of the completion of one of several prompts. generated: whether a generated id is behind it."""

    index: int
    piece: Piece
    generated: bool


class _Completion:
    """One prompt of a CompletionJob."""

    def __init__(
        self,
        job: CompletionJob,
        index: int,
        ids: list[int],
        engine: Engine,
        session: Session,
        emit: Emit,
        cancel: Cancel,
    ) -> None:
        self.job, self.index, self.ids = job, index, ids
        self.engine, self.session, self.emit, self.cancel = engine, session, emit, cancel
        self.text = CompletionText(_tokenizer(engine), job.choice.stop)
        self._reused_before = engine.stats.reused_tokens
        self._cached: int | None = None  # of the prompt, by its first reading

    def run(self) -> None:
        """Echo, generate, end."""
        job = self.job
        if job.echo and job.logprobs is not None:
            self._echo_scored(job.logprobs)
        elif job.echo:
            for token in self.ids:
                self._emit(self.text.echo(token, None), generated=False)
        if job.choice.max_tokens:
            self._generate()
        else:
            self._begun()
            self._emit(self.text.finish(), generated=False)
            self.emit(Ended("length", [], index=self.index))

    def _generate(self) -> None:
        choice, engine, session = self.job.choice, self.engine, self.session
        logits = session.prompt(self.ids, cancel=self.cancel)
        self._note_cached()
        self._begun()
        chooser = Chooser(
            choice.temperature, choice.top_p, choice.seed, tokenizer=_tokenizer(engine), stop_ids=engine.stop_ids
        )
        ids: list[int] = []
        for token in _generated(engine, session, logits, choice, chooser, self.cancel):
            ids.append(token)
            top = self.job.logprobs
            entry = None if top is None else _scored(engine, chooser, token, top)
            self._emit(self.text.push(token, entry), generated=True)
            if self.text.stopped:
                break
        last = None
        if self.job.logprobs is not None and session.finish_reason == "stop" and not self.text.stopped:
            last = _scored(engine, chooser, chooser.token, self.job.logprobs)
        self._emit(self.text.finish(last), generated=False)
        reason = "stop" if self.text.stopped else cast(FinishReason, session.finish_reason)
        self.emit(Ended(reason, ids, index=self.index))

    def _echo_scored(self, top: int) -> None:
        """The prompt with its log-probabilities: the first token has none."""
        tokenizer = _tokenizer(self.engine)
        data = tokenizer.token_bytes(self.ids[0])
        first = TokenLogprob(Scored(token_text(data), data, None), (), predicted=False)
        self._emit(self.text.echo(self.ids[0], first), generated=False)
        at = 1
        for rows in self._prompt_rows():
            for row in rows:
                entry = score(row, self.ids[at], top, self.engine.vocab_limit, tokenizer)
                self._emit(self.text.echo(self.ids[at], entry), generated=False)
                at += 1
        assert at == len(self.ids)

    def _prompt_rows(self) -> Iterator[Any]:
        """Logits that predict the prompt's second id and those behind it, in blocks [n, V]."""
        if len(self.ids) > 1:
            yield from self.session.read_out_blocks(self.ids, len(self.ids) - 1, cancel=self.cancel)
        self._note_cached()

    def _begun(self) -> None:
        self.emit(Begun(len(self.ids), self._cached or 0, self.index))

    def _note_cached(self) -> None:
        if self._cached is None:
            self._cached = self.engine.stats.reused_tokens - self._reused_before

    def _emit(self, piece: Piece, *, generated: bool) -> None:
        if generated or piece.text or piece.logprobs:
            self.emit(IndexedPiece(self.index, piece, generated))


def _generated(
    engine: Engine, session: Session, logits: Any, choice: Choice, chooser: Chooser, cancel: Cancel
) -> Iterator[int]:
    """Generated ids; Cancelled is raised where the session only notes it."""
    yield from session.generate(
        logits[-1:], max_tokens=choice.max_tokens, sampler=chooser, stop_ids=engine.stop_ids, cancel=cancel
    )
    if session.finish_reason == "cancelled":
        raise Cancelled("stopped by the caller")


def _scored(engine: Engine, chooser: Chooser, token: int, top: int) -> TokenLogprob:
    assert chooser.logits is not None
    return score(chooser.logits, token, top, engine.vocab_limit, _tokenizer(engine))


def _tokenizer(engine: Engine) -> Tokenizer:
    assert engine.tokenizer is not None, "the server does not start without a tokenizer"
    return engine.tokenizer
