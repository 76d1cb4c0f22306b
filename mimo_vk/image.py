"""A picture's bytes become the patches that the vision tower reads.

Sizes and arithmetic are those of transformers' Pillow-based Qwen2-VL image processor: for a picture that is already
8-bit RGB the patches equal its output bit for bit. What that processor leaves open is settled here: the camera's
orientation is applied, transparency is laid on white, 16-bit grey is scaled, an animation shows its first frame.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image

from mimo_vk.errors import ImageError
from mimo_vk.formats import F32
from mimo_vk.image_formats import SUPPORTED, sniff
from mimo_vk.image_limits import ImageLimits, load_limits

__all__ = ["MAX_SOURCE_PIXELS", "ImageLimits", "Patches", "image_tokens", "load_image", "load_limits", "token_grid"]

MAX_SOURCE_PIXELS = 100_000_000  # a file of a few kB can claim to be larger; as RGB this many take 400 MB
MAX_RATIO = 200  # the processor's own bound

# Our own bound is checked between reading the header and decoding; Pillow's would only add a warning to it.
Image.MAX_IMAGE_PIXELS = None

_ORIENTATION = 0x0112  # the EXIF tag
_Turn = Image.Transpose
# What sets a picture upright, by the tag's value (EXIF 2.32, 4.6.4); 5 to 8 exchange its sides.
_TURNS = {
    2: _Turn.FLIP_LEFT_RIGHT, 3: _Turn.ROTATE_180, 4: _Turn.FLIP_TOP_BOTTOM, 5: _Turn.TRANSPOSE, 6: _Turn.ROTATE_270,
    7: _Turn.TRANSVERSE, 8: _Turn.ROTATE_90,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Patches:
    """One picture for the tower.

    pixels: [rows * columns, 3 * temporal_patch_size * patch_size^2], normalised, the patches in the order (block row,
    block column, row in block, column in block) of merge_size^2 blocks, each patch (channel, time, y, x).
    grid: (rows, columns) of patches, both multiples of merge_size.
    """

    pixels: F32
    grid: tuple[int, int]
    merge_size: int

    @property
    def tokens(self) -> int:
        """Rows that the tower makes of it: one for each block of merge_size^2 patches."""
        return self.grid[0] * self.grid[1] // self.merge_size**2


def load_image(data: bytes, limits: ImageLimits) -> Patches:
    """Decode, resize and normalise a picture. Errors: ImageError says what is wrong with it."""
    image, orientation = _open(data)
    width, height = _upright_size(image, orientation)
    rows, columns = token_grid(height, width, limits)
    try:
        with _quiet():
            pixels = _as_rgb(image, orientation)
    except ImageError:
        raise
    except Exception as error:  # a damaged file makes a decoder raise nearly anything
        raise ImageError(f"the {sniff(data)} picture is truncated or damaged: {_one_line(error)}") from None
    assert pixels.size == (width, height), "the header's size is the decoded picture's"
    size = (columns * limits.unit, rows * limits.unit)
    resized = np.asarray(pixels.resize(size, resample=Image.Resampling.BICUBIC))
    return Patches(
        _patchify(resized, limits), (rows * limits.merge_size, columns * limits.merge_size), limits.merge_size
    )


def image_tokens(data: bytes, limits: ImageLimits) -> int:
    """Tokens that the picture will take, from its header alone. Errors: as ``load_image``, but for damaged data."""
    width, height = _upright_size(*_open(data))
    rows, columns = token_grid(height, width, limits)
    return rows * columns


def token_grid(height: int, width: int, limits: ImageLimits) -> tuple[int, int]:
    """Rows and columns of tokens for a picture of that size: the processor's smart_resize, in whole tokens.

    Errors: ImageError for a picture more than 200 times as long as it is wide.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ImageError(f"the picture is {width}x{height}: a side may be at most {MAX_RATIO} times the other")
    unit, most = limits.unit, limits.max_pixels
    if limits.max_tokens is not None:
        most = min(most, limits.max_tokens * unit**2)
    least = min(limits.min_pixels, most)
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > most:
        beta = math.sqrt((height * width) / most)
        rows = max(1, math.floor(height / beta / unit))
        columns = max(1, math.floor(width / beta / unit))
    elif rows * columns * unit**2 < least:
        beta = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * beta / unit), math.ceil(width * beta / unit)
    return _capped(rows, columns, limits.max_tokens)


def _capped(rows: int, columns: int, most: int | None) -> tuple[int, int]:
    """Shorten the longer side to ``most`` tokens: a thin picture's shorter side is one token however it is scaled."""
    if most is None or rows * columns <= most:
        return rows, columns
    if rows > columns:
        return max(1, most // columns), min(columns, most)
    return min(rows, most), max(1, most // rows)


def _open(data: bytes) -> tuple[Image.Image, int]:
    """The picture with its header read, of a format and a size that can be used, and its orientation."""
    name = sniff(data)
    if name not in SUPPORTED:
        found = f"a {name} file" if name else "a file of unknown format"
        raise ImageError(f"expected a picture ({', '.join(SUPPORTED)}), found {found if data else 'no data'}")
    try:
        with _quiet():
            image = Image.open(io.BytesIO(data), formats=[SUPPORTED[name]])
            orientation = _orientation(image, data)
    except Exception as error:  # as for decoding
        reason = "" if isinstance(error, Image.UnidentifiedImageError) else f": {_one_line(error)}"
        raise ImageError(f"the {name} picture's header is truncated or damaged{reason}") from None
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise ImageError(
            f"the picture is {width}x{height}: at most {MAX_SOURCE_PIXELS / 1e6:g} million pixels are read"
        )
    if width < 1 or height < 1:
        raise ImageError(f"the {name} picture is {width}x{height}: it has no pixels")
    return image, orientation


def _upright_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """Width and height once the orientation is applied."""
    width, height = image.size
    return (height, width) if orientation >= 5 else (width, height)


def _orientation(image: Image.Image, data: bytes) -> int:
    """The EXIF tag's value, from 1 to 8, without decoding. Pillow's TIFF reader applies it by itself."""
    if image.format == "TIFF":
        return 1
    try:
        value = _png_exif(data) if image.format == "PNG" else image.getexif()
        found = value.get(_ORIENTATION, 1)
    except Exception:  # damaged notes don't spoil the picture
        return 1
    return found if isinstance(found, int) and found in _TURNS else 1


def _png_exif(data: bytes) -> Image.Exif:
    """The eXIf chunk, which may stand behind the pixels: Pillow would decode those to get there."""
    exif, at = Image.Exif(), 8
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind == b"eXIf":
            exif.load(b"Exif\0\0" + data[at + 8 : at + 8 + length])
        at += 12 + length
    return exif


def _as_rgb(image: Image.Image, orientation: int) -> Image.Image:
    """The decoded first frame, upright, as 8-bit RGB."""
    image.load()
    if orientation in _TURNS:
        image = image.transpose(_TURNS[orientation])
    if image.mode.startswith("I;16"):
        image = _from_16_bit_grey(image)
    if image.mode in ("I", "F"):
        raise ImageError("the picture's pixels are 32-bit numbers: only 8 and 16 bits a channel are read")
    if not (image.has_transparency_data or "A" in image.getbands()):
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _from_16_bit_grey(image: Image.Image) -> Image.Image:
    """8-bit grey, rounded; the one grey that a PNG may declare transparent becomes white."""
    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = 255
    return Image.fromarray(grey)


def _patchify(pixels: np.ndarray, limits: ImageLimits) -> F32:
    """uint8 [height, width, 3] to the patches' normalised numbers, in the processor's order."""
    height, width, channels = pixels.shape
    merge, patch, times = limits.merge_size, limits.patch_size, limits.temporal_patch_size
    blocks = pixels.reshape(height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, channels)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels, patch, patch)
    out = np.empty((len(blocks), channels, times, patch, patch), dtype=np.float32)
    for channel, table in enumerate(_tables(limits)):
        out[:, channel] = table[blocks[:, channel]][:, None]
    return out.reshape(len(blocks), -1)


def _tables(limits: ImageLimits) -> F32:
    """What each of the 256 values becomes, by channel [3, 256]: the processor's steps, rounded as it rounds them."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = np.array(limits.mean, np.float32), np.array(limits.std, np.float32)
    return (scaled[None, :] - mean[:, None]) / std[:, None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Pillow's warnings about odd files aren't for the user: either the picture can be read, or an error names it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
