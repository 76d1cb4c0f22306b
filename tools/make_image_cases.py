"""Ask transformers' Pillow-based Qwen2-VL image processor what it makes of a few drawn pictures.

tools/make_image_cases.py [tests/data/image_cases.json]

Needs transformers (no part of the project's dependencies). The file holds the grid and the SHA-256 of the patches'
float32 bytes for each picture, and the grids of many sizes that were only calculated.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PREPROCESSOR = ROOT / "tools" / "data" / "preprocessor_config.json"
SMALL = (4096, 60000)  # pixel limits that small pictures meet

# (height, width, pixel limits or None for the release's)
PICTURES: list[tuple[int, int, tuple[int, int] | None]] = [
    (1, 1, None),
    (1, 200, None),
    (3, 500, None),
    (7, 5, None),
    (31, 33, None),
    (32, 32, None),
    (48, 80, None),  # 1.5 and 2.5 tokens: a half rounds to even
    (56, 56, None),
    (64, 96, None),  # a multiple of the unit stays as it is
    (97, 61, None),
    (192, 640, None),
    (224, 320, None),
    (250, 333, None),
    (1000, 5, None),
    (20, 20, SMALL),
    (61, 67, SMALL),
    (250, 240, SMALL),
    (256, 256, SMALL),
    (301, 517, SMALL),
    (40, 1999, SMALL),
]


def draw(height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3]: slopes, edges and noise, the same numbers everywhere."""
    y, x, channel = np.ogrid[0:height, 0:width, 0:3]
    mixed = (y * 73856093) ^ (x * 19349663) ^ (channel * 83492791)
    noise = (mixed * 2654435761 >> 13) & 63
    slope = (y * 3 + x * 2 * (channel + 1)) % 193
    return np.where((y // 9 + x // 7 + channel) % 3 == 0, 255 - noise, (slope + noise) % 256).astype(np.uint8)


def sizes(count: int = 400) -> list[tuple[int, int]]:
    """Heights and widths from one pixel to more than the limits, all within the ratio of 200."""
    found: list[tuple[int, int]] = []
    state = 1
    while len(found) < count:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        height, width = (int(2 ** ((state >> shift & 1023) * 13.5 / 1024)) for shift in (54, 34))
        if max(height, width) <= 200 * min(height, width):
            found.append((height, width))
    return found


def main() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    raw = {k: v for k, v in json.loads(PREPROCESSOR.read_text()).items() if not k.endswith(("_type", "_class"))}
    release = (raw.pop("min_pixels"), raw.pop("max_pixels"))
    cases: list[dict[str, Any]] = []
    for height, width, limits in PICTURES:
        low, high = limits or release
        processor = Qwen2VLImageProcessorPil(**raw, size={"shortest_edge": low, "longest_edge": high})
        found = processor.preprocess(images=draw(height, width), input_data_format="channels_last", return_tensors="np")
        pixels = np.ascontiguousarray(found["pixel_values"], dtype="<f4")
        cases.append(
            {
                "size": [height, width],
                "limits": [low, high],
                "grid": found["image_grid_thw"][0, 1:].tolist(),
                "sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
            }
        )
    unit = raw["patch_size"] * raw["merge_size"]
    grids = [[h, w, *(n // unit for n in smart_resize(h, w, unit, *release))] for h, w in sizes()]
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests" / "data" / "image_cases.json"
    lines = ",\n".join(json.dumps(case) for case in cases)
    out.write_text(f'{{"pictures": [\n{lines}\n],\n"grids": {json.dumps(grids, separators=(",", ":"))}}}\n')


if __name__ == "__main__":
    main()
