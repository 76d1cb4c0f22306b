"""Pictures that the training draws: described by plain numbers first (what the held-out list keeps), then painted.

A description is {"size": [width, height], "background": [r, g, b]} with any of "panels" [[colour, from x, to x]],
"shapes" [[name, colour, x, y, radius, degrees]] and "text" [words, colour, x, y, height, font]. Pixels throughout.
"""

from __future__ import annotations

import io
import math
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tools.demo.draw import Draw

Colour = list[int]
Picture = dict[str, Any]

# Each colour is any mixture of its samples.
SAMPLES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (200, 30, 40), (225, 55, 50)),
    "blue": ((0, 0, 255), (40, 90, 220), (25, 40, 150)),
    "green": ((0, 255, 0), (0, 128, 0), (70, 170, 80)),
    "yellow": ((255, 255, 0), (240, 215, 50), (255, 235, 90)),
    "white": ((255, 255, 255), (240, 240, 240)),
    "black": ((0, 0, 0), (32, 32, 32)),
    "brown": ((139, 69, 19), (110, 65, 40)),
    "grey": ((128, 128, 128), (100, 100, 100), (165, 165, 165)),
    "purple": ((128, 0, 128), (150, 60, 195)),
    "pink": ((255, 192, 203), (255, 105, 180)),
    "orange": ((255, 165, 0), (245, 125, 20)),
}
COLOURS = tuple(SAMPLES)
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
FONTS = ("plain", "bold", "slanted", "pixel")
FINE = 2  # painted so many times larger, then reduced
CONTRAST = 120.0  # least distance between a colour and what it stands on


def shade(draw: Draw, name: str) -> Colour:
    samples = SAMPLES[name]
    weights = [draw.rng.random() + 1e-3 for _ in samples]
    total = sum(weights)
    return [round(sum(w * s[i] for w, s in zip(weights, samples, strict=True)) / total) for i in range(3)]


def differ(a: str, b: str) -> bool:
    """Whether two named colours can stand beside each other, in any of their shades."""
    return a != b and min(math.dist(x, y) for x in SAMPLES[a] for y in SAMPLES[b]) >= CONTRAST


def side(draw: Draw, low: int, high: int) -> int:
    """A length in pixels, a multiple of 32 half of the time."""
    return draw.int(-(-low // 32), high // 32) * 32 if draw.chance(0.5) else draw.int(low, high)


def blank(draw: Draw, background: str, low: int = 60, high: int = 144) -> Picture:
    size = [side(draw, low, high), side(draw, low, high)]
    if draw.chance(0.15):
        times = draw.pick((2, 3))
        size = [length * times for length in size]
    return {"size": size, "background": shade(draw, background)}


def single(draw: Draw, shape: str, colour: str, background: str, size: int) -> Picture:
    """One shape, of size 0 to 3."""
    picture = blank(draw, background)
    width, height = picture["size"]
    radius = round(min(width, height) * (0.27 + 0.05 * (size + draw.rng.random())))
    place = [draw.int(radius, width - radius), draw.int(radius, height - radius)]
    picture["shapes"] = [[shape, shade(draw, colour), *place, radius, draw.int(-10, 10)]]
    return picture


def several(draw: Draw, count: int, shape: str, colour: str, background: str) -> Picture:
    """``count`` alike shapes, apart from each other, in cells of a grid."""
    picture = blank(draw, background, 96, 144)
    width, height = picture["size"]
    columns, rows = (3, 2) if draw.chance(0.5) else (2, 3)
    cell = min(width / columns, height / rows)
    radius = round(cell * (0.3 + 0.1 * draw.rng.random()))
    rgb, shapes = shade(draw, colour), []
    for place in draw.some(range(columns * rows), count):
        x, y = (place % columns + 0.5) * width / columns, (place // columns + 0.5) * height / rows
        slack = max(0, int(cell * 0.46) - radius)
        shapes.append([shape, rgb, round(x) + draw.int(-slack, slack), round(y) + draw.int(-slack, slack), radius, 0])
    picture["shapes"] = shapes
    return picture


def two_panels(draw: Draw, left: str, right: str) -> Picture:
    """The left part in one colour, the right part in another."""
    picture = blank(draw, left)
    width = picture["size"][0]
    edge = round(width * (0.35 + 0.3 * draw.rng.random()))
    picture["panels"] = [[shade(draw, right), edge, width]]
    return picture


def two_shapes(draw: Draw, left: tuple[str, str], right: tuple[str, str], background: str) -> Picture:
    """Two shapes beside each other, each a (shape, colour)."""
    picture = blank(draw, background, 80, 144)
    width, height = picture["size"]
    radius = round(min(width / 2, height) * (0.32 + 0.12 * draw.rng.random()))
    y = height // 2
    pairs = ((left, width // 4), (right, width - width // 4))
    picture["shapes"] = [[shape, shade(draw, colour), x, y, radius, 0] for (shape, colour), x in pairs]
    return picture


def written(draw: Draw, text: str, colour: str, background: str, font: str) -> Picture:
    """A word or a number, as large as fits or somewhat smaller."""
    wide = len(text) > 2
    width, height = (side(draw, 112, 192), side(draw, 60, 96)) if wide else (side(draw, 60, 112), side(draw, 60, 112))
    if draw.chance(0.15):
        width, height = width * 2, height * 2
    picture: Picture = {"size": [width, height], "background": shade(draw, background)}
    largest = min(height * 0.8, 1.6 * width * 0.9 / max(1, len(text)))
    size = round(largest * (0.75 + 0.25 * draw.rng.random()))
    slack = height // 20
    place = [width // 2 + draw.int(-slack, slack), height // 2 + draw.int(-slack, slack)]
    picture["text"] = [text, shade(draw, colour), *place, size, font]
    return picture


def corners(shape: str) -> list[tuple[float, float]]:
    """The corners of a shape of radius 1 around (0, 0), the y axis downwards."""
    if shape == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if shape == "triangle":
        return [(0.0, -1.0), (0.95, 0.8), (-0.95, 0.8)]
    if shape == "cross":
        a, b = 0.3, 0.95
        arm = [(-a, -b), (a, -b), (a, -a)]
        return [*arm, *((-y, x) for x, y in arm), *((-x, -y) for x, y in arm), *((y, -x) for x, y in arm)]
    assert shape == "star", shape
    turns = [(1.0 if i % 2 == 0 else 0.42, math.pi * i / 5) for i in range(10)]
    return [(r * math.sin(angle), -r * math.cos(angle)) for r, angle in turns]


def paint_shape(
    pen: ImageDraw.ImageDraw, shape: str, rgb: Colour, x: float, y: float, r: float, degrees: float
) -> None:
    fill = (rgb[0], rgb[1], rgb[2])
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "ring":
        pen.ellipse((x - r, y - r, x + r, y + r), outline=fill, width=max(1, round(r * 0.32)))
    else:
        c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        pen.polygon([(x + r * (a * c - b * s), y + r * (a * s + b * c)) for a, b in corners(shape)], fill=fill)


def letters(text: str, height: int, font: str) -> Image.Image:
    """A mask of the text in one of the fonts, all of them made of the two that Pillow brings along."""
    if font == "pixel":
        small = ImageFont.load_default_imagefont()
        _, top, right, bottom = small.getbbox(text)
        mask = Image.new("L", (int(right), int(bottom)), 0)
        ImageDraw.Draw(mask).text((0, 0), text, fill=255, font=small)
        scale = height / max(1, bottom - top)
        return mask.resize((max(1, round(right * scale)), height), Image.Resampling.NEAREST)
    face, stroke = ImageFont.load_default(height), height // 22 if font == "bold" else 0
    box = face.getbbox(text, stroke_width=stroke)
    mask = Image.new("L", (int(box[2] - box[0]) + 2, int(box[3] - box[1]) + 2), 0)
    ImageDraw.Draw(mask).text((1 - box[0], 1 - box[1]), text, fill=255, font=face, stroke_width=stroke)
    if font != "slanted":
        return mask
    lean = round(mask.height * 0.25)
    return mask.transform(
        (mask.width + lean, mask.height), Image.Transform.AFFINE, (1, 0.25, -lean, 0, 1, 0), Image.Resampling.BILINEAR
    )


def png(picture: Picture) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    paint(picture).save(file, "PNG")
    return file.getvalue()


def paint(picture: Picture) -> Image.Image:
    """The picture as an RGB image."""
    width, height = picture["size"]
    image = Image.new("RGB", (width * FINE, height * FINE), tuple(picture["background"]))
    pen = ImageDraw.Draw(image)
    for rgb, start, end in picture.get("panels", ()):
        pen.rectangle((start * FINE, 0, end * FINE, height * FINE), fill=tuple(rgb))
    for shape, rgb, x, y, radius, degrees in picture.get("shapes", ()):
        paint_shape(pen, shape, rgb, x * FINE, y * FINE, radius * FINE, degrees)
    if "text" in picture:
        text, rgb, x, y, size, font = picture["text"]
        mask = letters(text, size * FINE, font)
        image.paste(tuple(rgb), (x * FINE - mask.width // 2, y * FINE - mask.height // 2), mask)
    return image.reduce(FINE)
