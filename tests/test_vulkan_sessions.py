"""Prefix reuse, snapshots, read-outs and closed questions with experts on the device: the bytes of a cold CPU engine.

What a tier holds depends on all that was asked before, so that each prompt finds other experts on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk.engine import Engine
from mimo_vk.sampling import Sampler, log_softmax
from mimo_vk.systemone import read, tokenise
from mimo_vk.systemone_request import parse_request
from tests.engines import open_engine
from tests.vulkan_device import software_device

pytestmark = pytest.mark.bits

STATE = [(5 * i + i // 7) % 400 + 3 for i in range(140)]  # longer than the window
OTHER = [(3 * i + 11) % 400 + 2 for i in range(90)]
QUESTIONS = {
    "outage": {"type": "noul", "instructions": "Is this an outage?"},
    "tone": {"type": "choice", "criteria": {"calm": None, "calmer than before": "less than it was"}},
    "urgency": {"type": "score", "criteria": ["low", "middle", "high"]},
}


@pytest.fixture(scope="module")
def cpu(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """Room for half of the 80 experts, few of which change places in a step."""
    changes: dict[str, Any] = {"device": str(software_device().index), "tier_gb": 0.0022, "tier_rate": 7}
    with open_engine(tiny_checkpoint, cpu=False, threads=1, **changes) as engine:
        assert engine.tier is not None and 30 <= engine.tier.limit <= 50
        yield engine
        assert not engine.tier.gone and engine.tier.stats.hits > 1000
        assert engine.tier.stats.uploads > engine.tier.limit  # some have displaced others


def cold(cpu: Engine, ids: list[int]) -> bytes:
    return cpu.session().prompt(ids).tobytes()


def fed(engine: Engine) -> int:
    return engine.stats.prefill_tokens


def test_turns_go_on_from_the_live_state(engine: Engine, cpu: Engine) -> None:
    session, ids = engine.session(), list(STATE)
    logits = session.prompt(ids)
    for turn in (OTHER[:9], OTHER[20:23]):
        answer = list(session.generate(logits, max_tokens=6, sampler=Sampler(), stop_ids=frozenset()))
        ids = [*ids, *answer, *turn]
        before = fed(engine)
        logits = session.prompt(ids)
        assert fed(engine) - before == len(turn) + 1  # the answer's last id was not fed yet
        assert logits.tobytes() == cold(cpu, ids)


def test_nested_snapshots_and_a_sibling(engine: Engine, cpu: Engine) -> None:
    session, question, sibling = engine.session(), STATE + OTHER[:20], STATE + OTHER[40:90]
    session.prompt(STATE)
    session.pin()
    session.prompt(question)
    session.pin()
    for ids, count in (([*question, 9, 8], 2), (sibling, 50), ([*question, 7], 21)):  # the sibling took the rows over
        before = fed(engine)
        assert session.prompt(ids).tobytes() == cold(cpu, ids)
        assert fed(engine) - before == count


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_read_out(engine: Engine, cpu: Engine, count: int) -> None:
    ids = STATE + OTHER[:count]
    expected = cpu.session().prompt(ids, all_logits=True)[len(STATE) - 1 : -1]
    session = engine.session()
    session.prompt(STATE)
    session.pin()
    session.prompt(STATE + OTHER[60:70])
    assert session.read_out(ids, count).tobytes() == expected.tobytes()


def test_every_option_of_sibling_questions(engine: Engine, cpu: Engine) -> None:
    """Read twice, the second time with nothing but the questions to feed; each number as from a whole cold prompt."""
    assert engine.tokenizer is not None and engine.template is not None
    wanted = parse_request({"state": "The router lost its configuration twice.", "questions": QUESTIONS})
    prompts = tokenise(engine.tokenizer, engine.template, wanted, engine.ctx)
    session = engine.session()
    first, second = read(session, prompts, None), read(session, prompts, None)
    for name, asked in prompts.questions.items():
        for option, *found in zip(asked.options, first[name], second[name], strict=True):
            logits = cpu.session().prompt(asked.ids + option, all_logits=True)[len(asked.ids) - 1 :]
            rows = [log_softmax(row, cpu.vocab_limit)[token] for row, token in zip(logits, option, strict=False)]
            assert [log.tobytes() for log in found] == [np.array(rows).tobytes()] * 2


def test_the_order_of_two_conversations_does_not_show(engine: Engine, cpu: Engine) -> None:
    """They take turns, and each moves the other's experts about."""
    sessions = [(engine.session(), STATE), (engine.session(), OTHER)]
    for end in (30, 31, 60, 90):
        for session, ids in sessions:
            assert session.prompt(ids[:end]).tobytes() == cold(cpu, ids[:end])
