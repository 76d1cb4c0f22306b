"""Conversations about pictures: the colour and shape, how many, left and right, what is written."""

from __future__ import annotations

from collections.abc import Callable

from tools.demo import pictures
from tools.demo.draw import Draw, Turn, exact
from tools.demo.phrases import texts
from tools.demo.pictures import COLOURS, FONTS, SHAPES, Picture, differ

NUMBERS = texts("numbers")
SIGNS = texts("signs")
ASK = {name: texts(f"ask_{name}") for name in ("hue", "form", "seen", "amount", "left", "right", "sign")}
MOST = 5

Question = tuple[str, str, tuple[str, ...]]  # what is asked, the answer, other right ways to say it
Sight = tuple[Picture, str, list[Question], str]  # a picture, what is on it, what can be asked, and behind it


def two_colours(draw: Draw) -> tuple[str, str]:
    """A colour and another that it can stand on; half of the grounds are white."""
    while True:
        colour, ground = draw.pick(COLOURS), "white" if draw.chance(0.5) else draw.pick(COLOURS)
        if differ(colour, ground):
            return colour, ground


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def one_shape(draw: Draw) -> Sight:
    shape, (colour, ground), size = draw.fresh("shape", lambda: (draw.pick(SHAPES), two_colours(draw), draw.int(0, 3)))
    questions: list[Question] = [
        (draw.pick(ASK["hue"]).format(draw.pick((shape, "shape", "thing"))), colour, ()),
        (draw.pick(ASK["form"]).format(colour), shape, (with_article(shape),)),
        (draw.pick(ASK["seen"]), with_article(f"{colour} {shape}"), (f"{colour} {shape}",)),
    ]
    return pictures.single(draw, shape, colour, ground, size), with_article(f"{colour} {shape}"), questions, ground


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def shapes_to_count(draw: Draw) -> Sight:
    def parts() -> tuple[int, str, tuple[str, str]]:
        return draw.int(1, MOST), draw.pick(SHAPES), two_colours(draw)

    count, shape, (colour, ground) = draw.fresh("amount", parts)
    questions: list[Question] = [
        (draw.pick(ASK["amount"]).format(draw.pick((plural(shape), plural(shape), "shapes"))), NUMBERS[count - 1], ())
    ]
    seen = f"{NUMBERS[count - 1]} {colour} {plural(shape) if count > 1 else shape}"
    return pictures.several(draw, count, shape, colour, ground), seen, questions, ground


def beside(draw: Draw) -> Sight:
    """Two colours or two shapes, left and right."""

    def halves() -> tuple[str, str, bool]:
        left, right = draw.some(COLOURS, 2)
        return (left, right, draw.chance(0.5)) if differ(left, right) else halves()

    left, right, panels = draw.fresh("sides", halves)
    seen = f"{left} on the left, {right} on the right"
    questions: list[Question] = [
        (draw.pick(ASK["left"]), left, ()),
        (draw.pick(ASK["right"]), right, ()),
        ("Which colours are left and right?", seen, ()),
    ]
    ground = draw.pick([c for c in ("white", "white", "black", "grey") if differ(c, left) and differ(c, right)] or [""])
    if panels or not ground:
        return pictures.two_panels(draw, left, right), seen, questions, ""
    shapes = draw.pick(SHAPES), draw.pick(SHAPES)
    picture = pictures.two_shapes(draw, (shapes[0], left), (shapes[1], right), ground)
    return picture, seen, questions, ground


def sign(draw: Draw) -> Sight:
    def parts() -> tuple[str, str, tuple[str, str]]:
        text = str(draw.int(0, 9)) if draw.chance(0.4) else draw.pick(SIGNS)
        return text, draw.pick(FONTS), two_colours(draw)

    text, font, (colour, ground) = draw.fresh("sign", parts)
    asked = [*ASK["sign"], *(("Which digit is this?", "What digit is it?") if text.isdigit() else ("Read the word.",))]
    questions: list[Question] = [(draw.pick(asked), text, ())]
    return pictures.written(draw, text, colour, ground, font), text, questions, ground


SIGHTS: dict[str, Callable[[Draw], Sight]] = {
    "shapes": one_shape,
    "amounts": shapes_to_count,
    "sides": beside,
    "reading": sign,
}


def look(draw: Draw, skill: str) -> list[Turn]:
    """A picture and a question on it; in training sometimes more questions, without showing it again."""
    picture, seen, questions, ground = SIGHTS[skill](draw)
    count = 1 if draw.held or draw.chance(0.6) else draw.int(1, min(3, len(questions)))
    turns = []
    for asked, answer, others in draw.some(questions, count):
        wanted = exact(*(form + end for form in (answer, *others) for end in ("", ".")))
        turns.append(Turn(asked, answer, f"I see {seen}.", check=wanted))
    turns[0].picture, turns[0].picture_last, turns[0].seen = picture, draw.chance(0.2), f"{seen} {ground}"
    return turns


def album(draw: Draw, skill: str) -> list[Turn]:
    """Several pictures, one after the other: much to see for few words."""
    return [turn for _ in range(draw.int(3, 6)) for turn in look(draw, skill)]
