"""Whom a chat talks with: an engine in this process here, a server in ``mimo_vk.attach``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mimo_vk import __version__
from mimo_vk.conversation import Cancel, Conversation, Progress, text_tools
from mimo_vk.decide import Decision, decide
from mimo_vk.sampling import Sampler
from mimo_vk.settings import Settings
from mimo_vk.stream import Event


class Talk(Protocol):
    """One conversation. finish_reason: of the last answer, "" before its end."""

    @property
    def finish_reason(self) -> str: ...

    @property
    def begun(self) -> bool:
        """Whether there are turns to forget."""

    def banner(self) -> str:
        """Who answers, on one line."""

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
        """Answer one more turn; see ``Conversation.ask``."""

    def decide(
        self,
        text: str,
        options: tuple[str, ...],
        *,
        pictures: Sequence[bytes] = (),
        cancel: Cancel | None = None,
        on_progress: Progress | None = None,
        on_picture: Progress | None = None,
    ) -> Decision:
        """A closed question on the conversation so far, which it does not become part of."""

    def reset(self) -> None:
        """Forget every turn."""

    def stats(self) -> list[str]:
        """Where the time went, a few lines."""


class Local:
    """An engine in this process."""

    def __init__(self, engine: Any, settings: Settings) -> None:
        tokenizer, template = text_tools(engine)
        generation = engine.generation
        temperature = generation.temperature if settings.temperature is None else settings.temperature
        top_p = generation.top_p if settings.top_p is None else settings.top_p
        self._engine, self._session = engine, engine.session()
        self._shipped = settings.model is None
        self.conversation = Conversation(
            self._session,
            tokenizer,
            template,
            ctx=engine.ctx,
            stop_ids=engine.stop_ids,
            sampler=Sampler(temperature, top_p, settings.seed),
            picture_tools=lambda: engine.picture_tools,
            longest=engine.config.max_position_embeddings,
        )

    @property
    def finish_reason(self) -> str:
        answer = self.conversation.answer
        return answer.finish_reason if answer is not None else ""

    @property
    def begun(self) -> bool:
        return bool(self.conversation.messages)

    def banner(self) -> str:
        engine = self._engine
        shipped = " (the small model that ships with the project)" if self._shipped else ""
        return f"mimo-vk {__version__}: {engine.model_name}{shipped}, {engine.backend}, {engine.ctx} tokens of context"

    def ask(self, text: str, **how: Any) -> Iterator[Event]:
        return self.conversation.ask(text, **how)

    def decide(self, text: str, options: tuple[str, ...], **how: Any) -> Decision:
        return decide(self._engine, self._session, self.conversation, text, options, **how)

    def reset(self) -> None:
        self.conversation.reset()

    def stats(self) -> list[str]:
        used = f"context: {self.conversation.length} of {self._engine.ctx} tokens"
        return [used, *self._engine.snapshot_stats().lines()]
