"""``/decide``: a closed question on a conversation, answered with the probability of each of a few answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mimo_vk.conversation import Cancel, ContextFull, Conversation, Progress, text_tools
from mimo_vk.errors import UsageError
from mimo_vk.pictures import user_message
from mimo_vk.room import advice, ways
from mimo_vk.systemone import common_prefix, end_of_turn, entropy, normalised, options_ids, question_text
from mimo_vk.systemone_request import MAX_OPTIONS, Option, Question

BAR = 24  # characters
LABEL = 32  # characters of an option that are shown


@dataclass(frozen=True)
class Decision:
    """The options' probabilities, in the order asked, and the tokens that were read for them."""

    options: tuple[str, ...]
    probabilities: tuple[float, ...]
    prompt_tokens: int
    option_tokens: int

    def lines(self, bars: bool) -> list[str]:
        """A line for each option and one for the whole; without bars a tab stands between option and probability."""
        shown = [option if len(option) <= LABEL else option[: LABEL - 1] + "…" for option in self.options]
        width = max(map(len, shown))
        rows = list(zip(shown, self.probabilities, strict=True))
        if bars:
            lines = [f"{option:{width}}  {bar(p)}  {p:6.1%}" for option, p in rows]
        else:
            lines = [f"{option}\t{p:.6f}" for option, p in zip(self.options, self.probabilities, strict=True)]
        most = entropy([1 / len(rows)] * len(rows))
        return [
            *lines,
            f"entropy {entropy(self.probabilities):.2f} of {most:.2f} bits; "
            f"{self.prompt_tokens} prompt and {self.option_tokens} option tokens read",
        ]


def bar(share: float) -> str:
    """A bar of a fixed width, filled by a share of 0 to 1."""
    filled = round(share * BAR)
    return "█" * filled + "·" * (BAR - filled)


def read_options(text: str) -> tuple[str, ...]:
    """The answers of ``/decide A | B | C``. UsageError for fewer than two, a blank one, or one that comes twice."""
    options = tuple(option.strip() for option in text.split("|"))
    if len(options) < 2 or not all(options):
        raise UsageError("/decide: expected two answers or more, such as /decide yes | no")
    if len(options) > MAX_OPTIONS:
        raise UsageError(f"/decide: expected at most {MAX_OPTIONS} answers, found {len(options)}")
    again = next((option for i, option in enumerate(options) if option in options[:i]), None)
    if again is not None:
        raise UsageError(f"/decide: the answer {again!r} comes twice")
    return options


def as_question(text: str, options: Sequence[str]) -> Question:
    """A line and the answers to choose from."""
    return Question("choice", text, tuple(Option(option, option) for option in options))


def decide(
    engine: Any,
    session: Any,
    conversation: Conversation,
    text: str,
    options: tuple[str, ...],
    *,
    pictures: Sequence[bytes] = (),
    cancel: Cancel | None = None,
    on_progress: Progress | None = None,
    on_picture: Progress | None = None,
) -> Decision:
    """Ask ``text`` as the conversation's next turn and read each option as its answer; the conversation stays as it is.

    The conversation is pinned, so that neither this question nor the next turn reads it again, unless there are
    pictures in it. Errors: ContextFull, ImageError, Cancelled, and whatever reading the model raises.
    """
    tokenizer, template = text_tools(engine)
    question = as_question(text, options)
    turns = [*conversation.messages, user_message(question_text(question), pictures)]
    ids, placed = conversation.prompt(turns, think=False)
    answers = options_ids(tokenizer, question, end_of_turn(tokenizer, template))
    longest = len(ids) + max(map(len, answers))
    if longest > engine.ctx:
        raise ContextFull(
            f"the question and its answers need {longest} tokens{placed.share}, and the context holds {engine.ctx}"
            + advice(ways(longest, 0, engine.ctx, engine.config.max_position_embeddings, placed))
        )
    before = engine.stats.prefill_tokens
    held = [] if placed else common_prefix([conversation.ids, ids])
    if held:
        session.prompt(held, cancel=cancel, on_progress=on_progress)
        session.pin()
    logs = session.read_options(ids, answers, pictures=placed, on_picture=on_picture, cancel=cancel)
    fed = engine.stats.prefill_tokens - before
    own = sum(len(answer) - 1 for answer in answers)
    return Decision(options, tuple(normalised(logs, "sum")), fed - own, sum(map(len, answers)))
