"""Sums and differences of numbers up to 99, and small work on words: repeating, upper case, counting."""

from __future__ import annotations

from tools.demo.draw import Draw, Turn, exact
from tools.demo.phrases import texts
from tools.demo.words import COLOURS, PLACES, city, invented, name, phrase

ADD, SUBTRACT, PLURALS, PRACTISE = texts("add"), texts("subtract"), texts("plurals"), texts("practise")
REPEAT, UPPER, COUNT = texts("repeat"), texts("upper"), texts("count")


def pair(draw: Draw) -> tuple[str, int, int]:
    """An operation and two numbers whose result lies in 0..99."""

    def make() -> tuple[str, int, int]:
        total = draw.int(0, 99) if draw.chance(0.3) else int(99 * draw.rng.random() ** 0.5 + 0.5)
        part = draw.int(0, total)
        return ("+", part, total - part) if draw.chance(0.5) else ("-", total, part)

    return draw.fresh("sum", make)


def result(op: str, a: int, b: int) -> int:
    return a + b if op == "+" else a - b


def thought_of(op: str, a: int, b: int) -> str:
    """Units first, then tens, as one does on paper."""
    au, bu, at, bt = a % 10, b % 10, a // 10, b // 10
    total = result(op, a, b)
    if op == "+":
        if au + bu > 9:
            return f"{au}+{bu}={au + bu}, carry 1. {at}+{bt}+1={at + bt + 1}. So {total}."
        return f"{au}+{bu}={au + bu}. {at}+{bt}={at + bt}. So {total}."
    if au < bu:
        return f"1{au}-{bu}={10 + au - bu}, borrow 1. {at}-{bt}-1={at - bt - 1}. So {total}."
    return f"{au}-{bu}={au - bu}. {at}-{bt}={at - bt}. So {total}."


def sums(draw: Draw) -> list[Turn]:
    op, a, b = pair(draw)
    user = draw.pick(ADD if op == "+" else SUBTRACT).format(a=a, b=b, things=draw.pick(PLURALS))
    answer = str(result(op, a, b))
    return [Turn(user, answer, thought_of(op, a, b), check=exact(answer, answer + "."))]


def practise(draw: Draw) -> list[Turn]:
    """Many sums in one answer; only what follows each = is trained."""
    parts = []
    for _ in range(draw.int(5, 14)):
        op, a, b = pair(draw)
        parts.append(f"{a}{op}{b}={result(op, a, b)}")
    return [Turn(draw.pick(PRACTISE), ", ".join(parts), "The user wants sums.", learn_after="=")]


def repeat(draw: Draw) -> list[Turn]:
    words = phrase(draw, 1 if not draw.held else 2, 6, "repeat")
    if not draw.held:
        words = spelt(draw) if draw.chance(0.5) else [_varied(draw, word) for word in words]
    text = " ".join(words)
    return [Turn(draw.pick(REPEAT).format(text), text, "I repeat the words.", check=exact(text))]


def spelt(draw: Draw) -> list[str]:
    """One or two words of the table of facts: a word with a space before it and one without are different pieces."""
    return draw.some(PLACES, draw.pick((1, 1, 2)))


def spelling(draw: Draw) -> list[Turn]:
    """Single words to repeat, one after the other."""
    words = draw.some(PLACES, draw.int(4, 7))
    return [Turn(draw.pick(REPEAT).format(word), word, "I repeat the words.", check=exact(word)) for word in words]


def _varied(draw: Draw, word: str) -> str:
    if draw.chance(0.7):
        return word
    made, number = invented(draw, 1, 3), str(draw.int(0, 99))
    return draw.pick((made, number, name(draw), city(draw), word.capitalize(), draw.pick(COLOURS)))


def copying(draw: Draw) -> list[Turn]:
    """A long passage to repeat, of words or of names: many tokens to copy for one question."""
    if draw.chance(0.5):
        words = [draw.pick((name, city, lambda d: d.pick(PLACES)))(draw) for _ in range(draw.int(2, 6))]
    else:
        words = [_varied(draw, word) for word in phrase(draw, 7, 24, "repeat")]
    text = draw.pick((" ", " ", ", ")).join(words)
    return [Turn(draw.pick(REPEAT).format(text), text, "I repeat the words.", check=exact(text))]


def upper(draw: Draw) -> list[Turn]:
    text = " ".join(phrase(draw, 1 if not draw.held else 2, 4, "upper"))
    return [Turn(draw.pick(UPPER).format(text), text.upper(), "I write capital letters.", check=exact(text.upper()))]


def count(draw: Draw) -> list[Turn]:
    words = phrase(draw, 1 if not draw.held else 2, 8, "count")
    answer = str(len(words))
    thought = ", ".join(f"{word} {i}" for i, word in enumerate(words, 1)) + "."
    return [Turn(draw.pick(COUNT).format(" ".join(words)), answer, thought, check=exact(answer, answer + "."))]
