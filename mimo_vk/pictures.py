"""Pictures in a prompt: which positions they take, and the rows that the tower puts there.

Placeholders are the template's alone: it writes one image_pad for each picture of a message, and ``PictureTools.place``
makes as many of it as the picture has tokens. From then on a picture's rows are known by their positions, so that
neither the same words typed by a user nor a placeholder that the model itself wrote can be taken for one.
"""

from __future__ import annotations

import base64
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mimo_vk.budget import PICTURE_ROWS_KEPT
from mimo_vk.config import Config
from mimo_vk.errors import CheckpointError, ImageError, UsageError
from mimo_vk.formats import F32
from mimo_vk.image import ImageLimits, Patches, image_tokens, load_image, load_limits
from mimo_vk.model import PictureRows
from mimo_vk.settings import Settings

Progress = Callable[[int, int], None]


class Tower(Protocol):
    """See ``mimo_vk.vision``."""

    def forward(
        self, patches: Patches, on_progress: Progress | None = None, checkpoint: Callable[[], None] | None = None
    ) -> F32:
        """A picture's patches to rows [tokens, hidden_size]."""


@dataclass(frozen=True)
class Picture:
    """A picture's file and the tokens that it takes."""

    data: bytes
    tokens: int


@dataclass(frozen=True)
class Pictures:
    """A prompt's pictures, in its order, and the positions that their rows take: in order, as many as the tokens."""

    items: tuple[Picture, ...] = ()
    positions: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def share(self) -> str:
        """For whoever has no room for a prompt: what the pictures take of it."""
        return f" ({len(self.positions)} for pictures)" if self else ""

    def __add__(self, more: Pictures) -> Pictures:
        return Pictures(self.items + more.items, self.positions + more.positions)


NONE = Pictures()


@dataclass(frozen=True)
class PictureTools:
    """What it takes to find room for pictures without the tower: the checkpoint's limits and its placeholder."""

    limits: ImageLimits
    pad_id: int

    def picture(self, data: bytes) -> Picture:
        """The picture with its tokens, from its header alone. Errors: ImageError."""
        return Picture(data, image_tokens(data, self.limits))

    def place(self, ids: Sequence[int], pictures: Sequence[Picture], start: int = 0) -> tuple[list[int], Pictures]:
        """Ids with each placeholder as long as its picture, and where the rows go; ``start``: the first id's position.

        Errors: UsageError where there aren't as many placeholders as pictures.
        """
        found = sum(token == self.pad_id for token in ids)
        if found != len(pictures):
            raise UsageError(f"expected a placeholder for each of {len(pictures)} pictures, found {found}")
        waiting, out, positions = list(pictures), list[int](), list[int]()
        for token in ids:
            count = waiting.pop(0).tokens if token == self.pad_id else 1
            if token == self.pad_id:
                positions += range(start + len(out), start + len(out) + count)
            out += [token] * count
        return out, Pictures(tuple(pictures), tuple(positions))

    def find(self, ids: Sequence[int], pictures: Sequence[Picture]) -> Pictures:
        """Where the rows go in ids that hold a placeholder for each token already. Errors: UsageError."""
        positions = tuple(i for i, token in enumerate(ids) if token == self.pad_id)
        wanted = sum(picture.tokens for picture in pictures)
        if len(positions) != wanted:
            sizes = " + ".join(str(picture.tokens) for picture in pictures)
            raise UsageError(
                f"expected token {self.pad_id} {wanted} times for the pictures ({sizes}), found {len(positions)}"
            )
        return Pictures(tuple(pictures), positions)


def load_tools(model_dir: Path, config: Config, settings: Settings) -> PictureTools:
    """The checkpoint's. Errors: CheckpointError; UsageError where the model has no tower."""
    if config.vision is None:
        raise UsageError("this model has no vision tower (config.json has no vision_config): it can't see pictures")
    if config.image_token_id is None:
        raise CheckpointError(f"{model_dir / 'config.json'}: image_token_id: expected a token id, it is missing")
    return PictureTools(load_limits(model_dir, config.vision, settings), config.image_token_id)


def image_part(data: bytes) -> dict[str, Any]:
    """A picture as a part of a message's content."""
    return {"type": "image", "data": data}


def user_message(text: str, pictures: Sequence[bytes] = ()) -> dict[str, Any]:
    """A user's turn: the pictures, then the text."""
    if not pictures:
        return {"role": "user", "content": text}
    parts = [image_part(data) for data in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if text else parts}


def bare(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Messages as a template takes them, their pictures' files taken out, in order."""
    out: list[dict[str, Any]] = []
    files: list[bytes] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            files += [part["data"] for part in content if _is_picture(part)]
            content = [{"type": "image"} if _is_picture(part) else part for part in content]
        out.append({**message, "content": content})
    return out, files


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("data"), bytes)


def data_uri(data: bytes) -> str:
    """The picture's file as a data: URI. Its format is told by its content, whatever the type says."""
    return "data:image/*;base64," + base64.b64encode(data).decode()


class Gallery:
    """The tower with the rows that it made last, by the pictures' content."""

    def __init__(self, tower: Tower, limits: ImageLimits, kept_bytes: int = PICTURE_ROWS_KEPT) -> None:
        self._tower, self._limits, self._kept_bytes = tower, limits, kept_bytes
        self._rows: OrderedDict[bytes, F32] = OrderedDict()  # the least recently used first
        self.seen = 0  # pictures that the tower was shown

    def rows(
        self, pictures: Pictures, on_progress: Progress | None = None, checkpoint: Callable[[], None] | None = None
    ) -> PictureRows:
        """The rows of a prompt's pictures. Errors: ImageError for damaged data; whatever ``checkpoint`` raises."""
        made = [self._of(picture, on_progress, checkpoint) for picture in pictures.items]
        rows = np.concatenate(made) if len(made) > 1 else made[0]
        return PictureRows(np.array(pictures.positions, dtype=np.int64), rows)

    def _of(self, picture: Picture, on_progress: Progress | None, checkpoint: Callable[[], None] | None) -> F32:
        key = hashlib.sha256(picture.data).digest()
        rows = self._rows.pop(key, None)
        if rows is None:
            if checkpoint is not None:
                checkpoint()
            patches = load_image(picture.data, self._limits)
            if patches.tokens != picture.tokens:  # a request's counts come from another process
                raise ImageError(f"the picture has {patches.tokens} tokens, and {picture.tokens} were expected")
            rows = self._tower.forward(patches, on_progress, checkpoint)
            assert len(rows) == picture.tokens
            self.seen += 1
        self._rows[key] = rows
        while len(self._rows) > 1 and sum(kept.nbytes for kept in self._rows.values()) > self._kept_bytes:
            self._rows.popitem(last=False)
        return rows
