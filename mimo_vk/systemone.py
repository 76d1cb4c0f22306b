"""System One: closed questions on a state, answered with probabilities. Nothing is generated.

Each option is read as what the assistant would say, followed by the token that ends its turn (else "1" would always
beat "10"). What questions share is read once, and each question once for all its options, through snapshots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mimo_vk.chat_format import ChatTemplate
from mimo_vk.conversation import text_tools
from mimo_vk.errors import CheckpointError
from mimo_vk.formats import F32
from mimo_vk.pictures import NONE, Pictures
from mimo_vk.room import advice, ways
from mimo_vk.sampling import F64
from mimo_vk.session import Cancel, Progress
from mimo_vk.systemone_pictures import NO_PICTURES, Inlay
from mimo_vk.systemone_request import Content, Fault, InvalidRequest, Question, Request
from mimo_vk.tokenizer import Tokenizer

_SLACK = 64  # tokens by which a text can shrink when more is written behind it, and more
# Stands where a text goes in the template, to see what comes before and behind it. No one else writes this.
_MARK = "\U0010fffd\ue001systemone\ue001\U0010fffd"


class Reader(Protocol):
    """What a read-out needs of a session: see ``mimo_vk.session``."""

    def prompt(
        self, ids: list[int], *, live: bool, on_progress: Progress | None = None, cancel: Cancel | None = None
    ) -> F32: ...

    def pin(self) -> object: ...

    def read_options(
        self, ids: list[int], options: Sequence[list[int]], *, pictures: Pictures = NONE, cancel: Cancel | None = None
    ) -> list[F64]: ...

    def note(self, ids: list[int]) -> bool: ...


@dataclass(frozen=True)
class Asked:
    """A question as token ids: the prompt up to the answer, and what each option adds to it."""

    ids: list[int]
    options: list[list[int]]
    pictures: Pictures = NONE


@dataclass(frozen=True)
class Prompts:
    """A request's token ids. ``prefix`` and ``state`` are true beginnings of the prompts that have no picture."""

    prefix: list[int]
    state: list[int]
    questions: dict[str, Asked]  # those that the model must be asked: with two options or more

    @property
    def input_tokens(self) -> int:
        """Prompt tokens, those that all questions share counted once."""
        shared = len(self.state)
        return shared + sum(len(asked.ids) - (0 if asked.pictures else shared) for asked in self.questions.values())

    @property
    def output_tokens(self) -> int:
        """Option tokens whose probability is read, each option's end among them."""
        return sum(len(option) for asked in self.questions.values() for option in asked.options)


@dataclass(frozen=True)
class Answers:
    """Answers by question id, in the request's order, as the API's objects; and the tokens counted."""

    answers: dict[str, dict[str, Any]]
    input_tokens: int
    output_tokens: int


def answer(engine: Any, session: Reader, request: Request, *, cancel: Cancel | None = None) -> Answers:
    """Answer every question of a request. InvalidRequest where a prompt is too long for the context; ImageError."""
    tokenizer, template = text_tools(engine)
    tools = engine.picture_tools if request.assets else None
    pictures = {name: tools.picture(data) for name, data in request.assets.items()} if tools else {}
    prompts = tokenise(tokenizer, template, request, engine.ctx, Inlay(pictures, tools))
    found = read(session, prompts, request.pin_state, cancel)
    return Answers(answers_of(request, found), prompts.input_tokens, prompts.output_tokens)


def as_text(content: Content) -> str:
    """Text as it is, anything else as JSON on one line."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def question_text(question: Question) -> str:
    """What is asked: the instructions, a line for each option, and how to answer."""
    lines = [] if question.instructions is None else [as_text(question.instructions)]
    for option in question.options:
        if option.description is not None:
            lines.append(f"{option.text}: {as_text(option.description)}")
        elif question.type != "noul":  # yes and no need no explanation
            lines.append(option.text)
    closing = {"noul": "Answer yes or no.", "score": "Answer with the number."}.get(question.type)
    return "\n".join([*lines, closing] if closing else lines)


def tokenise(
    tokenizer: Tokenizer, template: ChatTemplate, request: Request, ctx: int, inlay: Inlay = NO_PICTURES
) -> Prompts:
    """The request's prompts: one user turn each, and the assistant's cue with thinking off.

    InvalidRequest where ``ctx`` tokens can't hold them. inlay: the request's assets.

    Every prompt is tokenised whole. What they share is found among the ids, since a text cut in two may be cut into
    other tokens; so a snapshot of the shared part is the state that each prompt passes through when read cold.
    """
    open_questions = {name: question for name, question in request.questions.items() if len(question.options) > 1}
    if not open_questions:
        return Prompts([], [], {})
    end = end_of_turn(tokenizer, template)
    shared = request.prefix + as_text(inlay.marked(request.state)) + "\n\n"
    opened = _opened(tokenizer, template, inlay.text_alone(shared))
    if len(opened) > ctx + _SLACK:  # before it is tokenised again with each question
        msg = f"{len(opened)} tokens are more than the context of {ctx}"
        raise InvalidRequest([Fault(("body", "state"), msg, "context_length_exceeded")])
    questions = {}
    for name, question in open_questions.items():
        text = shared + question_text(inlay.marked_question(question))
        ids, pictures = inlay.prompt(tokenizer, template, text)
        questions[name] = Asked(ids, options_ids(tokenizer, question, end), pictures)
    check_room(questions, ctx)
    resumed = [asked.ids for asked in questions.values() if not asked.pictures]
    state = common_prefix([opened, *resumed]) if resumed else []  # a picture in it is in every question's prompt
    prefix = common_prefix([_opened(tokenizer, template, request.prefix), state]) if request.prefix and resumed else []
    return Prompts(prefix, state, questions)


def options_ids(tokenizer: Tokenizer, question: Question, end: int) -> list[list[int]]:
    """Each option's own ids: its text, which no control token can be part of, and the end of the turn."""
    return [[*tokenizer.encode(option.text), end] for option in question.options]


def end_of_turn(tokenizer: Tokenizer, template: ChatTemplate) -> int:
    """The token that the template writes behind an answer. CheckpointError if it writes no control token there."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text = template.render(tokenizer.escapes, turns, enable_thinking=False, add_generation_prompt=False)
    behind = tokenizer.encode_rendered(text.rpartition(_MARK)[2])
    if not behind or behind[0] not in {token.id for token in tokenizer.control.values()}:
        raise CheckpointError(f"{template.name}: expected a control token behind an answer, found none")
    return behind[0]


def _opened(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> list[int]:
    """The ids of a user's turn that has come as far as ``text``."""
    turns = [{"role": "user", "content": text + _MARK}]
    rendered = template.render(tokenizer.escapes, turns, enable_thinking=False)
    return tokenizer.encode_rendered(rendered.rpartition(_MARK)[0])


def common_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """The ids that all sequences begin with."""
    low, high = min(sequences), max(sequences)  # in order, what these two share is shared by all between them
    count = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:count]


def check_room(questions: Mapping[str, Asked], ctx: int) -> None:
    """InvalidRequest names every question whose prompt and longest option the context can't hold."""
    faults = []
    for name, asked in questions.items():
        longest = max(map(len, asked.options))
        if len(asked.ids) + longest > ctx:
            count = f"{len(asked.ids)} prompt tokens{asked.pictures.share}"
            msg = f"{count} and an option of {longest} are more than the context of {ctx}"
            msg += advice(ways(len(asked.ids), longest, ctx, None, asked.pictures))
            faults.append(Fault(("body", "questions", name), msg, "context_length_exceeded"))
    if faults:
        raise InvalidRequest(faults)


def read(
    session: Reader, prompts: Prompts, pin_state: bool | None, cancel: Cancel | None = None
) -> dict[str, list[F64]]:
    """Each question's options as log-probabilities of their ids. The prefix is pinned; the state where it is of use."""
    if not prompts.questions:
        return {}
    came_before = bool(prompts.state) and session.note(prompts.state)
    readers = sum(not asked.pictures for asked in prompts.questions.values())
    pinned = (readers > 1 or came_before) if pin_state is None else pin_state
    for ids in (prompts.prefix, prompts.state if pinned else []):
        if ids:
            session.prompt(ids, live=False, cancel=cancel)
            session.pin()
    return {
        name: session.read_options(asked.ids, asked.options, pictures=asked.pictures, cancel=cancel)
        for name, asked in prompts.questions.items()
    }


def normalised(logs: Sequence[F64], how: str) -> list[float]:
    """Probabilities of the options, by their whole log-probability ("sum") or that of a token of theirs ("mean")."""
    totals = [math.fsum(option) / (len(option) if how == "mean" else 1) for option in logs]
    most = max(totals)
    weights = [math.exp(total - most) for total in totals]
    whole = math.fsum(weights)
    return [weight / whole for weight in weights]


def confidence(probabilities: Sequence[float]) -> float:
    """0 where all options are as likely, 1 where one is certain: (n * peak - 1) / (n - 1)."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    return min(1.0, max(0.0, (count * max(probabilities) - 1) / (count - 1)))


def entropy(probabilities: Sequence[float]) -> float:
    """In bits: 0 where one option is certain, log2(n) where all n are as likely."""
    return math.fsum(-p * math.log2(p) for p in probabilities if p > 0)


def answers_of(request: Request, found: Mapping[str, Sequence[F64]]) -> dict[str, dict[str, Any]]:
    """The API's answers by id. found: what ``read`` returned; a question that isn't in it has only one option."""
    answers = {}
    for name, question in request.questions.items():
        probabilities = normalised(found[name], request.normalize) if name in found else [1.0]
        answers[name] = answer_of(question, probabilities)
    return answers


def answer_of(question: Question, probabilities: Sequence[float]) -> dict[str, Any]:
    """The API's answer. Of equally likely choices the first is taken."""
    by_key = {option.key: p for option, p in zip(question.options, probabilities, strict=True)}
    if question.type == "noul":
        return {"type": "noul", "noul": by_key["true"]}
    rest: Mapping[str, Any] = {"confidence": confidence(probabilities), "probabilities": by_key}
    if question.type == "choice":
        return {"type": "choice", "choice": max(by_key, key=lambda key: by_key[key]), **rest}
    score = math.fsum(level * p for level, p in enumerate(probabilities))
    legend = {option.key: option.description for option in question.options}
    return {"type": "score", "score": score, "legend": legend, **rest}
