"""The picture tower on the device, in an engine: the same bytes as on the CPU, whatever becomes of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk import vision
from mimo_vk.engine import Engine
from mimo_vk.errors import Cancelled
from mimo_vk.formats import F32
from mimo_vk.image import Patches
from mimo_vk.ops import SinkReading
from mimo_vk.pictures import Pictures
from mimo_vk.vision import VisionTower
from mimo_vk.vision_config import VisionConfig
from mimo_vk.vision_weights import VisionWeights
from mimo_vk.vulkan import dense_plan, setup
from mimo_vk.vulkan.dense_layout import DenseLayout
from mimo_vk.vulkan.dense_plan import device_bytes
from mimo_vk.vulkan.listing import Listing
from mimo_vk.vulkan.messages import receive
from mimo_vk.vulkan.placed_tower import PlacedTower
from tests.engines import open_engine
from tests.picture_files import png
from tests.test_vision import picture
from tests.test_vision_oracle import BY_NAME, TOLERANCE, largest_difference
from tests.test_vulkan_dense import open_dense
from tests.test_vulkan_dense_loss import bad_message, interfere, kill, stop_then_kill
from tests.vulkan_device import software_device
from tools.vision_cases import SINKS

WIDE = png("blue", 160, 96)  # 60 patches, 15 tokens
BEFORE, AFTER = [5, 200, 17], [33, 90]


def tower_of(engine: Engine) -> PlacedTower:
    assert isinstance(engine.tower, PlacedTower)
    return engine.tower


def shown_to(engine: Engine) -> tuple[bytes, bytes]:
    """A prompt's logits at each position with a picture in it, and at the end of the next one's without."""
    tools = engine.picture_tools
    ids, pictures = tools.place([*BEFORE, tools.pad_id, *AFTER], [tools.picture(WIDE)])
    session = engine.session()
    logits = session.prompt(ids, pictures=pictures, all_logits=True)
    assert isinstance(pictures, Pictures) and len(logits) == 20
    return logits.tobytes(), session.prompt(BEFORE + AFTER).tobytes()


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> tuple[bytes, bytes]:
    with open_engine(tiny_checkpoint, threads=1) as engine:
        assert type(engine.tower) is VisionTower
        return shown_to(engine)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    """How many lines there are about a device that is no longer used."""
    with caplog.at_level(logging.WARNING):
        yield lambda: sum("no longer used" in record.getMessage() for record in caplog.records)


@contextmanager
def no_work_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU's own tower would fail."""
    with monkeypatch.context() as patch:
        for name in ("_embed", "_block", "_merge"):
            patch.delattr(VisionTower, name)
        yield


@pytest.mark.bits
def test_the_same_logits(tiny_checkpoint: Path, expected: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_dense(tiny_checkpoint) as engine, no_work_here(monkeypatch):
        tower_of(engine)
        assert "with the picture tower" in engine.notices[0]
        assert shown_to(engine) == expected
        assert engine.stats.pictures == 1


@pytest.mark.bits
@pytest.mark.parametrize("sink", SINKS)
def test_towers_of_the_independent_rows(
    tiny_checkpoint: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch, sink: SinkReading
) -> None:
    """Cases that keep the checkpoint's own settings; pieces of 256 patches, and of 100 for one of the readings."""
    with np.load(project_root / "tests" / "reference" / "vision.npz") as saved:
        rows = {name: saved[f"rows_{name}_{sink}"] for name in ("square", "unit")}
    with open_dense(tiny_checkpoint, vision_sink=sink) as engine, no_work_here(monkeypatch):
        tower = tower_of(engine)
        for name, pieces in (("square", (256, 100) if sink == SINKS[0] else (256,)), ("unit", (256,))):
            case = BY_NAME[name]
            shown = Patches(case.pixels(), case.grid, tower.weights.config.merge_size)
            found = set()
            for size in pieces:
                monkeypatch.setattr(vision, "ROWS", size)
                got = tower.forward(shown)
                assert largest_difference(got, rows[name]) < TOLERANCE
                found.add(got.tobytes())
            assert len(found) == 1


ODD: list[tuple[int, int, dict[str, Any], SinkReading]] = [
    (3, 5, {}, "key0"),
    (2, 7, {"block_types": (-1, 1, 0, -1), "reach": 5}, "denominator"),
    (4, 3, {"block_types": (-1, 1, 1, -1), "reach": 0}, "key0"),
]


@pytest.mark.bits
@pytest.mark.parametrize(("rows", "columns", "changes", "sink"), ODD)
def test_every_bit_is_numpys(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, changes: dict[str, Any],
    sink: SinkReading,
) -> None:  # fmt: skip
    """Of the same tensors under other settings, on a GPU's memory and in small slabs, which cut the matrices."""
    monkeypatch.setattr(dense_plan, "OWN_SLAB", 1 << 17)
    info = replace(software_device(), kind="discrete GPU")
    monkeypatch.setattr(setup, "list_devices", lambda: Listing((info,), ""))
    load = setup_tower(monkeypatch, changes)
    with open_dense(tiny_checkpoint, vision_sink=sink, device="auto", ctx=64, chunk=4) as engine:
        tower = tower_of(engine)
        assert load == [tower.weights.config]
        shown = picture(tower.weights.config, rows, columns)
        assert_rows(tower, shown)


def setup_tower(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> list[VisionConfig]:
    """Change vision_config as it is read; the list is what is read."""
    from mimo_vk import config

    read, found = config.read_vision_config, list[VisionConfig]()

    def changed(*args: Any) -> tuple[VisionConfig | None, list[str]]:
        tower, warnings = read(*args)
        assert tower is not None
        found.append(replace(tower, **changes))
        return found[-1], warnings

    monkeypatch.setattr(config, "read_vision_config", changed)
    return found


def assert_rows(tower: PlacedTower, shown: Any) -> None:
    weights: VisionWeights = tower.weights
    expected: F32 = VisionTower(weights, ReferenceOps(), tower.sink).forward(shown)
    found = tower.forward(shown)
    assert not tower._device.gone and np.isfinite(expected).all()
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("count", "harm"),
    [(0, kill), (1, stop_then_kill), (4, bad_message), (9, kill)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_lost_in_the_middle_of_a_picture(
    tiny_checkpoint: Path, expected: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch, said: Callable[[], int],
    count: int, harm: Callable[[Any], None],
) -> None:  # fmt: skip
    """At the embedding, a block's keys, a block itself, the end: the CPU computes the rest."""
    with open_dense(tiny_checkpoint, 5) as engine:
        interfere(monkeypatch, "tower", count, harm)
        assert shown_to(engine) == expected
        assert engine.dense is not None and engine.dense.gone and said() == 1
        told = list[tuple[int, int]]()
        shown = picture(tower_of(engine).weights.config, 2, 3)
        tower_of(engine).forward(shown, lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1]


def test_progress_after_a_loss_reaches_its_total(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "ROWS", 16)
    with open_dense(tiny_checkpoint) as engine:
        interfere(monkeypatch, "tower", 12, kill)
        told = list[tuple[int, int]]()
        tower = tower_of(engine)
        tower.forward(picture(tower.weights.config, 5, 4), lambda done, total: told.append((done, total)))
        assert engine.dense is not None and engine.dense.gone
        assert told[-1][0] == told[-1][1] == max(done for done, _ in told)


def test_a_picture_that_was_given_up(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces, and by an interrupt that lost an answer: the next picture has its own rows."""
    monkeypatch.setattr(vision, "ROWS", 16)
    with open_dense(tiny_checkpoint) as engine:
        tower, left = tower_of(engine), [7]
        shown = picture(tower.weights.config, 4, 4)

        def stop() -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Cancelled("stopped by the caller")

        with pytest.raises(Cancelled):
            tower.forward(shown, None, stop)
        client = tower._device.client
        client.ask("tower", ["merge"], 1, 0, 4)
        assert receive(client._connection) is not None and client.pending("tower")
        assert_rows(tower, shown)


def test_a_picture_larger_than_the_device_takes(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_plan, "MOST_PATCHES", 24)
    with open_dense(tiny_checkpoint) as engine:
        tower = tower_of(engine)
        for columns in (3, 4):
            shown = picture(tower.weights.config, 2, columns)
            asked = tower._device.client._number
            assert_rows(tower, shown)
            assert (tower._device.client._number > asked) == (columns == 3)


def test_no_room_for_the_tower(
    tiny_checkpoint: Path, expected: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text layers and the head come first; without the last byte that it needs, the tower stays on the CPU."""
    with open_engine(tiny_checkpoint) as engine:
        settings = replace(engine.settings, cpu=False, device=str(software_device().index), dense="device", tier_gb=0)
        plan, _ = setup.plan_device(settings, engine.config, engine.ctx, engine.chunk)
    assert plan is not None and plan.dense is not None and plan.dense.tower is not None
    for spare in (-1, 0):
        room = device_bytes(DenseLayout(plan.dense)) + spare
        monkeypatch.setattr(setup, "room_on", lambda info, room=room: room)
        with open_dense(tiny_checkpoint) as engine:
            assert engine.dense is not None and len(engine.dense.layers) == 6 and engine.dense.has_head
            assert isinstance(engine.tower, PlacedTower) == (spare == 0)
            assert shown_to(engine) == expected
