"""What may not change a logit, compared in bytes; and what a session does when it is resumed, cut off or wronged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from engines import PROMPT, open_engine

from mimo_vk import engine as opening
from mimo_vk.errors import Cancelled, CheckpointError, UsageError
from mimo_vk.sampling import Sampler

LONG = [(7 * i + i // 3) % 500 + 1 for i in range(300)]  # more than two windows


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> bytes:
    """Logits of every position of LONG, by the numpy reference in one block size."""
    with open_engine(tiny_checkpoint, backend="numpy", chunk=64) as engine:
        return engine.session().prompt(LONG, all_logits=True).tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": 1},
        {"chunk": 3},
        {"chunk": 64},
        {"chunk": 200},
        {"cap": 4},
        {"cap": 5, "chunk": 200},
        {"threads": 2},
        {"direct": False},
        {"read_threads": 1},
        {"backend": "numpy", "chunk": 200},
        {"ctx": 300},
    ],
    ids=str,
)
def test_logits_are_the_same_bytes(tiny_checkpoint: Path, expected: bytes, change: dict) -> None:
    with open_engine(tiny_checkpoint, **change) as engine:
        assert engine.session().prompt(LONG, all_logits=True).tobytes() == expected


def test_the_last_row_is_the_whole_prompts_last_row(tiny_checkpoint: Path, expected: bytes) -> None:
    with open_engine(tiny_checkpoint) as engine:
        session = engine.session()
        last = session.prompt(LONG)
        assert last.shape == (1, engine.config.vocab_size)
        assert last.tobytes() == expected[-last.nbytes :]


def test_the_same_run_twice(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint) as engine:
        first, second = (engine.session().prompt(PROMPT, all_logits=True) for _ in range(2))
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("half", [1, 150, 299])
def test_a_resumed_prompt_equals_a_cold_one(tiny_checkpoint: Path, expected: bytes, half: int) -> None:
    with open_engine(tiny_checkpoint) as engine:
        session = engine.session()
        session.prompt(LONG[:half])
        before = engine.stats.prefill_tokens
        last = session.prompt(LONG)
        assert engine.stats.prefill_tokens - before == len(LONG) - half
        assert last.tobytes() == expected[-last.nbytes :]


def test_decoding_equals_reading(tiny_checkpoint: Path) -> None:
    """The ids that greedy decoding yields are the argmax of the logits of a prompt that holds them."""
    with open_engine(tiny_checkpoint) as engine:
        session = engine.session()
        answer = list(session.generate(session.prompt(PROMPT), max_tokens=20, sampler=Sampler(), stop_ids=frozenset()))
        assert len(answer) == 20
        assert session.finish_reason == "length"
        assert session.ids == PROMPT + answer[:-1]
        rows = engine.session().prompt(PROMPT + answer, all_logits=True)[len(PROMPT) - 1 : -1]
        assert rows[:, : engine.vocab_limit].argmax(axis=1).tolist() == answer


def test_a_stop_id_ends_the_answer_and_is_not_part_of_it(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint) as engine:
        session = engine.session()
        free = list(session.generate(session.prompt(PROMPT), max_tokens=12, sampler=Sampler(), stop_ids=frozenset()))
        stop = free[5]
        session = engine.session()
        logits = session.prompt(PROMPT)
        cut = list(session.generate(logits, max_tokens=12, sampler=Sampler(), stop_ids=frozenset({stop})))
        assert cut == free[: free.index(stop)]
        assert session.finish_reason == "stop"


def test_the_vocabularys_tail_is_never_sampled(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint) as engine:
        assert engine.tokenizer is not None
        assert engine.vocab_limit == engine.tokenizer.size < engine.config.vocab_size
        session = engine.session()
        sampler = Sampler(temperature=50.0, seed=1)
        ids = list(session.generate(session.prompt(PROMPT), max_tokens=60, sampler=sampler, stop_ids=frozenset()))
        assert max(ids) < engine.vocab_limit


def test_cancelling_leaves_the_state_whole(tiny_checkpoint: Path, expected: bytes) -> None:
    """Stopped in the middle of a block's layers, the session goes on from the last whole block with the same bytes."""
    with open_engine(tiny_checkpoint, chunk=64) as engine:
        session = engine.session()
        calls = iter(range(1000))
        per_block = len(engine.config.layers)
        with pytest.raises(Cancelled):
            session.prompt(LONG, cancel=lambda: next(calls) == 3 * per_block + 2)
        assert session.ids == LONG[: 3 * 64]
        last = session.prompt(LONG)
        assert last.tobytes() == expected[-last.nbytes :]


def test_cancelling_a_generation(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint) as engine:
        session = engine.session()
        logits = session.prompt(PROMPT)
        got: list[int] = []
        for token in session.generate(logits, max_tokens=50, sampler=Sampler(), cancel=lambda: len(got) == 3):
            got.append(token)
        assert len(got) == 3
        assert session.finish_reason == "cancelled"
        assert session.ids == PROMPT + got[:-1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "empty"), ([1, 10**6], "token id 1000000"), ([1, -1], "token id -1"), ([1] * 17, "17 tokens.*16")],
)
def test_prompts_that_are_refused(tiny_checkpoint: Path, ids: list[int], message: str) -> None:
    with open_engine(tiny_checkpoint, ctx=16) as engine, pytest.raises(UsageError, match=message):
        engine.session().prompt(ids)


def test_a_full_context_ends_the_answer(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint, ctx=16) as engine:
        session = engine.session()
        ids = list(session.generate(session.prompt([1] * 14), max_tokens=50, sampler=Sampler(), stop_ids=frozenset()))
        assert len(ids) == 3  # two more fit into the context, and the last is never fed
        assert session.finish_reason == "length"


def change_of(tiny_checkpoint: Path, expected: bytes, bits: int) -> np.ndarray:
    """How far each logit moves with the dense weights in another form, in parts of the logit range."""
    with open_engine(tiny_checkpoint, dense_bits=bits) as engine:
        logits = engine.session().prompt(LONG, all_logits=True)
    exact = np.frombuffer(expected, dtype=np.float32).reshape(logits.shape)
    return np.abs(logits - exact) / np.ptp(exact)


def test_dense_bits_32_is_the_same_model_added_up_in_another_order(tiny_checkpoint: Path, expected: bytes) -> None:
    assert 0 < change_of(tiny_checkpoint, expected, 32).max() < 1e-5


def test_dense_bits_8_is_nearly_the_same_model(tiny_checkpoint: Path, expected: bytes) -> None:
    """Rounding moves some routing choices, and those rows a lot: half of all logits stay within 2% of the range."""
    assert 1e-4 < np.median(change_of(tiny_checkpoint, expected, 8)) < 0.02


class FakeDevice:
    """A device's plan and its process in one, which turns out to have room for nothing."""

    ram_bytes = 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self) -> FakeDevice:
        return self

    def __enter__(self) -> FakeDevice:
        self.told.append("started")
        return self

    def __exit__(self, *exc: object) -> None:
        self.told.append("ended")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(opening, "plan_device", lambda *_: (device, "a device"))
    monkeypatch.setattr(opening, "open_device", lambda *_: opening.OnDevice())
    return device


def test_a_device_process_without_work_ends_with_the_engine(tiny_checkpoint: Path, device: FakeDevice) -> None:
    with open_engine(tiny_checkpoint):
        assert device.told == ["started"]
    assert device.told == ["started", "ended"]


def test_a_failed_start_ends_the_device_process(
    tiny_checkpoint: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "warm_up", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        open_engine(tiny_checkpoint)
    assert device.told == ["started", "ended"]


def test_a_broken_text_file_is_told_before_anything_is_loaded(
    tiny_checkpoint: Path, tmp_path: Path, device: FakeDevice
) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not valid JSON"):
        open_engine(copy)
    assert device.told == []
