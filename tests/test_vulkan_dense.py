"""A model whose dense layers, cached rows and head are on the device: the same bytes as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk.engine import Engine
from mimo_vk.errors import ReadError
from mimo_vk.sampling import Sampler
from mimo_vk.session import Session
from mimo_vk.vulkan import dense_plan, setup
from mimo_vk.vulkan.dense_layout import DenseLayout, DenseShape
from mimo_vk.vulkan.dense_plan import device_bytes
from mimo_vk.vulkan.listing import Listing
from tests.engines import PROMPT, make_flash, open_engine
from tests.test_oracle import TOLERANCE, Reference, largest_difference
from tests.test_vulkan_engine import LONG, answer, gb
from tests.vulkan_device import software_device

LAYERS = 6  # of the tiny checkpoint
TEXT, NGEN = LONG[:20], 6
ROWS = 40  # that transformers is asked about


def open_dense(model: Path, slots: int = 0, **changes: Any) -> Engine:
    """An engine with every dense layer on the device, and room for some experts."""
    settings = {"cpu": False, "device": str(software_device().index), "dense": "device", "threads": 1}
    return open_engine(model, **{**settings, "tier_gb": slots and gb(slots), **changes})


def with_room(monkeypatch: pytest.MonkeyPatch, layers: int, model: Path, chunk: int = 64) -> None:
    """Let the software device have room for just that many dense layers, with blocks of ``chunk`` rows."""
    with open_engine(model, chunk=chunk) as engine:
        plan, _ = setup.plan_device(
            replace(engine.settings, cpu=False, device=str(software_device().index), dense="device", tier_gb=0),
            engine.config, engine.ctx, engine.chunk,
        )  # fmt: skip
    assert plan is not None and plan.dense is not None
    some = device_bytes(DenseLayout(replace(plan.dense, layers=plan.dense.layers[:layers], head=False, tower=None)))
    info = replace(software_device(), free_bytes=some + int(0.1 * 2**31), heap_bytes=2**31)
    monkeypatch.setattr(setup, "list_devices", lambda: Listing((info,), ""))
    monkeypatch.setattr(setup, "LEAST_MARGIN", 0)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> tuple[bytes, list[int]]:
    with open_engine(tiny_checkpoint, threads=1) as engine:
        return answer(engine, TEXT, NGEN)


@pytest.mark.bits
@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0},
        {"slots": 5, "chunk": 1},
        {"slots": 80, "tier_rate": 100, "chunk": 3},
        {"slots": 40, "tier_rate": 100, "cap": 4},
    ],
    ids=str,
)
def test_the_same_bytes(tiny_checkpoint: Path, expected: tuple[bytes, list[int]], change: dict[str, Any]) -> None:
    with open_dense(tiny_checkpoint, **change) as engine:
        assert engine.dense is not None and len(engine.dense.layers) == LAYERS and engine.dense.has_head
        assert answer(engine, TEXT, NGEN) == expected
        assert engine.snapshot_stats().device_layers == LAYERS
        assert (engine.stats.tier_hits > 10) == (change["slots"] > 0)
        assert not {"attention", "dense"} & engine.stats.parts.keys()  # of the CPU's kernels


@pytest.mark.parametrize("layers", [1, 3])
def test_some_of_the_layers(
    tiny_checkpoint: Path, expected: tuple[bytes, list[int]], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """As many as there is room for, each whole; the others and the head on the CPU."""
    with_room(monkeypatch, layers, tiny_checkpoint)
    with open_dense(tiny_checkpoint) as engine:
        assert engine.dense is not None
        assert engine.dense.layers == frozenset(range(layers)) and not engine.dense.has_head
        assert answer(engine, TEXT, NGEN) == expected
        assert "attention" in engine.stats.parts


def test_a_discrete_device(
    tiny_checkpoint: Path, expected: tuple[bytes, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen by itself, dense layers come first and experts get the rest; the host can't write its memory."""
    monkeypatch.setattr(dense_plan, "OWN_SLAB", 1 << 18)  # several slabs of each kind, the head cut in two
    info = replace(software_device(), kind="discrete GPU")
    monkeypatch.setattr(setup, "list_devices", lambda: Listing((info,), ""))
    with open_engine(tiny_checkpoint, cpu=False, tier_rate=100, threads=1) as engine:
        assert engine.dense is not None and len(engine.dense.layers) == LAYERS and engine.tier is not None
        assert engine.tier.limit == 80
        assert answer(engine, TEXT, NGEN) == expected


@pytest.mark.bits
@pytest.mark.parametrize("bits", [8, 32])
def test_requantised_weights(tiny_checkpoint: Path, bits: int) -> None:
    found = []
    for open_one in (open_engine, open_dense):
        with open_one(tiny_checkpoint, threads=1, dense_bits=bits) as engine:
            found.append(answer(engine, TEXT[:12], 3))
    assert found[0] == found[1]


@pytest.mark.bits
def test_an_answer_longer_than_a_window(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the layers on the device."""
    with_room(monkeypatch, 3, tiny_checkpoint)
    found = []
    for open_one in (open_engine, open_dense):
        with open_one(tiny_checkpoint, threads=1) as engine:
            found.append(answer(engine, PROMPT[:2], 131))
    assert len(found[0][1]) == 131 and found[0] == found[1]


@pytest.mark.bits
def test_true_flash_dimensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the head, whose product is the same as any other but for its rows."""
    flash = make_flash(tmp_path / "flash", monkeypatch)
    fit = setup.fit_dense
    monkeypatch.setattr(setup, "fit_dense", lambda *args: replace(fit(*args), head=False))
    found = []
    for open_one in (open_engine, open_dense):
        with open_one(flash, threads=1, ctx=64, chunk=4) as engine:
            found.append(answer(engine, PROMPT[:2], 2))
    assert engine.dense is not None and len(engine.dense.layers) == 2
    assert found[0] == found[1]


@pytest.mark.bits
def test_the_oracle_agrees(tiny_checkpoint: Path, project_root: Path) -> None:
    """transformers' logits at each position of a prompt. What lies beyond a window has the CPU's bytes, as below."""
    with np.load(project_root / "tests" / "reference" / "tiny.npz") as saved:
        whole = Reference(saved["ids_130"].tolist(), saved["logits_130"], float(saved["error_130"]))
    reference = whole.first(ROWS)
    with open_dense(tiny_checkpoint) as engine:
        found = engine.session().prompt(reference.ids, all_logits=True)
    assert found.shape == (ROWS, 600) and largest_difference(found, reference) < TOLERANCE


@pytest.mark.bits
def test_any_layers(tiny_checkpoint: Path, expected: tuple[bytes, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual goes to the device and comes back wherever the two sides take turns."""
    fit = setup.fit_dense

    def some(*args: Any) -> DenseShape:
        shape = fit(*args)
        return replace(shape, layers=tuple(shape.layers[i] for i in (1, 2, 4)))

    monkeypatch.setattr(setup, "fit_dense", some)
    with open_dense(tiny_checkpoint, 40, tier_rate=100) as engine:
        assert engine.dense is not None and engine.dense.layers == {1, 2, 4}
        assert answer(engine, TEXT, NGEN) == expected


# Reuse, snapshots and read-outs: what a cold engine on the CPU returns.

STATE = [(11 * i) % 590 for i in range(132)]  # longer than a window of 128
MORE = [[7, 8, 9], [7, 8, 300, 301], [5], [7, 8, 9, 10]]


def conversation(session: Session) -> list[bytes]:
    """Prompts that resume from what is live or was pinned, in an order that displaces rings and rows."""
    found = [session.prompt(STATE).tobytes()]
    session.pin()
    for more in MORE:
        found.append(session.prompt(STATE + more, live=False).tobytes())
    session.pin()
    found.append(session.prompt(STATE + MORE[-1] + [1, 2]).tobytes())
    found += [log.tobytes() for log in session.read_options([*STATE, 3], [[4, 5], [6], [7, 8, 9]])]
    found.append(session.read_out([*STATE, 9, 9, 1], 3).tobytes())
    found.append(session.prompt(STATE[:40]).tobytes())
    found.append(session.prompt([*STATE[:40], 8]).tobytes())
    return found


@pytest.fixture(scope="module")
def talked(tiny_checkpoint: Path) -> list[bytes]:
    with open_engine(tiny_checkpoint, threads=1) as engine:
        return conversation(engine.session())


def test_reuse_and_snapshots(tiny_checkpoint: Path, talked: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the layers on the device, whose rings have wrapped around."""
    with_room(monkeypatch, 3, tiny_checkpoint, chunk=16)
    with open_dense(tiny_checkpoint, chunk=16) as engine:
        assert engine.dense is not None and engine.dense.layers == {0, 1, 2}
        assert conversation(engine.session()) == talked
        reused = engine.stats.reused_tokens
    with open_engine(tiny_checkpoint, threads=1) as engine:
        conversation(engine.session())
        assert engine.stats.reused_tokens == reused > 900


def test_more_snapshots_than_the_device_keeps(tiny_checkpoint: Path) -> None:
    """A snapshot that was displaced is not resumed; its prompt is read again."""
    with open_dense(tiny_checkpoint, pin_slots=1) as engine, open_engine(tiny_checkpoint, threads=1) as cpu:
        session = engine.session()
        logits = [session.prompt(STATE[:n]).tobytes() for n in (4, 8, 12)]
        pinned = []
        for n in (4, 8, 12):
            session.prompt(STATE[:n])
            pinned.append(session.pin())
        assert not session._cache.holds(pinned[0]) and session._cache.holds(pinned[2])
        other = cpu.session()
        assert logits == [other.prompt(STATE[:n]).tobytes() for n in (4, 8, 12)]


def test_a_block_that_fails_half_way_leaves_the_state(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, talked: list[bytes]
) -> None:
    """Its rows in the rings of the layers that it has passed must not be seen by what is read instead."""
    with_room(monkeypatch, 3, tiny_checkpoint)
    with open_dense(tiny_checkpoint) as engine:
        assert engine.dense is not None and engine.dense.layers == {0, 1, 2}
        session = engine.session()
        session.prompt(STATE)
        session.pin()
        compute, calls = engine.model.experts, []

        def fails_at_the_third(layer: int, *rest: Any) -> Any:
            calls.append(layer)
            if len(calls) == 3:
                raise ReadError("a disk is gone")
            return compute(layer, *rest)

        monkeypatch.setattr(engine.model, "experts", fails_at_the_third)
        with pytest.raises(ReadError):
            session.prompt(STATE + list(range(100, 160)))
        assert session.ids == STATE
        before = engine.stats.prefill_tokens
        assert [session.prompt(STATE + more, live=False).tobytes() for more in MORE] == talked[1:5]
        assert engine.stats.prefill_tokens - before == sum(map(len, MORE))  # resumed from the snapshot


def test_two_sessions_take_turns(tiny_checkpoint: Path) -> None:
    """The device has room for one state: the other session reads its ids again."""

    def turns(engine: Engine) -> list[Sequence[int]]:
        sessions = [engine.session() for _ in range(2)]
        texts = [s.generate(s.prompt(STATE[: 5 + i]), max_tokens=6, sampler=Sampler()) for i, s in enumerate(sessions)]
        return [[next(text) for text in texts] for _ in range(4)]

    with open_engine(tiny_checkpoint, threads=1) as engine, open_dense(tiny_checkpoint) as other:
        assert turns(engine) == turns(other)
