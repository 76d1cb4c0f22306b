"""The load test itself: a short run, and that it notices what it is there to notice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.live_server import serving
from tools.load_test import Ask, Tally, check_counters, check_memory, load, read_metrics, streamed, whole

METRICS = {
    'requests_total{route="/v1/completions",outcome="ok"}': 4.0,
    'requests_total{route="/v1/chat/completions",outcome="ok"}': 3.0,
    'requests_total{route="/v1/chat/completions",outcome="cancelled"}': 2.0,
    'requests_total{route="/health",outcome="ok"}': 99.0,
    "generated_tokens_total": 70.0,
    "worker_restarts_total": 0.0,
}


def tally() -> Tally:
    return Tally(sent=10, left=4, finished=6, statuses=Counter({200: 6}), tokens=60)


def test_a_short_run_has_no_faults(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, program="tests.echo_model") as server:
        found = asyncio.run(load(server.url, server.process.pid, clients=5, seconds=2.5))
    assert found.faults == [] and found.finished > 0 and found.answers  # how many depends on what else the machine does
    assert found.sent == found.finished + found.left and found.statuses == {200: found.finished}
    assert found.health and all(memory > 20e6 for _, memory in found.memory)


def test_counters_that_agree() -> None:
    found = tally()
    check_counters(found, METRICS)
    assert found.faults == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ('requests_total{route="/v1/completions",outcome="ok"}', 9.0, "requests counted"),
        ('requests_total{route="/v1/completions",outcome="ok"}', 1.0, "outcomes counted"),
        ('requests_total{route="/v1/completions",outcome="error"}', 1.0, "errors counted"),
        ('requests_total{route="/v1/chat/completions",outcome="cancelled"}', 5.0, "outcomes counted"),
        ("generated_tokens_total", 59.0, "59 tokens counted"),
        ("worker_restarts_total", 1.0, "started again"),
    ],
)
def test_counters_that_do_not(name: str, value: float, text: str) -> None:
    found = tally()
    check_counters(found, {**METRICS, name: value})
    assert any(text in fault for fault in found.faults)


def test_memory_that_grows() -> None:
    flat, growing = Tally(), Tally()
    flat.memory = [(0.5 * i, 300_000_000 + i) for i in range(30)]
    growing.memory = [(0.5 * i, 300_000_000 + i * 4_000_000) for i in range(30)]
    check_memory(flat)
    check_memory(growing)
    assert flat.faults == [] and growing.faults == ["memory grew from 336 MB to 416 MB"]


def test_an_answer_is_the_same_streamed_or_not() -> None:
    chat = {"choices": [{"message": {"role": "assistant", "content": "ab"}}], "usage": {"completion_tokens": 2}}
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    chunks = [{"object": "chat.completion.chunk", "choices": [{"delta": delta}]} for delta in deltas]
    last = {"object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 2}}
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, last]) + "data: [DONE]\n\n"
    assert whole(chat) == streamed(text) == ("|ab", 2)


def test_questions_differ_and_repeat() -> None:
    prompts = {Ask(question, False, False).prompt for question in range(40)}
    assert len(prompts) == 40 and Ask(3, True, False).prompt in prompts


def test_metrics_are_read_by_name() -> None:
    assert read_metrics('# HELP x\nmimo_vk_a{b="c d"} 2\nmimo_vk_e 0.5\n') == {'a{b="c d"}': 2.0, "e": 0.5}
