"""lm-eval, unmodified: its ``local-completions`` reads log-likelihoods from our server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines import open_engine

from mimo_vk.engine import shipped_model
from mimo_vk.sampling import log_softmax
from tests.live_server import LiveServer, serving

TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: "{delimiter}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
# What its command does, without the ten seconds that it takes to look through all the tasks that come with it.
EVALUATE = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

arguments, folder = sys.argv[1:]
tasks = TaskManager(include_path=folder, include_defaults=False)
found = simple_evaluate("local-completions", arguments, tasks=["local_choice"], task_manager=tasks)
found = {"accuracy": found["results"]["local_choice"]["acc,none"], "samples": found["samples"]["local_choice"]}
with open(folder + "/found.json", "w") as file:
    json.dump(found, file, default=str)
"""
QUESTIONS: list[dict[str, Any]] = [
    {"question": "What is 2 + 2? Answer:", "choices": ["3", "4", "twenty-two"], "answer": 1},
    {"question": "The sky is", "choices": ["blue", "made of 🧀"], "answer": 0},
    {"question": "Ein Tag hat", "choices": ["24 Stunden", "drei Füße", "Öl", "é"], "answer": 0},
]
TURN = "<|im_start|>user\n{}<|im_end|><|im_start|>assistant\n<think></think>"  # as the chat template writes it
CAPITALS = [
    ("France", "Paris"),
    ("Italy", "Rome"),
    ("Japan", "Tokyo"),
    ("Peru", "Lima"),
    ("Norway", "Oslo"),
    ("Kenya", "Nairobi"),
    ("Canada", "Ottawa"),
    ("Poland", "Warsaw"),
]
SUMS = [(17, 25), (3, 4), (40, 23), (12, 7), (31, 31), (8, 9), (50, 20), (26, 6)]


def results_of(server: LiveServer, model: str, task: str, tmp_path: Path) -> tuple[float, list[dict[str, Any]]]:
    """The accuracy that lm-eval reports for the task, and its samples, in the questions' order."""
    (tmp_path / "local_choice.yaml").write_text(task, encoding="utf-8")
    arguments = f"model={model},base_url={server.url}/v1/completions,num_concurrent=2,max_length=512"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", EVALUATE, arguments, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    return found["accuracy"], sorted(found["samples"], key=lambda sample: sample["doc_id"])


def written(questions: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    return path


def test_its_numbers_are_a_cold_engine_s(tiny_server: LiveServer, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Its log-likelihoods are those of an engine of our own, read cold, and its accuracy follows from them."""
    task = TASK.format(data=written(QUESTIONS, tmp_path / "questions.jsonl"), delimiter=" ")
    accuracy, samples = results_of(tiny_server, "checkpoint", task, tmp_path)
    right = 0
    with open_engine(tiny_checkpoint, backend="numpy") as engine:
        for question, sample in zip(QUESTIONS, samples, strict=True):
            expected = [log_likelihood(engine, question["question"], choice) for choice in question["choices"]]
            assert [float(answer[0][0]) for answer in sample["resps"]] == expected
            right += expected.index(max(expected)) == question["answer"]
    assert accuracy == right / len(QUESTIONS)


def log_likelihood(engine: Any, context: str, choice: str) -> float:
    """The sum of the log-probabilities of a choice's tokens behind its context, as lm-eval cuts them."""
    before = engine.tokenizer.encode(context)
    ids = engine.tokenizer.encode(f"{context} {choice}")
    rows = log_softmax(engine.session().prompt(ids, all_logits=True), engine.vocab_limit)
    return float(sum(float(rows[at - 1, ids[at]]) for at in range(len(before), len(ids))))


def capitals_and_sums() -> list[dict[str, Any]]:
    """Each with four answers to choose from: the capitals of the next countries, and numbers near the sum."""
    questions = []
    for i, (country, city) in enumerate(CAPITALS):
        cities = [f" {CAPITALS[(i + step) % len(CAPITALS)][1]}." for step in range(4)]
        start = TURN.format(f"What is the capital of {country}?") + f"The capital of {country} is"
        questions.append(one_of(start, cities, f" {city}.", i))
    for i, (a, b) in enumerate(SUMS):
        answers = [str(a + b + off) for off in (0, 1, -1, 10)]
        questions.append(one_of(TURN.format(f"What is {a} + {b}?"), answers, str(a + b), i))
    return questions


def one_of(start: str, choices: list[str], right: str, turn: int) -> dict[str, Any]:
    """The right answer stands at another place in each question."""
    turn %= len(choices)
    choices = choices[turn:] + choices[:turn]
    whole = [choice + "<|im_end|>" for choice in choices]
    return {"question": start, "choices": whole, "answer": choices.index(right)}


def test_the_shipped_model_answers_what_it_knows(tmp_path: Path) -> None:
    """Chance would be a quarter."""
    questions = capitals_and_sums()
    task = TASK.format(data=written(questions, tmp_path / "questions.jsonl"), delimiter="")
    with serving(shipped_model(), "--ctx", "512") as server:
        accuracy, samples = results_of(server, "demo", task, tmp_path)
        assert server.metric("requests_total", route="/v1/completions", outcome="ok") > 0
    assert len(samples) == 16 and accuracy >= 0.75
