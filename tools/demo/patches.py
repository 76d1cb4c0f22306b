"""A picture to the tower's patches by the engine's own code, with the demonstration's limit of pixels."""

from __future__ import annotations

import io
import json
from typing import Any

from PIL import Image

from mimo_vk.image import ImageLimits, Patches, load_image
from tools.checkpoint.geometry import DATA

MAX_PIXELS = 128 * 128  # so that a picture costs 16 tokens at most


def preprocessor_json() -> dict[str, Any]:
    """preprocessor_config.json: the release's, with a limit that keeps pictures small."""
    config: dict[str, Any] = json.loads((DATA / "preprocessor_config.json").read_text("utf-8"))
    return config | {"max_pixels": MAX_PIXELS}


def limits() -> ImageLimits:
    made = preprocessor_json()
    return ImageLimits(
        patch_size=made["patch_size"],
        merge_size=made["merge_size"],
        temporal_patch_size=made["temporal_patch_size"],
        min_pixels=made["min_pixels"],
        max_pixels=made["max_pixels"],
        mean=tuple(made["image_mean"]),
        std=tuple(made["image_std"]),
    )


LIMITS = limits()
MERGE = LIMITS.merge_size


def patches_of(image: Image.Image) -> Patches:
    file = io.BytesIO()
    image.save(file, "BMP")
    return load_image(file.getvalue(), LIMITS)
