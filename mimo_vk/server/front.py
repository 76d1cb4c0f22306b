"""What the routes need to know of the model without asking its process: names, limits, text to ids."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mimo_vk.chat_format import ChatTemplate
from mimo_vk.config import Config, load_config, load_generation_config
from mimo_vk.engine import shipped_model
from mimo_vk.errors import CheckpointError, UsageError
from mimo_vk.pictures import NONE, Pictures, PictureTools, load_tools
from mimo_vk.room import ANSWER, ways
from mimo_vk.server.turns import Turns
from mimo_vk.settings import Settings
from mimo_vk.tokenizer import Tokenizer

log = logging.getLogger("mimo_vk")


class Front:
    """Tokenizer, template and limits of the served checkpoint. CheckpointError where it can't be served."""

    def __init__(self, settings: Settings, model_id: str | None = None) -> None:
        model_dir = settings.model or shipped_model()
        config, _ = load_config(model_dir / "config.json")
        generation = load_generation_config(model_dir / "generation_config.json")
        self.model_id = model_id or model_dir.resolve().name
        self.created = int(time.time())
        made = (model_dir / "config.json").stat().st_mtime  # nothing in a checkpoint says when it was released
        self.released = datetime.fromtimestamp(made, UTC).date().isoformat()
        self.longest = config.max_position_embeddings
        self.ctx = min(settings.ctx, self.longest)
        self.vocab_size = config.vocab_size
        self.stop_ids = frozenset(generation.eos_token_ids or config.eos_token_ids)
        self.temperature = generation.temperature if settings.temperature is None else settings.temperature
        self.top_p = generation.top_p if settings.top_p is None else settings.top_p
        self.seed = settings.seed
        self.tokenizer = Tokenizer.load(model_dir)
        self.template = _template(model_dir)
        self.picture_tools, self.no_pictures = _picture_tools(model_dir, config, settings)
        ends = [text for text, token in self.tokenizer.control.items() if token.id in self.stop_ids]
        self.turns = Turns(self.tokenizer, ends)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text, with users' characters escaped. UsageError names what the template can't take."""
        if self.template is None:
            raise UsageError("messages: this checkpoint has no chat template: use /v1/completions")
        return self.template.render(
            self.tokenizer.escapes, messages, tools=tools, enable_thinking=thinking, variables=variables
        )

    def check_length(self, characters: int, where: str) -> None:
        """Refuse a text that can't fit, however it is cut into tokens: reading megabytes for that would take seconds.

        UsageError names ``where`` it stands.
        """
        most = self.ctx * self.longest_token
        if characters > most:
            raise UsageError(
                f"{where}: {characters} characters are more than the context of {self.ctx} tokens can hold ({most})"
            )

    @cached_property
    def longest_token(self) -> int:
        """At least the characters that one token can stand for: its bytes, doubled because NFC makes fewer of some."""
        return 2 * max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.size))

    def room(self, tokens: int, wanted: int | None, param: str, pictures: Pictures = NONE) -> int:
        """How many tokens may be generated. UsageError where the context can't hold the prompt and what is wanted."""
        room = self.ctx - tokens
        if wanted is not None and wanted <= room:
            return wanted
        if wanted is None and room > 0:
            return room
        fits = f"{param} {room} would fit" if room > 0 else "the prompt alone leaves no room"
        found = ways(tokens, min(wanted or ANSWER, ANSWER), self.ctx, self.longest, pictures)
        if room <= 0 and found:
            fits += f", and a server started with {' or '.join(found)} would have it"
        asked = f" and {param} {wanted}" if wanted is not None else ""
        shown = f"{tokens} prompt tokens{pictures.share}"
        raise UsageError(f"{shown}{asked} are more than the context of {self.ctx} tokens holds: {fits}")


def _picture_tools(model_dir: Path, config: Config, settings: Settings) -> tuple[PictureTools | None, str]:
    """What finds room for pictures; or None and why there can't be any: text can still be served."""
    try:
        return load_tools(model_dir, config, settings), ""
    except UsageError as error:
        return None, str(error)
    except CheckpointError as error:  # its text names files of the server's
        log.warning("no pictures can be read: %s", error)
        return None, "this model is served without pictures: its preprocessor_config.json can't be used"


def _template(model_dir: Any) -> ChatTemplate | None:
    """The chat template, or None where there is none: completions can still be served."""
    try:
        return ChatTemplate.load(model_dir)
    except CheckpointError:
        if (model_dir / "chat_template.jinja").exists():
            raise
        return None
