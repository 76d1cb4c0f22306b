"""A server whose model answers with the last user message, control tokens counting: any answer can be asked for.

Run as a program it is ``mimo-vk serve`` on that model: python -m tests.echo_model serve --model DIR ...
Of the checkpoint only the tokenizer, the template and config.json are used. A message that begins with ``SLOW`` takes
0.02 s per token; a prompt takes 0.02 s for each token of it that the session lacks where it holds ``READ SLOWLY``.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mimo_vk.errors import Cancelled
from mimo_vk.server import process
from mimo_vk.server.front import Front
from mimo_vk.server.worker import Worker
from mimo_vk.stats import Stats

STEP = 0.02
NEVER: Callable[[], bool] = lambda: False  # noqa: E731


class EchoSession:
    def __init__(self, engine: EchoEngine) -> None:
        self._engine = engine
        self.ids: list[int] = []
        self.finish_reason = ""
        self._answer: list[int] = []
        self._step = 0.0

    def prompt(self, ids: list[int], *, cancel: Callable[[], bool] = NEVER, **more: Any) -> Any:
        reused = len(self.ids) if ids[: len(self.ids)] == self.ids else 0
        self._engine.stats.reused_tokens += reused
        text = self._engine.tokenizer.decode(ids, keep_special=True)
        said = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        for _ in ids[reused:] if "READ SLOWLY" in text else ():
            time.sleep(STEP)
            if cancel():
                raise Cancelled("stopped")
        self._engine.stats.prefill_tokens += len(ids) - reused
        self.ids = list(ids)
        self._step = STEP if said.startswith("SLOW") else 0.0
        self._answer = [*self._engine.tokenizer.encode(said, special=True), min(self._engine.stop_ids)]
        return self._logits()

    def read_out_blocks(self, ids: list[int], count: int, **more: Any) -> Iterator[Any]:
        yield np.zeros((count, self._engine.vocab_limit), np.float32)

    def read_options(self, ids: list[int], options: list[list[int]], **more: Any) -> list[Any]:
        self.prompt(ids, **more)
        return [np.full(len(option), -1.0) for option in options]

    def note(self, ids: list[int]) -> bool:
        return False

    def pin(self) -> None:
        return None

    def generate(
        self, logits: Any, *, max_tokens: int, sampler: Any, stop_ids: Any, cancel: Callable[[], bool]
    ) -> Iterator[int]:
        self.finish_reason = "length"
        for _ in range(max_tokens):
            token = sampler.pick(self._logits()[-1], self._engine.vocab_limit)
            if token == self._answer[0] and len(self._answer) > 1:
                self._answer.pop(0)
            if token in stop_ids:
                self.finish_reason = "stop"
                return
            yield token
            self.ids.append(token)
            time.sleep(self._step)
            if cancel():
                self.finish_reason = "cancelled"
                return

    def _logits(self) -> Any:
        """The answer's next token is likelier than any other by e^20 to 1."""
        logits = np.zeros((1, self._engine.vocab_limit), np.float32)
        logits[0, self._answer[0]] = 20
        return logits


class EchoEngine:
    def __init__(self, settings: Any) -> None:
        front = Front(settings)
        self.tokenizer, self.stop_ids, self.vocab_limit = front.tokenizer, front.stop_ids, front.tokenizer.size
        self.ctx = front.ctx
        self.backend, self.stats = "echo", Stats()
        self.warnings: list[str] = []
        self.notices: list[str] = []

    @classmethod
    def open(cls, settings: Any, progress: Any = None) -> EchoEngine:
        return cls(settings)

    def session(self) -> EchoSession:
        return EchoSession(self)

    def snapshot_stats(self) -> Stats:
        return self.stats

    def __enter__(self) -> EchoEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def main(*args: Any) -> None:
    """The model's process, with this engine."""
    process.Engine = EchoEngine  # type: ignore[assignment,misc]
    process.main(*args)


if __name__ == "__main__":
    from mimo_vk import cli, serve

    serve.Worker = functools.partial(Worker, target=main)  # type: ignore[assignment,misc]
    sys.exit(cli.main(sys.argv[1:]))
