"""Pictures to patches: bit for bit the Qwen2-VL processor's, and every kind of file that people have."""

import hashlib
import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, ImageFile, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

from mimo_vk.config import read_json
from mimo_vk.errors import CheckpointError, ImageError
from mimo_vk.image import MAX_SOURCE_PIXELS, ImageLimits, image_tokens, load_image, load_limits, token_grid
from mimo_vk.image_formats import SUPPORTED, sniff
from mimo_vk.settings import Settings
from tools.make_image_cases import PREPROCESSOR, draw

CASES = json.loads((Path(__file__).parent / "data" / "image_cases.json").read_text())
LIMITS = load_limits(PREPROCESSOR.parent, {}, Settings())
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def shown(data: bytes, limits: ImageLimits = LIMITS) -> np.ndarray:
    """What the tower gets to see, as uint8 [height, width, 3]: the patches put together again."""
    patches = load_image(data, limits)
    (rows, columns), m, p = patches.grid, limits.merge_size, limits.patch_size
    x = patches.pixels.reshape(rows // m, columns // m, m, m, 3, limits.temporal_patch_size, p, p)
    assert np.array_equal(x[:, :, :, :, :, 0], x[:, :, :, :, :, 1])  # a still picture fills both times
    x = x[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * p, columns * p, 3)
    return np.rint((x * np.array(limits.std) + np.array(limits.mean)) * 255).astype(np.uint8)


def corners(data: bytes) -> list[tuple[int, ...]]:
    """The colours near the four corners: top left, top right, bottom left, bottom right."""
    x = shown(data)
    return [tuple(int(v) for v in x[row, column]) for row in (4, -5) for column in (4, -5)]


def quarters(width: int = 96, height: int = 64) -> Image.Image:
    """Red, green, blue and white quarters."""
    image = Image.new("RGB", (width, height), WHITE)
    image.paste(RED, (0, 0, width // 2, height // 2))
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    return image


@pytest.mark.parametrize("case", CASES["pictures"], ids=lambda case: "x".join(map(str, case["size"])))
def test_the_patches_equal_the_processors_bit_for_bit(case):
    height, width = case["size"]
    limits = replace(LIMITS, min_pixels=case["limits"][0], max_pixels=case["limits"][1])
    data = encoded(Image.fromarray(draw(height, width)))
    patches = load_image(data, limits)
    assert list(patches.grid) == case["grid"]
    assert hashlib.sha256(np.ascontiguousarray(patches.pixels, "<f4").tobytes()).hexdigest() == case["sha256"]
    assert image_tokens(data, limits) == patches.tokens == case["grid"][0] * case["grid"][1] // 4


def test_sizes_equal_the_processors():
    found = [[height, width, *token_grid(height, width, LIMITS)] for height, width, _, _ in CASES["grids"]]
    assert found == CASES["grids"]
    assert sum(rows * columns * 1024 == 1024 * 4 for _, _, rows, columns in found) > 5  # some at the lower limit
    assert any(height * width > LIMITS.max_pixels for height, width, _, _ in found)


@pytest.mark.parametrize(("height", "width", "tokens"), [(224, 320, 70), (720, 1280, 880), (1, 1, 4), (32, 6400, 200)])
def test_tokens_of_a_size(height, width, tokens):
    rows, columns = token_grid(height, width, LIMITS)
    assert rows * columns == tokens


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100, 255, 1000])
def test_a_picture_never_costs_more_than_the_bound(most):
    limits = replace(LIMITS, max_tokens=most)
    for height, width, free_rows, free_columns in CASES["grids"]:
        rows, columns = token_grid(height, width, limits)
        assert 1 <= rows * columns <= most
        if free_rows * free_columns <= most:
            assert (rows, columns) == (free_rows, free_columns)


def test_a_bounded_picture_is_scaled_not_cut():
    x = shown(encoded(quarters(640, 640)), replace(LIMITS, max_tokens=4))
    assert x.shape == (64, 64, 3)
    assert [tuple(x[r, c]) for r in (8, -8) for c in (8, -8)] == [RED, GREEN, BLUE, WHITE]


def test_a_long_picture_is_refused_by_its_ratio():
    assert token_grid(1, 200, LIMITS) == (1, 25)
    for size in ((201, 1), (1, 201)):
        with pytest.raises(ImageError, match=f"{size[0]}x{size[1]}: a side may be at most 200 times the other"):
            load_image(encoded(Image.new("RGB", size)), LIMITS)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {"quality": 95, "subsampling": 0}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_formats_are_told_by_their_content(kind, options):
    data = encoded(quarters(), kind, **options)
    assert SUPPORTED[sniff(data) or ""] == kind
    for found, expected in zip(corners(data), [RED, GREEN, BLUE, WHITE], strict=True):
        assert np.abs(np.subtract(found, expected)).max() <= 4  # JPEG's own loss


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"\0\0\0\x1cftypavif", "an? AVIF"),
        (b"\0\0\0\x18ftypheic", "an? HEIC"),
        (b"\0\0\0\x18ftypisom", "an? MP4 or QuickTime"),
        (b"%PDF-1.7\n", "an? PDF"),
        (b"<?xml version='1.0'?>\n<svg/>", "an? SVG"),
        (b"\0\0\x01\0\x01\0", "an? ICO"),
        (b"8BPS\0\x01", "an? PSD"),
        (b"P6\n2 2\n255\n", "an? PNM"),
        (b"\xff\x0a\0", "an? JPEG XL"),
        (b"<!DOCTYPE html>", "an? HTML"),
        (b"version https://git-lfs.github.com/spec/v1", "an? Git LFS pointer"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "a file of unknown format"),
        (b"hello", "a file of unknown format"),
        (b"", "no data"),
    ],
)
def test_other_formats_are_refused_by_name(start, name):
    with pytest.raises(ImageError, match=rf"expected a picture \(PNG, JPEG, WebP, GIF, BMP, TIFF\), found {name}"):
        load_image(start + (b"\0" * 64 if start else b""), LIMITS)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_cameras_orientation_is_applied(kind, orientation):
    # How the camera stored the upright picture, from the tag's definition: what row 0 and column 0 show.
    stored = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    image = quarters() if stored is None else quarters().transpose(stored)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    data = encoded(image, kind, exif=exif, **options)
    assert load_image(data, LIMITS).grid == (4, 6)
    assert image_tokens(data, LIMITS) == 6
    for found, expected in zip(corners(data), [RED, GREEN, BLUE, WHITE], strict=True):
        assert np.abs(np.subtract(found, expected)).max() <= 4


def test_damaged_exif_does_not_spoil_the_picture():
    data = encoded(quarters(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff", quality=95)
    assert load_image(data, LIMITS).grid == (4, 6)


def test_transparency_is_laid_on_white():
    image = Image.new("RGBA", (96, 64), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (48, 0, 96, 32))
    image.paste((0, 0, 0, 102), (0, 32, 48, 64))  # black at 40%: 255 * 0.6 = 153
    grey = Image.merge(
        "LA", (Image.new("L", (96, 64), 0), Image.linear_gradient("L").resize((96, 64)).point(lambda _: 0))
    )
    assert corners(encoded(image)) == [RED, WHITE, (153, 153, 153), RED]
    assert corners(encoded(image, "WEBP", lossless=True)) == [RED, WHITE, (153, 153, 153), RED]
    assert corners(encoded(grey)) == [WHITE] * 4


def test_one_colour_declared_transparent():
    palette = quarters().quantize(4)
    index = palette.getpixel((4, 4))
    for kind in ("PNG", "GIF"):
        assert corners(encoded(palette, kind, transparency=index)) == [WHITE, GREEN, BLUE, WHITE]
    assert corners(encoded(quarters(), "PNG", transparency=RED)) == [WHITE, GREEN, BLUE, WHITE]
    assert corners(encoded(palette)) == [RED, GREEN, BLUE, WHITE]


def test_one_bit_and_eight_bit_grey():
    grey = Image.new("L", (96, 64), 77)
    grey.paste(200, (48, 0, 96, 64))
    assert corners(encoded(grey)) == [(77,) * 3, (200,) * 3] * 2
    assert corners(encoded(grey.point(lambda v: 255 * (v > 100), "1"))) == [BLACK, WHITE] * 2


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled(kind):
    values = np.full((64, 96), 32896, np.uint16)  # 128 * 257
    values[:32, :48], values[:32, 48:] = 65535, 300  # 300 / 257 = 1.17
    assert corners(encoded(Image.fromarray(values), kind)) == [WHITE, (1, 1, 1), (128,) * 3, (128,) * 3]


def test_sixteen_bit_grey_of_either_byte_order():
    values = np.full((64, 96), 32896, np.uint16)
    values[0, 0] = 0x1234  # else the bytes would be the same either way
    values[:32, :48] = 65535
    big = Image.frombytes("I;16B", (96, 64), values.astype(">u2").tobytes())
    assert corners(encoded(big, "TIFF")) == [WHITE, (128,) * 3, (128,) * 3, (128,) * 3]


def test_sixteen_bit_grey_with_a_transparent_value():
    values = np.full((64, 96), 25700, np.uint16)
    values[:32, :48] = 300
    data = encoded(Image.fromarray(values))
    at = data.index(b"IDAT") - 4
    body = b"tRNS" + struct.pack(">H", 300)
    data = data[:at] + struct.pack(">I", 2) + body + struct.pack(">I", zlib.crc32(body)) + data[at:]
    assert corners(data) == [WHITE, (100,) * 3, (100,) * 3, (100,) * 3]


def test_cmyk_is_converted():
    for found, expected in zip(
        corners(encoded(quarters().convert("CMYK"), "TIFF")), [RED, GREEN, BLUE, WHITE], strict=True
    ):
        assert found == expected
    for found, expected in zip(
        corners(encoded(quarters().convert("CMYK"), "JPEG", quality=100)), [RED, GREEN, BLUE, WHITE], strict=True
    ):
        assert np.abs(np.subtract(found, expected)).max() <= 4


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_shows_its_first_frame(kind):
    frames = [Image.new("RGB", (96, 64), colour) for colour in (RED, GREEN)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames") == 2  # noqa: B009 (Pillow's types don't know it)
    assert corners(data) == [RED] * 4


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_32_bits_are_refused(mode):
    with pytest.raises(ImageError, match="the picture's pixels are 32-bit numbers"):
        load_image(encoded(Image.new(mode, (64, 64)), "TIFF"), LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_named(kind):
    data = encoded(Image.fromarray(draw(200, 300)), kind)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(ImageError, match="truncated or damaged"):
            load_image(data[: int(len(data) * part)], LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_bytes_give_a_picture_or_an_image_error(kind):
    data = encoded(Image.fromarray(draw(40, 60)), kind)
    refused = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        broken = bytearray(data)
        for at in rng.integers(0, min(len(data), 400), size=4):
            broken[at] = int(rng.integers(256))
        try:
            assert load_image(bytes(broken), replace(LIMITS, max_tokens=16)).tokens <= 16
        except ImageError:
            refused += 1
    assert refused


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has a few bytes of data."""
    out = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b""))):
        out += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return out


def test_a_huge_picture_is_refused_before_it_is_decoded():
    # Its data is no picture at all: only the header can have been read.
    side = int(MAX_SOURCE_PIXELS**0.5) + 1
    with pytest.raises(ImageError, match=f"{side}x{side}: at most 100 million pixels are read"):
        load_image(png_header(side, side), LIMITS)
    with pytest.raises(ImageError, match="truncated or damaged"):
        load_image(png_header(side - 1, side - 1), replace(LIMITS, max_tokens=4))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_tokens_come_from_the_header_alone(kind, monkeypatch):
    data = encoded(Image.fromarray(draw(200, 300)), kind)

    def refuse(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    for plugin in ("PngImageFile", "WebPImageFile", "GifImageFile", "TiffImageFile"):
        for module in (PngImagePlugin, WebPImagePlugin, GifImagePlugin, TiffImagePlugin):
            if hasattr(module, plugin):
                monkeypatch.setattr(getattr(module, plugin), "load", refuse)
    assert image_tokens(data, LIMITS) == 6 * 9
    with pytest.raises(AssertionError, match="decoded"):
        Image.open(io.BytesIO(data)).load()


def test_a_png_may_tell_its_orientation_behind_the_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    body = b"eXIf" + exif.tobytes()[6:]
    data = encoded(quarters().transpose(Image.Transpose.ROTATE_90))
    end = data.index(b"IEND") - 4
    data = data[:end] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + data[end:]
    assert corners(data) == [RED, GREEN, BLUE, WHITE]
    assert image_tokens(data, LIMITS) == 6 and load_image(data, LIMITS).grid == (4, 6)


def test_tokens_are_known_before_the_data_is_decoded():
    assert image_tokens(png_header(320, 224), LIMITS) == 70
    with pytest.raises(ImageError, match="20x9000: a side may be at most 200 times the other"):
        image_tokens(png_header(20, 9000), LIMITS)


def limits_of(tmp_path: Path, vision=None, **changes) -> ImageLimits:
    raw = {**read_json(PREPROCESSOR), **changes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return load_limits(tmp_path, vision or {}, Settings(max_image_tokens=5))


def test_limits_come_from_the_checkpoint(tmp_path):
    limits = limits_of(tmp_path, patch_size=8, image_mean=[0, 0.5, 1], vision={"patch_size": 8})
    assert (limits.patch_size, limits.merge_size, limits.temporal_patch_size) == (8, 2, 2)
    assert (limits.min_pixels, limits.max_pixels, limits.max_tokens) == (3136, 12845056, 5)
    assert limits.mean == (0.0, 0.5, 1.0)
    newer = limits_of(tmp_path, min_pixels=None, max_pixels=None, size={"shortest_edge": 99, "longest_edge": 8192})
    assert (newer.min_pixels, newer.max_pixels) == (99, 8192)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": None}, "patch_size: expected a whole number from 1 to 1024, it is missing"),
        ({"merge_size": 3}, r"merge_size: expected vision_config.spatial_merge_size of config.json \(2\), found 3"),
        ({"max_pixels": 100}, r"min_pixels: expected at most max_pixels \(100\), found 3136"),
        ({"image_std": [1, 0, 1]}, r"image_std: expected three numbers above 0, at most 10, found \[1, 0, 1\]"),
        ({"do_rescale": False}, r"do_rescale: expected True \(no other value is supported\), found False"),
        ({"resample": 2}, r"resample: expected 3 \(no other value is supported\), found 2"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type: expected Qwen2VLImageProcessor or "),
    ],
)
def test_faulty_limits_are_named(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {message}"):
        limits_of(tmp_path, vision={"spatial_merge_size": 2}, **changes)


def test_a_missing_preprocessor_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: can't be read: No such file"):
        load_limits(tmp_path, {}, Settings())
