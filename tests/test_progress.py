"""What a person who waits is told, and when."""

from __future__ import annotations

import queue

import pytest

from mimo_vk import progress
from mimo_vk.progress import READING, SEEING, Progress, ticking, watchers

Told = tuple[str, int, int]


def told(seen: queue.Queue[Told]) -> Told:
    return seen.get(timeout=30)


def test_work_that_says_nothing_is_told_of_all_the_same() -> None:
    """The first block of a long prompt may take a minute: whoever waits sees what for, and that time goes on."""
    seen: queue.Queue[Told] = queue.Queue()
    with ticking(lambda *args: seen.put(args), READING) as note:
        assert told(seen) == (READING, 0, 0)
        for name, report in watchers(note).items():
            report(64, 640)
            what = READING if name == "on_progress" else SEEING
            while told(seen) != (what, 64, 640):  # a tick of what was before
                pass
            assert told(seen) == (what, 64, 640), "and again, without a word from the work"
            report(640, 640)
    ended = seen.qsize()
    assert all(seen.get_nowait()[1] != 640 for _ in range(ended)), "at the end there is nothing to wait for"
    assert seen.empty()


def test_nobody_has_to_watch() -> None:
    with ticking(None, READING) as note:
        note(READING, 1, 2)


def test_the_line_of_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    shown = Progress()
    shown(READING, 0, 0)
    shown(READING, 64, 640)  # within the 30 seconds of a log
    shown.clear()
    assert capsys.readouterr().err == "reading the prompt, 0 s\n"
