"""Prefix reuse, snapshots and read-outs: the bytes of a cold engine, and how many tokens each really cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import open_engine

from mimo_vk.engine import Engine
from mimo_vk.errors import UsageError

STATE = [(5 * i + i // 7) % 400 + 3 for i in range(140)]  # longer than the window
OTHER = [(3 * i + 11) % 400 + 2 for i in range(170)]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint) as opened:
        yield opened


def cold(engine: Engine, ids: list[int]) -> bytes:
    return engine.session().prompt(ids).tobytes()


def cost(engine: Engine, work: Callable[[], Any]) -> tuple[Any, int]:
    """What ``work`` returns, and how many prompt tokens it fed."""
    before = engine.stats.prefill_tokens
    result = work()
    return result, engine.stats.prefill_tokens - before


def test_turns_reuse_the_live_state(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE)
    logits, fed = cost(engine, lambda: session.prompt(STATE + OTHER[:9]))
    assert fed == 9
    assert logits.tobytes() == cold(engine, STATE + OTHER[:9])


def test_the_same_prompt_again_feeds_nothing(engine: Engine) -> None:
    session = engine.session()
    first = session.prompt(STATE)
    again, fed = cost(engine, lambda: session.prompt(STATE))
    assert fed == 0
    assert again.tobytes() == first.tobytes()


def test_an_edited_turn_starts_afresh(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE + OTHER[:5])
    edited = [*STATE[:50], 1, *STATE[51:]]
    logits, fed = cost(engine, lambda: session.prompt(edited))
    assert fed == len(edited)
    assert logits.tobytes() == cold(engine, edited)


def test_a_shorter_prompt_starts_afresh(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE)
    assert session.prompt(STATE[:60]).tobytes() == cold(engine, STATE[:60])


def test_a_snapshot_is_resumed_after_options_slid_the_window_past_it(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE)
    session.pin()
    for option in (OTHER[:150], OTHER[20:30], OTHER[5:160]):
        logits, fed = cost(engine, partial(session.prompt, STATE + option))
        assert fed == len(option)
        assert logits.tobytes() == cold(engine, STATE + option)


def test_snapshots_nest_and_the_deepest_wins(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE)
    session.pin()
    question = STATE + OTHER[:20]
    session.prompt(question)
    session.pin()
    _, fed = cost(engine, lambda: session.prompt([*question, 9, 8]))
    assert fed == 2
    sibling = STATE + OTHER[40:50]
    logits, fed = cost(engine, lambda: session.prompt(sibling))
    assert fed == 10
    assert logits.tobytes() == cold(engine, sibling)
    _, fed = cost(engine, lambda: session.prompt([*question, 7]))
    assert fed == 21  # the sibling rewrote the first question's rows: only the state's snapshot was still good


def test_a_snapshot_whose_rows_were_rewritten_is_released(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE)
    session.pin()
    session.prompt(OTHER)
    logits, fed = cost(engine, lambda: session.prompt([*STATE, 4]))
    assert fed == len(STATE) + 1
    assert logits.tobytes() == cold(engine, [*STATE, 4])


def test_a_short_unrelated_prompt_spoils_a_snapshot_too(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE)
    session.pin()
    session.prompt([STATE[0], STATE[1] + 1])
    logits, fed = cost(engine, lambda: session.prompt([*STATE, 4]))
    assert fed == len(STATE) + 1
    assert logits.tobytes() == cold(engine, [*STATE, 4])


def test_rows_read_after_other_ids_spoil_a_snapshot(engine: Engine) -> None:
    """Neither whole prompts nor options, read one after another, may make its ids look whole again."""
    changed = [STATE[0], STATE[1] + 1, *STATE[2:]]
    session = engine.session()
    session.prompt(STATE)
    session.pin()
    for ids in (changed, STATE[:3]):
        session.prompt(ids, all_logits=True)
    assert session.prompt([*STATE, 4]).tobytes() == cold(engine, [*STATE, 4])
    session.pin()
    session.read_options(STATE[:1], [[*changed[1:5], 3], [*STATE[1:3], 3]])
    assert session.prompt([*STATE, 4, 5]).tobytes() == cold(engine, [*STATE, 4, 5])


def test_only_so_many_snapshots_are_kept(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint, pin_slots=2) as engine:
        session = engine.session()
        for length in (50, 60, 70):
            session.prompt(STATE[:length])
            session.pin()
        session.prompt(STATE[:50] + OTHER[:3])  # the 50-token snapshot made room: nothing to resume from
        _, fed = cost(engine, lambda: session.prompt(STATE[:50] + OTHER[5:8]))
        assert fed == 53


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_read_out_predicts_the_last_ids(engine: Engine, count: int) -> None:
    ids = STATE + OTHER[:count]
    whole = engine.session().prompt(ids, all_logits=True)
    expected = whole[len(STATE) - 1 : -1].tobytes()
    session = engine.session()
    assert session.read_out(ids, count).tobytes() == expected  # cold
    session = engine.session()
    session.prompt(STATE)
    session.pin()
    session.prompt(STATE + OTHER[100:110])
    rows, fed = cost(engine, lambda: session.read_out(ids, count))
    assert rows.tobytes() == expected
    assert fed == count - 1  # only the option's own tokens, and the last one is not fed


def test_a_read_out_does_not_resume_from_the_live_state(engine: Engine) -> None:
    session = engine.session()
    session.prompt(STATE)
    rows, fed = cost(engine, lambda: session.read_out([*STATE, 5], 1))
    assert fed == len(STATE)
    assert rows.tobytes() == cold(engine, STATE)


def test_the_first_id_has_no_prediction(engine: Engine) -> None:
    with pytest.raises(UsageError, match="first"):
        engine.session().read_out([1, 2, 3], 3)
