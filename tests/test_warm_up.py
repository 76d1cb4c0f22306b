"""Opening an engine compiles all that a prompt and an answer need: nobody waits for the compiler in a conversation."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numba.core import event

from mimo_vk.image import Patches
from mimo_vk.progress import ticking
from tests.engines import PROMPT, open_engine


def test_nothing_is_compiled_after_the_start(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint, backend="numba") as engine:
        session = engine.session()
        with event.install_recorder("numba:compile") as recorder:
            session.prompt(PROMPT * 30)
            session.prompt([*PROMPT * 30, 1])
            assert engine.tower is not None
            engine.tower.forward(Patches(np.zeros((400, 1536), np.float32), (20, 20), 2))
        assert [what.data["dispatcher"] for _, what in recorder.buffer] == []


def test_work_that_cannot_say_how_far_it_is_ticks_while_it_lasts() -> None:
    told: list[tuple[str, int, int]] = []
    with ticking(lambda *what: told.append(what), "compiling"):
        time.sleep(1.2)
    assert set(told) == {("compiling", 0, 0)}
    count = len(told)
    time.sleep(0.7)
    assert len(told) == count
