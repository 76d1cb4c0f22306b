"""``/decide``: the numbers of a cold engine, what they cost, what a person sees, and going back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import open_engine

from mimo_vk.conversation import ContextFull
from mimo_vk.decide import Decision, as_question, bar, read_options
from mimo_vk.engine import Engine
from mimo_vk.errors import UsageError
from mimo_vk.settings import Settings
from mimo_vk.systemone import end_of_turn, normalised, options_ids, question_text
from mimo_vk.talk import Local
from tests.fake_engine import FakeEngine
from tests.terminal import CTRL_C, CTRL_D, Terminal
from tests.test_chat import FAKE, ROOT, piped

OPTIONS = ("calm", "calmer than that", "größer")


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint) as opened:
        yield opened


def after(calls: int) -> Callable[[], bool]:
    """A cancel that says yes from the given call on."""
    counted = iter(range(calls))
    return lambda: next(counted, None) is None


def cold(engine: Engine, talk: Local, text: str) -> tuple[list[int], tuple[float, ...]]:
    """The prompt, and the probabilities from a session that has read nothing."""
    assert engine.tokenizer is not None and engine.template is not None
    question = as_question(text, OPTIONS)
    turns = [*talk.conversation.messages, {"role": "user", "content": question_text(question)}]
    ids = talk.conversation.prompt(turns, think=False)[0]
    end = end_of_turn(engine.tokenizer, engine.template)
    logs = engine.session().read_options(ids, options_ids(engine.tokenizer, question, end))
    return ids, tuple(normalised(logs, "sum"))


def test_on_a_conversation(engine: Engine) -> None:
    talk = Local(engine, Settings(temperature=0.0))
    layers = len(engine.config.layers)
    answer = list(talk.ask("Hello there", think=False, cancel=after(8 * layers)))
    assert answer and talk.finish_reason == "cancelled"
    before = list(talk.conversation.messages)
    held = len(talk.conversation.ids)
    for number, text in enumerate(("What is the tone?", "And now?")):
        ids, expected = cold(engine, talk, text)
        decision = talk.decide(text, OPTIONS)
        assert decision.probabilities == expected
        assert ids[:held] == talk.conversation.ids
        own = len(ids) - held
        # the conversation's last id may not have been fed; the second question finds it pinned
        assert decision.prompt_tokens in ((own, own + 1) if number == 0 else (own,))
        assert engine.tokenizer is not None
        answers = options_ids(engine.tokenizer, as_question(text, OPTIONS), 0)
        assert decision.option_tokens == sum(map(len, answers))
    assert talk.conversation.messages == before
    fed = engine.stats.prefill_tokens
    list(talk.ask("Go on", think=False, cancel=after(6 * layers)))
    added = talk.conversation.prompt([*before, {"role": "user", "content": "Go on"}], think=False)[0]
    assert talk.conversation.messages[-2] == {"role": "user", "content": "Go on"}
    assert engine.stats.prefill_tokens - fed < len(added)  # resumed behind the decisions


def test_before_the_first_turn(engine: Engine) -> None:
    talk = Local(engine, Settings())
    ids, expected = cold(engine, talk, "Which?")
    decision = talk.decide("Which?", OPTIONS)
    assert decision.probabilities == expected and decision.prompt_tokens == len(ids)
    assert talk.conversation.messages == []


def test_a_question_that_does_not_fit() -> None:
    talk = Local(FakeEngine([], ctx=50), Settings())
    with pytest.raises(ContextFull, match="context holds 50"):
        talk.decide("word " * 60, OPTIONS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("yes", "two answers or more"),
        ("yes |", "two answers or more"),
        ("| yes", "two answers or more"),
        ("a | b | a", "'a' comes twice"),
        (" | ".join(map(str, range(256))), "at most 255"),
    ],
)
def test_answers_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_options(text)


def test_answers_are_read() -> None:
    assert read_options("yes|no, not now | ü b ") == ("yes", "no, not now", "ü b")


def test_what_is_shown() -> None:
    decision = Decision(("yes", "n" * 40), (0.75, 0.25), 12, 5)
    assert decision.lines(bars=True) == [
        "yes" + " " * 29 + "  " + "█" * 18 + "·" * 6 + "   75.0%",
        "n" * 31 + "…  " + "█" * 6 + "·" * 18 + "   25.0%",
        "entropy 0.81 of 1.00 bits; 12 prompt and 5 option tokens read",
    ]
    assert decision.lines(bars=False)[:2] == ["yes\t0.750000", "n" * 40 + "\t0.250000"]
    assert (bar(0.0), bar(1.0)) == ("·" * 24, "█" * 24)


def test_piped() -> None:
    done = piped(b"/decide\n/decide only\n/decide yes | no | maybe\nIs it?\n/decide\nHi\n", "Hello.")
    assert done.stdout.decode().splitlines() == [
        "each line is a question now: yes | no | maybe",
        "yes\t0.571429",
        "no\t0.285714",
        "maybe\t0.142857",
        "entropy 1.38 of 1.58 bits; " + done.stdout.decode().splitlines()[4].partition("; ")[2],
        "lines are turns again",
        "Hello.",
    ]
    assert (
        done.stderr.decode().splitlines()
        == ["mimo-vk: /decide: expected two answers or more, such as /decide yes | no"] * 2
    )
    assert done.returncode == 2


def test_on_a_terminal() -> None:
    with Terminal([*FAKE, "0", "Hello."], ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.type("/decide yes | no\r")
        terminal.wait_for("decide> ")
        terminal.type("Is it?\r")
        assert "█" * 16 + "·" * 8 in terminal.wait_for("66.7%")
        terminal.wait_for("entropy 0.92 of 1.00 bits")
        terminal.wait_for("decide> ")
        terminal.type("/decide\r")
        terminal.wait_for("turns again")
        terminal.wait_for("> ")
        terminal.type("Hi\r")
        terminal.wait_for("Hello.")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_ctrl_c_stops_a_decision() -> None:
    with Terminal([sys.executable, "-m", "tests.fake_engine", "3", "Hello."], ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.type("/decide yes | no\r")
        terminal.wait_for("decide> ")
        terminal.type("Is it?\r")
        terminal.wait_for("reading the prompt, 2 s")  # of 3; before, the line might not be read yet
        terminal.type(CTRL_C)
        terminal.wait_for("stopped")
        terminal.wait_for("decide> ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0
