"""An engine without a model: it answers from a script, and records what it was given to read.

Run as a program it is ``mimo-vk chat`` on that engine: python -m tests.fake_engine SECONDS_PER_TOKEN ANSWER...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mimo_vk.chat_format import ChatTemplate
from mimo_vk.config import GenerationConfig
from mimo_vk.errors import Cancelled, ReadError, UsageError
from mimo_vk.image import ImageLimits
from mimo_vk.pictures import PictureTools
from mimo_vk.stats import Stats
from tests.small_tokenizer import small_tokenizer

TEMPLATE = Path(__file__).parent / "data" / "chat_template.jinja"
LIMITS = ImageLimits(16, 2, 2, 1024, 2**20, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PICTURE_TOOLS = PictureTools(LIMITS, small_tokenizer().control["<|image_pad|>"].id)
FAIL = "FAIL"  # an answer that can't be read from the disk


class FakeSession:
    """``prompts`` are the ids read, ``reused`` how many of each were there already."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.ids: list[int] = []
        self.pinned: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.pictures: list[Any] = []  # of each prompt
        self.reused: list[int] = []
        self.finish_reason = ""

    def prompt(
        self,
        ids: list[int],
        *,
        pictures: Any = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_picture: Callable[[int, int], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Any:
        if len(ids) > self._engine.ctx:
            raise UsageError("the prompt is too long")
        self.prompts.append(list(ids))
        self.pictures.append(pictures)
        self.reused.append(len(self.ids) if ids[: len(self.ids)] == self.ids else 0)
        for _ in range(self._engine.prompt_blocks):
            time.sleep(self._engine.delay)
            if cancel is not None and cancel():
                raise Cancelled("stopped")
        self.ids = list(ids)
        if on_progress is not None:
            on_progress(len(ids), len(ids))
        return np.zeros((1, 4), np.float32)

    def pin(self) -> None:
        self.pinned.append(self.ids)

    def read_options(
        self,
        ids: list[int],
        options: list[list[int]],
        *,
        pictures: Any = None,
        on_picture: Any = None,
        cancel: Any = None,
    ) -> list[Any]:
        """Every option but the first has half the probability of the one before it."""
        self.prompt(ids, pictures=pictures, cancel=cancel)
        self._engine.stats.prefill_tokens += len(ids) + sum(len(option) - 1 for option in options)
        return [np.full(len(option), -i * np.log(2) / len(option)) for i, option in enumerate(options)]

    def generate(
        self, logits: Any, *, max_tokens: int, sampler: Any, stop_ids: Any = None, cancel: Any = None
    ) -> Iterator[int]:
        answer = self._engine.answers.pop(0)
        if answer == FAIL:
            raise ReadError("shard.safetensors: byte 12: input/output error")
        self.finish_reason = "length"
        for count, token in enumerate(self._engine.tokenizer.encode(answer, special=True)):
            if count == max_tokens:
                return
            yield token
            self.ids.append(token)
            time.sleep(self._engine.delay)
            if cancel is not None and cancel():
                self.finish_reason = "cancelled"
                return
        self.finish_reason = "stop"


class FakeEngine:
    def __init__(self, answers: list[str], delay: float = 0.0, ctx: int = 400, template: str = "") -> None:
        self.answers, self.delay, self.ctx = answers, delay, ctx
        self.prompt_blocks = 1
        self.stats = Stats()
        self.tokenizer = small_tokenizer()
        self.template = ChatTemplate(template or TEMPLATE.read_text(encoding="utf-8"), "template")
        self.generation = GenerationConfig(temperature=1.0, top_p=1.0, eos_token_ids=None)
        self.config = SimpleNamespace(max_position_embeddings=4096)
        self.stop_ids = frozenset({self.tokenizer.control["<|im_end|>"].id})
        self.model_dir, self.model_name, self.backend = Path("fake"), "fake", "script"
        self.picture_tools = PICTURE_TOOLS
        self.warnings: list[str] = []
        self.notices: list[str] = []
        self.sessions: list[FakeSession] = []

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]

    def snapshot_stats(self) -> Stats:
        return Stats(prefill_tokens=7)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def program(delay: float, answers: list[str], arguments: list[str]) -> int:
    """The command line with this engine in the place of the real one."""
    from mimo_vk import chat, cli

    class Opener:
        @staticmethod
        def open(settings: Any, progress: Any) -> FakeEngine:
            return FakeEngine(answers, delay)

    chat.Engine = Opener  # type: ignore[assignment,misc]
    return cli.main(["chat", *arguments])


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    sys.exit(program(float(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]))
