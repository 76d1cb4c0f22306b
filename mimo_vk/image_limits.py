"""preprocessor_config.json: how pictures are cut up, and what they may cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo_vk.config import read_json
from mimo_vk.errors import CheckpointError
from mimo_vk.settings import Settings

_FIXED: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,  # bicubic
    "rescale_factor": 1 / 255,
    "data_format": "channels_first",
}
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


@dataclass(frozen=True)
class ImageLimits:
    """How pictures are cut up and what they may cost. ``max_tokens`` None: only the pixel limits hold."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_tokens: int | None = None

    @property
    def unit(self) -> int:
        """Pixels along the side of one token's square."""
        return self.patch_size * self.merge_size


def load_limits(model_dir: Path, vision_config: Mapping[str, Any], settings: Settings) -> ImageLimits:
    """The limits of preprocessor_config.json, with the settings' bound on tokens.

    ``vision_config`` is config.json's object. Errors: CheckpointError with a line per faulty field.
    """
    path = model_dir / "preprocessor_config.json"
    reader = _Fields(str(path), read_json(path))
    for key, value in _FIXED.items():
        if reader.raw.get(key, value) != value:
            reader.fault(key, f"{value} (no other value is supported)")
    if reader.raw.get("image_processor_type", _PROCESSORS[0]) not in _PROCESSORS:
        reader.fault("image_processor_type", " or ".join(_PROCESSORS))
    limits = ImageLimits(
        patch_size=reader.size("patch_size", vision_config, "patch_size"),
        merge_size=reader.size("merge_size", vision_config, "spatial_merge_size"),
        temporal_patch_size=reader.size("temporal_patch_size", vision_config, "temporal_patch_size"),
        min_pixels=reader.pixels("min_pixels", "shortest_edge"),
        max_pixels=reader.pixels("max_pixels", "longest_edge"),
        mean=reader.three("image_mean", -10.0),
        std=reader.three("image_std", 0.0),
        max_tokens=settings.max_image_tokens,
    )
    if not reader.faults and limits.min_pixels > limits.max_pixels:
        reader.fault("min_pixels", f"at most max_pixels ({limits.max_pixels})")
    if reader.faults:
        raise CheckpointError(reader.faults)
    return limits


class _Fields:
    """preprocessor_config.json's values, and the faults among them."""

    def __init__(self, where: str, raw: dict[str, Any]) -> None:
        self.where, self.raw, self.faults = where, raw, list[str]()

    def fault(self, key: str, expected: str) -> None:
        found = f"found {self.raw[key]!r}" if key in self.raw else "it is missing"
        self.faults.append(f"{self.where}: {key}: expected {expected}, {found}")

    def size(self, key: str, vision_config: Mapping[str, Any], twin: str) -> int:
        """A small whole number that vision_config has too, as ``twin``."""
        value, other = self.raw.get(key), vision_config.get(twin)
        if type(value) is not int or not 1 <= value <= 1024:
            self.fault(key, "a whole number from 1 to 1024")
            return 1
        if other is not None and other != value:
            self.fault(key, f"vision_config.{twin} of config.json ({other!r})")
        return value

    def pixels(self, key: str, twin: str) -> int:
        """A number of pixels, which newer files keep inside ``size``."""
        sizes = self.raw.get("size")
        value = self.raw.get(key, sizes.get(twin) if isinstance(sizes, dict) else None)
        if type(value) is not int or not 1 <= value < 2**31:
            self.fault(key, "a number of pixels from 1 on")
            return 1
        return value

    def three(self, key: str, low: float) -> tuple[float, float, float]:
        """A number for each of red, green and blue, above ``low``."""
        value = self.raw.get(key)
        if (
            not isinstance(value, list)
            or len(value) != 3
            or not all(type(v) in (int, float) and low < v <= 10 for v in value)
        ):
            self.fault(key, f"three numbers above {low:g}, at most 10")
            return (1.0, 1.0, 1.0)
        return (float(value[0]), float(value[1]), float(value[2]))
