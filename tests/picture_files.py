"""Small pictures as files, and a tower for tests that need to know its rows."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from mimo_vk.formats import F32
from mimo_vk.image import Patches


def png(colour: tuple[int, int, int] | str, width: int = 64, height: int = 64) -> bytes:
    """A plain picture's file."""
    return encoded(Image.new("RGB", (width, height), colour))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


class FakeTower:
    """Rows by a picture's brightness and their place in it. ``seen`` counts the pictures."""

    def __init__(self, table: F32) -> None:
        self.table, self.seen = table, 0

    def ids(self, patches: Patches) -> list[int]:
        """The tokens whose embeddings a picture's rows are."""
        first = round(float(patches.pixels.mean()) * 10)
        return [(first + 7 * i) % len(self.table) for i in range(patches.tokens)]

    def forward(
        self,
        patches: Patches,
        on_progress: Callable[[int, int], None] | None = None,
        checkpoint: Callable[[], None] | None = None,
    ) -> F32:
        if checkpoint is not None:
            checkpoint()
        self.seen += 1
        if on_progress is not None:
            on_progress(1, 1)
        return np.ascontiguousarray(self.table[self.ids(patches)])
