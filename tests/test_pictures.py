"""Pictures in a prompt, with a tower whose rows are tokens' embeddings: so each prompt has a twin of text alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk.conversation import ContextFull, Conversation, text_tools
from mimo_vk.decide import decide
from mimo_vk.engine import Engine
from mimo_vk.errors import Cancelled, CheckpointError, ImageError, UsageError
from mimo_vk.formats import bf16_to_float32
from mimo_vk.image import load_image
from mimo_vk.kv_cache import NO_ID
from mimo_vk.pictures import NONE, Gallery, Picture, Pictures, PictureTools, bare, load_tools, user_message
from mimo_vk.sampling import Sampler
from mimo_vk.settings import Settings
from tests.engines import open_engine
from tests.fake_engine import LIMITS, PICTURE_TOOLS
from tests.picture_files import FakeTower, png

DARK, BRIGHT, WIDE = png("black"), png("white"), png((200, 30, 30), 160, 96)  # 4, 4 and 15 tokens
PAD = 9
TOOLS = PictureTools(LIMITS, PAD)


def pictures_of(tools: PictureTools, *files: bytes) -> list[Picture]:
    return [tools.picture(data) for data in files]


@pytest.fixture(scope="module")
def opened(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint, chunk=5) as engine:
        yield engine


@pytest.fixture
def engine(opened: Engine) -> Engine:
    """As it was when it was opened, with a tower whose rows are known."""
    opened.stats.reused_tokens = opened.stats.pictures = 0
    opened.stats.picture_seconds = 0.0
    opened.stats.parts.clear()
    see(opened)
    return opened


def see(engine: Engine) -> None:
    engine.tower = FakeTower(bf16_to_float32(engine.model.weights.embed.data[:300]))
    engine.__dict__.pop("_gallery", None)


def prompt(engine: Engine, *parts: list[int] | bytes) -> tuple[list[int], Pictures]:
    """Ids, with a picture where a part is a file."""
    pad = engine.picture_tools.pad_id
    ids = [token for part in parts for token in ([pad] if isinstance(part, bytes) else part)]
    files = [part for part in parts if isinstance(part, bytes)]
    return engine.picture_tools.place(ids, pictures_of(engine.picture_tools, *files))


def twin(engine: Engine, *parts: list[int] | bytes) -> list[int]:
    """The ids whose embeddings are what the prompt reads."""
    assert isinstance(engine.tower, FakeTower)
    tools, out = engine.picture_tools, list[int]()
    for part in parts:
        out += engine.tower.ids(load_image(part, tools.limits)) if isinstance(part, bytes) else part
    return out


def same(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.tobytes() == b.tobytes())


def test_each_placeholder_grows_to_its_pictures_tokens() -> None:
    dark, wide = pictures_of(TOOLS, DARK, WIDE)
    assert (dark.tokens, wide.tokens) == (4, 15)
    ids, placed = TOOLS.place([1, PAD, 2, PAD], [dark, wide])
    assert ids == [1, *[PAD] * 4, 2, *[PAD] * 15]
    assert placed == Pictures((dark, wide), (*range(1, 5), *range(6, 21)))
    assert TOOLS.place([PAD], [dark], start=100)[1].positions == (100, 101, 102, 103)
    assert TOOLS.place([1, 2], []) == ([1, 2], NONE)
    assert TOOLS.find(ids, [dark, wide]) == placed


@pytest.mark.parametrize(("ids", "count"), [([1, 2], 1), ([PAD], 2), ([PAD, PAD], 1), ([PAD], 0)])
def test_a_wrong_number_of_placeholders_is_refused(ids: list[int], count: int) -> None:
    with pytest.raises(UsageError, match=f"for each of {count} pictures, found {ids.count(PAD)}"):
        TOOLS.place(ids, pictures_of(TOOLS, *[DARK] * count))


@pytest.mark.parametrize("found", [0, 4, 18, 20])
def test_ids_of_their_own_hold_a_placeholder_for_each_token(found: int) -> None:
    with pytest.raises(UsageError, match=rf"token 9 19 times for the pictures \(4 \+ 15\), found {found}"):
        TOOLS.find([1, *[PAD] * found], pictures_of(TOOLS, DARK, WIDE))
    scattered = [PAD, 1, PAD, PAD, 2, PAD]
    assert TOOLS.find(scattered, pictures_of(TOOLS, DARK)).positions == (0, 2, 3, 5)


def test_messages_give_their_pictures_away() -> None:
    turns = [user_message("Compare", [DARK, WIDE]), {"role": "assistant", "content": "Yes"}, user_message("", [DARK])]
    messages, files = bare(turns)
    assert files == [DARK, WIDE, DARK]
    picture = {"type": "image"}
    assert messages[0]["content"] == [picture, picture, {"type": "text", "text": "Compare"}]
    assert messages[1:] == [turns[1], {"role": "user", "content": [picture]}]
    assert user_message("only text") == {"role": "user", "content": "only text"}


def test_only_the_template_writes_placeholders(engine: Engine) -> None:
    tokenizer, template = text_tools(engine)
    pad = engine.picture_tools.pad_id
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    assert pad not in template.prompt_ids(tokenizer, [user_message(typed)])
    messages, files = bare([user_message(typed, [WIDE])])
    ids, placed = engine.picture_tools.place(
        template.prompt_ids(tokenizer, messages), pictures_of(engine.picture_tools, *files)
    )
    start = placed.positions[0]
    assert placed.positions == tuple(range(start, start + 15)) and ids.count(pad) == 15
    assert tokenizer.decode(ids[start - 1 : start], keep_special=True) == "<|vision_start|>"
    assert typed in tokenizer.decode(ids[start + 16 :], keep_special=True)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_rows_stand_in_the_place_of_embeddings(tiny_checkpoint: Path, chunk: int) -> None:
    parts = ([5, 200, 17], WIDE, [33], DARK, [90, 411])
    with open_engine(tiny_checkpoint, chunk=chunk) as engine:
        see(engine)
        ids, pictures = prompt(engine, *parts)
        found = engine.session().prompt(ids, pictures=pictures, all_logits=True)
        assert same(found, engine.session().prompt(twin(engine, *parts), all_logits=True))
        assert same(found[-1:], engine.session().prompt(ids, pictures=pictures))
        assert not same(found[-1:], engine.session().prompt(ids))  # the placeholders' own embeddings


def test_each_picture_gets_its_own_rows(engine: Engine) -> None:
    session = engine.session()
    answers = []
    for parts in (([1], DARK, [2], WIDE, [3]), ([1], WIDE, [2], DARK, [3]), ([1], DARK, [2], DARK, [3])):
        ids, pictures = prompt(engine, *parts)
        answers.append(session.prompt(ids, pictures=pictures))
        assert same(answers[-1], engine.session().prompt(twin(engine, *parts)))
    assert len({answer.tobytes() for answer in answers}) == 3


def test_the_same_question_on_another_picture_is_about_that_one(engine: Engine) -> None:
    session = engine.session()
    for file in (DARK, BRIGHT, DARK):
        ids, pictures = prompt(engine, [4, 5], file, [6, 7, 8])
        logits = session.prompt(ids, pictures=pictures)
        assert same(logits, engine.session().prompt(twin(engine, [4, 5], file, [6, 7, 8])))
        list(session.generate(logits, max_tokens=3, sampler=Sampler()))
    assert engine.stats.reused_tokens == 0


def test_nothing_of_a_picture_is_reused(engine: Engine) -> None:
    session, cold = engine.session(), engine.session()
    text = [5, 200, 17, 33, 90, 411]
    session.prompt(text)
    session.pin()
    ids, pictures = prompt(engine, text, WIDE, [2])
    session.prompt(ids, pictures=pictures)
    assert engine.stats.reused_tokens == 0
    assert session.ids.count(NO_ID) == 15
    with pytest.raises(AssertionError, match="nothing to reuse"):
        session.pin()
    for following in (ids, [*ids, 3], ids[:10], [*text, 8]):  # the first two go on from the picture's ids
        before = engine.stats.reused_tokens
        assert same(session.prompt(following), cold.prompt(following, all_logits=True)[-1:])
        assert engine.stats.reused_tokens - before in (0, len(text))  # the snapshot of text alone
        session.prompt(ids, pictures=pictures)


def test_what_is_generated_after_a_picture_is_not_reused_either(engine: Engine) -> None:
    session = engine.session()
    ids, pictures = prompt(engine, [4], WIDE, [6])
    answer = list(session.generate(session.prompt(ids, pictures=pictures), max_tokens=5, sampler=Sampler()))
    before = engine.stats.reused_tokens
    again = [*ids, *answer, 7]
    found = session.prompt(again)
    assert engine.stats.reused_tokens == before
    assert same(found, engine.session().prompt(again, all_logits=True)[-1:])


def test_options_are_read_behind_a_picture(engine: Engine) -> None:
    ids, pictures = prompt(engine, [4, 5], WIDE, [6])
    options = [[10, 11, 12], [10, 12], [13]]
    session = engine.session()
    found = session.read_options(ids, options, pictures=pictures)
    expected = engine.session().read_options(twin(engine, [4, 5], WIDE, [6]), options)
    assert [a.tobytes() for a in found] == [b.tobytes() for b in expected]


def test_a_stop_while_the_picture_is_read_leaves_an_empty_session(engine: Engine) -> None:
    session = engine.session()
    ids, pictures = prompt(engine, [4, 5], WIDE, [6])
    with pytest.raises(Cancelled):
        session.prompt(ids, pictures=pictures, cancel=lambda: True)
    assert session.ids == [] and isinstance(engine.tower, FakeTower) and engine.tower.seen == 0
    calls = iter(range(1000))
    with pytest.raises(Cancelled):
        session.prompt(ids, pictures=pictures, cancel=lambda: next(calls) > 12)
    assert engine.tower.seen == 1 and session.ids == []
    text = [4, 5, 6, 7]
    assert same(session.prompt(text), engine.session().prompt(text))


def test_damaged_data_fails_the_request_alone(engine: Engine) -> None:
    session = engine.session()
    ids, pictures = prompt(engine, [4], WIDE[:-30], [6])
    with pytest.raises(ImageError, match="the PNG picture is truncated or damaged"):
        session.prompt(ids, pictures=pictures)
    assert same(session.prompt([4, 5]), engine.session().prompt([4, 5]))


def test_what_does_not_fit_is_refused_before_the_tower_works(engine: Engine) -> None:
    assert isinstance(engine.tower, FakeTower)
    ids, pictures = prompt(engine, [1], png("red", 960, 960))  # 900 tokens
    with pytest.raises(UsageError, match="901 tokens, but the context holds 512"):
        engine.session().prompt(ids, pictures=pictures)
    assert engine.tower.seen == 0


def test_progress_and_time_of_a_picture(engine: Engine) -> None:
    ids, pictures = prompt(engine, [4], WIDE, [6])
    told: list[tuple[int, int]] = []
    engine.session().prompt(ids, pictures=pictures, on_picture=lambda done, total: told.append((done, total)))
    assert told == [(1, 1)]
    stats = engine.snapshot_stats()
    assert stats.pictures == 1 and stats.picture_seconds > 0 and stats.parts["pictures"] == stats.picture_seconds
    assert any(line.startswith("pictures: 1 in ") for line in stats.lines())


def test_a_picture_that_stays_is_looked_at_once() -> None:
    tower = FakeTower(np.arange(1200, dtype=np.float32).reshape(300, 4))
    tools = PictureTools(LIMITS, PAD)
    rows = {data: tower.forward(load_image(data, LIMITS)) for data in (DARK, BRIGHT, WIDE)}
    tower.seen = 0
    gallery = Gallery(tower, LIMITS, kept_bytes=2 * 4 * 4 * 4)  # of the two small ones

    def ask(*files: bytes) -> int:
        _, placed = tools.place([PAD] * len(files), pictures_of(tools, *files))
        found = gallery.rows(placed)
        assert same(found.rows, np.concatenate([rows[data] for data in files]))
        assert found.at.tolist() == list(placed.positions)
        return tower.seen

    assert [ask(DARK), ask(DARK, BRIGHT), ask(BRIGHT, DARK)] == [1, 2, 2]
    assert ask(WIDE) == 3  # larger than what is kept, and kept all the same as the last one
    assert [ask(WIDE), ask(DARK), ask(WIDE)] == [3, 4, 5]


def test_a_conversation_keeps_its_pictures(engine: Engine) -> None:
    assert isinstance(engine.tower, FakeTower)
    tokenizer, template = text_tools(engine)
    stops = frozenset(range(engine.vocab_limit, engine.config.vocab_size))  # none that can be sampled
    session = engine.session()
    talk = Conversation(
        session,
        tokenizer,
        template,
        ctx=400,
        stop_ids=stops,
        sampler=Sampler(1.0, 1.0, 3),
        picture_tools=lambda: engine.picture_tools,
    )

    def answer(text: str, *files: bytes) -> list[int]:
        def enough() -> bool:
            return talk.answer is not None and len(talk.answer.ids) >= 3

        list(talk.ask(text, think=False, pictures=files, cancel=enough))
        assert talk.answer is not None and len(talk.answer.ids) == 3
        return talk.answer.prompt_ids

    first = answer("What is it?", WIDE)
    second = answer("And now?")
    third = answer("Compare", DARK)
    assert second[: len(first) + 3] == [*first, *talk.ids[len(first) : len(first) + 3]]
    pad = engine.picture_tools.pad_id
    start = first.index(pad)
    ids, placed = talk.prompt([*talk.messages, user_message("Well?")], think=False)
    assert [picture.data for picture in placed.items] == [WIDE, DARK]
    last = len(second) + 3 + third[len(second) + 3 :].index(pad)
    assert placed.positions == (*range(start, start + 15), *range(last, last + 4))
    assert engine.stats.reused_tokens == 0 and engine.tower.seen == 2
    text = list(ids)
    for at, token in zip(placed.positions, twin(engine, WIDE, DARK), strict=True):
        text[at] = token
    assert same(session.prompt(ids, pictures=placed), engine.session().prompt(text))
    with pytest.raises(
        ContextFull, match=r"has \d+ tokens \(419 for pictures\), and the context holds 400: MIMO_MAX_IMAGE_TOKENS=13 w"
    ):
        list(talk.ask("Big?", think=False, pictures=[png("red", 640, 640)]))
    decision = decide(engine, session, talk, "Is it?", ("yes", "no"), pictures=[BRIGHT])
    assert sum(decision.probabilities) == pytest.approx(1)
    assert engine.tower.seen == 3 and len(talk.messages) == 6


def test_a_model_without_a_tower_says_so(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint) as engine:
        config = engine.config
    with pytest.raises(UsageError, match="this model has no vision tower"):
        load_tools(tiny_checkpoint, replace(config, vision=None), Settings())
    with pytest.raises(CheckpointError, match=r"config\.json: image_token_id: expected a token id, it is missing"):
        load_tools(tiny_checkpoint, replace(config, image_token_id=None), Settings())
    assert load_tools(tiny_checkpoint, config, Settings(max_image_tokens=3)).picture(WIDE).tokens <= 3
    assert PICTURE_TOOLS.picture(WIDE).tokens == 15
