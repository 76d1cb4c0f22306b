"""From messages to an answer's events: what every command that chats shares.

``Answer`` runs one prompt and yields its events. ``Conversation`` keeps a chat's turns, and the ids they were read and
generated as, so that a new turn extends the session's live state instead of being read from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mimo_vk.chat_format import ChatTemplate
from mimo_vk.errors import Cancelled, CheckpointError, MimoError, UsageError
from mimo_vk.formats import F32
from mimo_vk.pictures import NONE, Picture, Pictures, PictureTools, bare, user_message
from mimo_vk.room import ANSWER, advice, ways
from mimo_vk.sampling import Sampler
from mimo_vk.stream import TAGS, AnswerParser, Event, FinishReason
from mimo_vk.tokenizer import Tokenizer

Cancel = Callable[[], bool]
Progress = Callable[[int, int], None]

# Stand-ins for an answer, to see what a template writes behind it: private-use characters no one else writes so.
_CONTENT_MARK = "\U0010fffd\ue001answer\ue001\U0010fffd"
_REASONING_MARK = "\U0010fffd\ue001reasoning\ue001\U0010fffd"


class Generator(Protocol):
    """What an answer needs of a session: see ``mimo_vk.session``."""

    finish_reason: str

    def prompt(
        self,
        ids: list[int],
        *,
        pictures: Pictures = NONE,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> F32: ...

    def generate(
        self, logits: F32, *, max_tokens: int, sampler: Sampler, stop_ids: frozenset[int] | None, cancel: Cancel | None
    ) -> Iterator[int]: ...


class ContextFull(UsageError):
    """The prompt leaves no room for an answer."""


class Answer:
    """One prompt's answer. Iterate ``events`` once; the rest is known as it comes.

    ids: generated, without the stop id. finish_reason: "" until the end. A prompt whose reading was cancelled ends
    as "cancelled" without ids. logits: [1, V], of a prompt that the session has just read.
    """

    def __init__(
        self,
        session: Generator,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        sampler: Sampler,
        max_tokens: int,
        stop_ids: frozenset[int],
        tools: list[dict[str, Any]] | None = None,
        pictures: Pictures = NONE,
        logits: F32 | None = None,
        cancel: Cancel | None = None,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.finish_reason: FinishReason | str = ""
        self._session = session
        self._stream = tokenizer.stream(keep=TAGS)
        self._parser = AnswerParser(tools)
        self._sampler, self._max_tokens, self._stop_ids = sampler, max_tokens, stop_ids
        self._pictures, self._logits = pictures, logits
        self._cancel, self._on_progress, self._on_picture = cancel, on_progress, on_picture

    @property
    def content(self) -> str:
        return self._parser.content

    @property
    def reasoning(self) -> str:
        return self._parser.reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self._parser.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the history."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [{"type": "function", "function": call} for call in self.tool_calls]
        return message

    def events(self) -> Iterator[Event]:
        """Read the prompt, generate, and yield what the text means as soon as it is known."""
        try:
            logits = self._logits if self._logits is not None else self._read()
        except Cancelled:
            self.finish_reason = "cancelled"
            return
        for token in self._session.generate(
            logits[-1:],
            max_tokens=self._max_tokens,
            sampler=self._sampler,
            stop_ids=self._stop_ids,
            cancel=self._cancel,
        ):
            self.ids.append(token)
            yield from self._parser.push(self._stream.push(token))
        yield from self._finish(self._session.finish_reason)

    def _read(self) -> F32:
        return self._session.prompt(
            self.prompt_ids,
            pictures=self._pictures,
            on_progress=self._on_progress,
            on_picture=self._on_picture,
            cancel=self._cancel,
        )

    def _finish(self, reason: str) -> list[Event]:
        assert reason in ("stop", "length", "cancelled")
        self.finish_reason = reason
        last = self._parser.push(self._stream.flush())
        return last + self._parser.finish(reason)  # type: ignore[arg-type]


class Conversation:
    """A chat's turns on one session. ``ask`` yields an answer's events and keeps it; ``answer`` is the last one.

    picture_tools: called once there is a picture, and may raise. longest: the context that the checkpoint allows.
    """

    def __init__(
        self,
        session: Generator,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        ctx: int,
        stop_ids: frozenset[int],
        sampler: Sampler,
        picture_tools: Callable[[], PictureTools],
        longest: int | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.answer: Answer | None = None
        self._session, self._tokenizer, self._template = session, tokenizer, template
        self._ctx, self._stop_ids, self._sampler = ctx, stop_ids, sampler
        self._picture_tools, self._longest = picture_tools, longest
        self._ids: list[int] = []  # all turns as they were read and generated, up to the last answer's last id
        self._pictures = NONE  # among them

    @property
    def length(self) -> int:
        """Tokens of the context in use."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """All turns as they were read and generated."""
        return self._ids

    def reset(self) -> None:
        """Forget every turn."""
        self.messages, self._ids, self._pictures, self.answer = [], [], NONE, None

    def ask(
        self,
        text: str,
        *,
        think: bool,
        pictures: Sequence[bytes] = (),
        cancel: Cancel | None = None,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
    ) -> Iterator[Event]:
        """Answer one more user turn: the files of its pictures, then its text.

        A partial answer is kept; a turn that got none, or failed, is forgotten.
        Errors: ContextFull, ImageError, and whatever reading the model raises.
        """
        turns = [*self.messages, user_message(text, pictures)]
        prompt, placed = self.prompt(turns, think)
        if len(prompt) >= self._ctx:
            raise ContextFull(
                f"the conversation has {len(prompt)} tokens{placed.share}, and the context holds {self._ctx}"
                + advice(ways(len(prompt), ANSWER, self._ctx, self._longest, placed))
            )
        answer = self.answer = Answer(
            self._session,
            self._tokenizer,
            prompt,
            sampler=self._sampler,
            max_tokens=self._ctx - len(prompt),
            stop_ids=self._stop_ids,
            pictures=placed,
            cancel=cancel,
            on_progress=on_progress,
            on_picture=on_picture,
        )
        failed = False
        try:
            yield from answer.events()
        except MimoError:
            failed = True
            raise
        finally:
            if not failed and (answer.ids or answer.finish_reason == "stop"):
                self.messages = [*turns, answer.message]
                self._ids, self._pictures = prompt + answer.ids, placed

    def prompt(self, turns: list[dict[str, Any]], think: bool) -> tuple[list[int], Pictures]:
        """The next prompt: the ids so far and the new turn's, or all turns read anew where the two can't be joined."""
        messages, files = bare(turns)
        tools = self._picture_tools() if files else None
        pictures = [tools.picture(data) for data in files] if tools else []
        if self._ids:
            tail = _rendered_behind(self._template, self._tokenizer, messages, think)
            if tail is not None:
                added = pictures[len(self._pictures.items) :]
                ids, placed = _place(tools, self._tokenizer.encode_rendered(tail), added, len(self._ids))
                return self._ids + ids, self._pictures + placed
        ids = self._template.prompt_ids(self._tokenizer, messages, enable_thinking=think)
        return _place(tools, ids, pictures, 0)


def _place(
    tools: PictureTools | None, ids: list[int], pictures: Sequence[Picture], start: int
) -> tuple[list[int], Pictures]:
    return tools.place(ids, pictures, start) if tools else (ids, NONE)


def _rendered_behind(
    template: ChatTemplate, tokenizer: Tokenizer, turns: Sequence[dict[str, Any]], think: bool
) -> str | None:
    """What the template writes behind the last answer, the next to last of ``turns``; None if that can't be told.

    It can't where the template writes the turns before differently once more follow, or leaves an old answer's
    reasoning out: then the ids of the live state aren't the prompt's.
    """
    *before, answer, last = turns
    assert answer["role"] == "assistant"
    marked = {"role": "assistant", "content": _CONTENT_MARK}
    if "reasoning_content" in answer:
        marked["reasoning_content"] = _REASONING_MARK
    try:
        head = template.render(tokenizer.escapes, before, enable_thinking=think, add_generation_prompt=False)
        whole = template.render(tokenizer.escapes, [*before, marked, last], enable_thinking=think)
    except UsageError:
        return None
    if not whole.startswith(head) or whole.count(_CONTENT_MARK) != 1:
        return None
    if "reasoning_content" in answer and whole.count(_REASONING_MARK) != 1:
        return None
    return whole.partition(_CONTENT_MARK)[2]


def text_tools(engine: Any) -> tuple[Tokenizer, ChatTemplate]:
    """An engine's tokenizer and template. CheckpointError with the file that is missing or broken."""
    if engine.tokenizer is None:
        raise CheckpointError(f"{engine.model_dir / 'tokenizer.json'}: missing, and a chat needs it")
    template = engine.template or ChatTemplate.load(engine.model_dir)
    return engine.tokenizer, template
