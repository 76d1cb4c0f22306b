"""The demonstration model's data: right by construction, and its held-out list kept out of training."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tools.demo import facts, heldout, looks, stories, sums
from tools.demo.checks import Answer, holds
from tools.demo.draw import Draw, Turn, reserved
from tools.demo.mix import PICTURED, SKILLS, Conversation, conversation
from tools.demo.patches import patches_of
from tools.demo.pictures import paint, two_panels
from tools.demo.render import Renderer, messages_of, with_pads

# Skills whose last prompt says all that is asked: the same prompt in training would give the answer away.
ALONE = ("arithmetic", "facts", "closed", "repeating", "upper case", "counting", "unknown", "greetings", "story")


@pytest.fixture(scope="module")
def training() -> list[Conversation]:
    draw = Draw(123)
    return [conversation(draw) for _ in range(4000)]


def last_prompt(entry: dict[str, object]) -> str:
    messages = entry["messages"]
    assert isinstance(messages, list)
    return str(messages[-1]["content"])


def test_the_committed_list_is_what_the_seed_gives():
    assert heldout.read() == json.loads(json.dumps(heldout.entries()))


def test_the_list_has_300_prompts_and_72_with_a_picture_over_all_skills():
    entries = heldout.read()
    assert len(entries) == 372
    assert [e["id"] for e in entries if e["skill"] in PICTURED] == list(range(300, 372))
    assert Counter(e["skill"] for e in entries) == heldout.COUNTS
    assert set(heldout.COUNTS) == set(SKILLS)
    assert sum(e["think"] for e in entries) == sum((count + 2) // 4 for count in heldout.COUNTS.values())


def test_no_held_out_prompt_is_drawn_in_training(training):
    said = {turn.user for conv in training for turn in conv.turns}
    assert len(said) > 5000
    given_away = [e for e in heldout.read() if e["skill"] in ALONE and last_prompt(e) in said]
    assert given_away == []


def test_held_out_numbers_and_names_are_reserved(training):
    text = " ".join(turn.user + " " + turn.answer for conv in training for turn in conv.turns)
    drawn = {(op, int(a), int(b)) for a, op, b in re.findall(r"\b(\d+) ?([+-]) ?(\d+)\b", text)}
    assert len(drawn) > 3000
    assert not any(reserved("sum", triple) for triple in drawn)
    names = {e["check"]["all"][0] for e in heldout.read() if "name" in last_prompt(e) and e["skill"] == "memory"}
    assert len(names) > 5
    assert not names & set(re.findall(r"[A-Z][a-z]+", text))


@pytest.mark.parametrize("held", [False, True])
def test_every_sum_is_right_and_so_is_its_working(held):
    draw = Draw(5, held)
    for _ in range(2000):
        op, a, b = sums.pair(draw)
        total = {"+": a + b, "-": a - b}[op]
        assert 0 <= total <= 99 and reserved("sum", (op, a, b)) == held
        thought = sums.thought_of(op, a, b)
        assert thought.endswith(f" So {total}.")
        for left, sign, right, more, value in re.findall(r"(\d+)([+-])(\d+)([+-]1)?=(\d+)", thought):
            assert int(left) + int(sign + right) + int(more or 0) == int(value), thought


def test_only_what_follows_the_equals_sign_is_trained_when_practising():
    tokens = ["<|im_start|>", "assistant", "\n", "<think>", "</think>", *"17+25=42", ",", "<|im_end|>"]
    marked = Renderer(None).trained(tokens, [Turn("", "", "", learn_after="=")])
    assert [t for t, on in zip(tokens, marked, strict=True) if on] == ["4", "2", ","]


def test_an_answer_is_trained_from_its_cue_to_the_end_of_its_turn():
    tokens = ["<|im_start|>", "user", "\n", "hi", "<|im_end|>", "<|im_start|>", "assistant", "\n", "<think>"]
    off = [*tokens, "</think>", "yes", "<|im_end|>"]
    assert [i for i, on in enumerate(Renderer(None).trained(off, [Turn("", "", "")])) if on] == [10, 11]
    on = [*tokens, "so", "</think>", "yes", "<|im_end|>"]
    assert [i for i, is_on in enumerate(Renderer(None).trained(on, [Turn("", "", "")])) if is_on] == [8, 9, 10, 11, 12]


def painted(shape: str, size: int = 64) -> np.ndarray:
    picture = {"size": [size, size], "background": [255, 255, 255], "shapes": [[shape, [0, 0, 0], 32, 32, 20, 0]]}
    return np.asarray(paint(picture))[:, :, 0]


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        ("circle", math.pi * 20**2),
        ("square", (2 * 0.85 * 20) ** 2),
        ("triangle", 0.5 * (1.9 * 20) * (1.8 * 20)),
        ("ring", math.pi * 20**2 * (1 - 0.68**2)),
        ("cross", (2 * 0.6 * 1.9 - 0.6**2) * 20**2),
    ],
)
def test_a_shape_covers_its_area(shape, area):
    assert (255.0 - painted(shape)).sum() / 255 == pytest.approx(area, rel=0.06)


@pytest.mark.parametrize("skill", PICTURED)
@pytest.mark.parametrize("held", [False, True])
def test_a_picture_is_cheap_and_its_questions_have_their_answers(skill, held):
    draw = Draw(8, held)
    for _ in range(60):
        turns = looks.look(draw, skill)
        assert all(holds(turn.check, Answer(turn.answer)) for turn in turns)
        assert turns[0].picture is not None and not any(turn.picture for turn in turns[1:])
        image = paint(turns[0].picture)
        assert image.size == tuple(turns[0].picture["size"])
        assert 3 <= patches_of(image).tokens <= 16


def test_each_placeholder_becomes_as_many_as_its_picture_has_tokens():
    wide, tall = (patches_of(Image.new("RGB", size)) for size in ((128, 64), (64, 96)))
    text = with_pads("a<|image_pad|>b<|image_pad|>c", [wide, tall])
    assert text == "a" + "<|image_pad|>" * 8 + "b" + "<|image_pad|>" * 6 + "c"


def test_left_and_right_are_where_they_are_said_to_be():
    picture = two_panels(Draw(1), "red", "blue")
    pixels = np.asarray(paint(picture)).astype(int)
    left, right = pixels[:, 0], pixels[:, -1]
    assert (left[:, 0] > left[:, 2] + 100).all() and (right[:, 2] > right[:, 0] + 100).all()


def test_the_table_has_60_facts_without_ambiguity():
    assert len(facts.CAPITALS) + len(facts.SYMBOLS) == 60
    assert len(set(facts.CAPITALS.values())) == len(facts.CAPITALS)
    assert not set(facts.UNKNOWN_COUNTRIES) & set(facts.CAPITALS)


def test_a_story_names_its_animal_throughout():
    text = stories.tell(Draw(3), "fox", "Milo")
    check = {"type": "story", "name": "Milo", "animal": "fox", "words": 120}
    assert holds(check, Answer(text))
    assert not holds(check, Answer(text.replace("Milo", "Otto")))
    assert not holds(check, Answer(text, stopped=False))


def test_messages_keep_the_thought_of_the_last_answer_only():
    turns = [Turn("a", "b", "first"), Turn("", "d", "second", result="c")]
    made = messages_of(turns, "s", think=True)
    assert [m["role"] for m in made] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m.get("reasoning_content") for m in made] == [None, None, None, None, "second"]


CALL = {"type": "call", "name": "get_weather", "arguments": {"city": "Rome", "days": 3}}


@pytest.mark.parametrize(
    ("check", "answer", "right"),
    [
        ({"type": "exact", "any": ["42", "42."]}, Answer("42"), True),
        ({"type": "exact", "any": ["42", "42."]}, Answer(" 42.\n"), True),
        ({"type": "exact", "any": ["42", "42."]}, Answer("142"), False),
        ({"type": "exact", "any": ["42"]}, Answer("42", stopped=False), False),
        ({"type": "exact", "any": [""]}, Answer("", tool_calls=[{"name": "x", "arguments": {}}]), False),
        ({"type": "contains", "all": ["sunny", "21"]}, Answer("It is sunny, 21 degrees."), True),
        ({"type": "contains", "all": ["sunny", "21"]}, Answer("It is sunny, 12 degrees."), False),
        ({"type": "starts", "text": "I don't know"}, Answer("I don't know that."), True),
        ({"type": "starts", "text": "I don't know"}, Answer("Well, I don't know"), False),
        (CALL, Answer("", tool_calls=[{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]), True),
        (CALL, Answer("", tool_calls=[{"name": "get_weather", "arguments": {"city": "Rome", "days": "3"}}]), False),
        (CALL, Answer("", tool_calls=[{"name": "get_time", "arguments": {"city": "Rome", "days": 3}}]), False),
        (CALL, Answer("Rome"), False),
    ],
)
def test_checks(check, answer, right):
    assert holds(check, answer) == right


def test_an_unknown_check_is_refused():
    with pytest.raises(ValueError, match="colour"):
        holds({"type": "colour"}, Answer("red"))
