"""Generated ids to the text that is returned: stop strings cut, log-probabilities released with their text."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mimo_vk.server.logprobs import TokenLogprob
from mimo_vk.server.stop_strings import StopFilter
from mimo_vk.stream import TAGS, AnswerParser, Content, Event, FinishReason, Reasoning, ToolCall
from mimo_vk.tokenizer import TextStream, Tokenizer

Score = Callable[[], TokenLogprob]


class Released:
    """Entries that wait until their text is let out. Offsets are those of the text pushed, in characters."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, offset: int, entry: TokenLogprob) -> None:
        self._waiting.append((offset, entry))

    def before(self, offset: int | None) -> list[tuple[int, TokenLogprob]]:
        """Entries whose text begins before ``offset`` (None: all of them), each once."""
        out = []
        while self._waiting and (offset is None or self._waiting[0][0] < offset):
            out.append(self._waiting.popleft())
        return out


@dataclass(frozen=True)
class Piece:
    """What one more id adds to a completion. logprobs: each entry with its offset in the returned text."""

    text: str
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()


class CompletionText:
    """The text of one completion: all that was generated, control tokens too; after the prompt's own, if echoed."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream: TextStream = tokenizer.stream(keep_special=True)
        self._filter = StopFilter(stops)
        self._entries = Released()
        self._echoed = self._length = 0

    @property
    def stopped(self) -> bool:
        return self._filter.stopped

    def echo(self, token: int, entry: TokenLogprob | None) -> Piece:
        """A token of the prompt: it stops nothing."""
        text, offset = self._pushed(token)
        self._echoed = self._length
        return Piece(text, () if entry is None else ((offset, entry),))

    def push(self, token: int, entry: TokenLogprob | None) -> Piece:
        """A generated token."""
        text, offset = self._pushed(token)
        if entry is not None:
            self._entries.add(offset, entry)
        return self._shown(self._filter.push(text))

    def finish(self, last: TokenLogprob | None = None) -> Piece:
        """The end: what was held back. last: the entry of the token that ended the text and is no part of it.

        Clients that read a prompt's log-probabilities with ``max_tokens`` 1 count on one entry for the answer.
        """
        if self.stopped:
            return Piece("")
        flushed = self._stream.flush()
        self._length += len(flushed)
        text = self._filter.push(flushed)
        if self.stopped:
            return self._shown(text)
        if last is not None:
            self._entries.add(self._length, last)
        return Piece(text + self._filter.flush(), tuple(self._entries.before(None)))

    def _pushed(self, token: int) -> tuple[str, int]:
        """The text that a token brings out, and where the token's own begins: behind the signs that stand for bytes
        before it which make no character; a character's later parts begin where it does."""
        before, text = self._length, self._stream.push(token)
        self._length += len(text)
        data = self._tokenizer.token_bytes(token)
        if not data or 0x80 <= data[0] < 0xC0:
            return text, before
        own = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        return text, self._length - len(own)

    def _shown(self, text: str) -> Piece:
        return Piece(text, tuple(self._entries.before(self._echoed + self._filter.released)))


@dataclass(frozen=True)
class Delta:
    """What one more id (token: whether there is one) adds to a chat's answer; all of it may be empty."""

    token: bool = False
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning_logprobs: tuple[TokenLogprob, ...] = ()


class AnswerText:
    """A chat's answer: content, reasoning, calls. Stop strings end the content; reasoning and calls don't hold any.

    single_call: the first call is the last thing of the answer. may_call False: what looks like a call is text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: list[dict[str, object]] | None,
        stops: Sequence[str],
        single_call: bool = False,
        may_call: bool = True,
    ) -> None:
        self.reasoning_tokens = self.calls = 0
        self._stream = tokenizer.stream(keep=TAGS)
        self._tags = {token_id for tag in TAGS if (token_id := tokenizer.token_id(tag)) is not None}
        self._parser = AnswerParser(tools, calls=may_call)
        self._filter = StopFilter(stops)
        self._single_call = single_call
        self._entries = Released()
        self._length = 0  # characters that went to the content, whether or not they are known to belong to it

    @property
    def complete(self) -> bool:
        """Whether the answer ends here, by a stop string or by its only call."""
        return self._filter.stopped or (self._single_call and self.calls > 0)

    def push(self, token: int, score: Score | None) -> Delta:
        """One generated token; ``score`` gives its log-probability where that is wanted."""
        before = self._parser.state
        text = self._stream.push(token)
        events = self._parser.push(text)
        kind = before if token not in self._tags and self._parser.state == before else None
        self.reasoning_tokens += "reasoning" in (before, self._parser.state)
        thought: tuple[TokenLogprob, ...] = ()
        if score is not None and kind == "reasoning":
            thought = (score(),)
        if kind == "content":
            if score is not None:
                self._entries.add(self._length, score())
            self._length += len(text)
        return self._delta(events, thought, token=True)

    def finish(self, reason: FinishReason) -> Delta:
        """The end: what was held back."""
        if self.complete:
            return Delta()
        delta = self._delta(self._parser.push(self._stream.flush()) + self._parser.finish(reason), ())
        if self.complete:
            return delta
        logprobs = delta.logprobs + tuple(entry for _, entry in self._entries.before(None))
        return Delta(False, delta.content + self._filter.flush(), delta.reasoning, delta.calls, logprobs, ())

    def _delta(self, events: list[Event], thought: tuple[TokenLogprob, ...], *, token: bool = False) -> Delta:
        content = reasoning = ""
        calls: list[ToolCall] = []
        for event in events:
            if self.complete:
                break
            if isinstance(event, Content):
                content += self._filter.push(event.text)
            elif isinstance(event, Reasoning):
                reasoning += event.text
            else:
                calls.append(event)
                self.calls += 1
        shown = tuple(entry for _, entry in self._entries.before(self._filter.released))
        return Delta(token, content, reasoning, tuple(calls), shown, thought)
