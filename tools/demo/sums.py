"""Sums and differences of numbers up to 99, and small work on words: repeating, upper case, counting."""

from __future__ import annotations

from tools.demo.draw import Draw, Turn, exact
from tools.demo.words import COLOURS, NAMES, invented, phrase

ADD = (
    "What is {a} + {b}?", "What is {a}+{b}?", "what is {a} + {b}?", "What's {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a}+{b}=", "{a} + {b} = ?", "{a} + {b} =", "How much is {a} + {b}?", "What is {a} plus {b}?", "How much is {a} plus {b}?",
    "{a} plus {b}", "Calculate {a} + {b}.", "Compute {a}+{b}", "Add {a} and {b}.", "Can you add {a} and {b}?", "What is the sum of {a} and {b}?", "Quanto fa {a} + {b}?", "Please add {b} to {a}.",
    "I have {a} {things} and get {b} more. How many {things} do I have?", "There are {a} {things} and {b} {things}. How many {things} are there?",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "What is {a}-{b}?", "what is {a} - {b}?", "What's {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a}-{b}=", "{a} - {b} = ?", "{a} - {b} =", "How much is {a} - {b}?", "What is {a} minus {b}?", "How much is {a} minus {b}?",
    "{a} minus {b}", "Calculate {a} - {b}.", "Compute {a}-{b}", "Subtract {b} from {a}.", "Can you subtract {b} from {a}?", "What is the difference of {a} and {b}?", "Quanto fa {a} - {b}?", "Take {b} away from {a}.",
    "I have {a} {things} and give away {b}. How many {things} do I have?", "There are {a} {things} and {b} go away. How many {things} are left?",
)  # fmt: skip
PLURALS = ("apples", "books", "lemons", "birds", "keys", "eggs", "shoes", "boats", "letters", "cats")
PRACTISE = ("Practise sums.", "Write some sums.", "Show me some sums.", "Give me examples of sums.", "Do some sums.")


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
    for _ in range(draw.int(4, 10)):
        op, a, b = pair(draw)
        parts.append(f"{a}{op}{b}={result(op, a, b)}")
    return [Turn(draw.pick(PRACTISE), ", ".join(parts), "The user wants sums.", learn_after="=")]


REPEAT = (
    "Repeat: {}", "Repeat after me: {}", "Say: {}", "Please repeat: {}", "Repeat this: {}", "Repeat the words: {}", "Echo: {}", "Copy this: {}", "Can you repeat this? {}", "Say this: {}", "repeat {}", "Write: {}",
)  # fmt: skip
UPPER = (
    "Write in upper case: {}", "Upper case: {}", "Put this in upper case: {}", "Uppercase this: {}", "Make this upper case: {}", "Write this in capital letters: {}", "In capital letters: {}", "Please write in upper case: {}", "upper case {}",
)  # fmt: skip
COUNT = (
    "How many words are there? {}", "How many words are in this? {}", "Count the words: {}", "Count these words: {}", "How many words: {}", "Tell me how many words there are: {}", "Number of words: {}", "Please count the words: {}",
)  # fmt: skip


def repeat(draw: Draw) -> list[Turn]:
    words = phrase(draw, 1 if not draw.held else 2, 6, "repeat")
    if not draw.held:
        words = [_varied(draw, word) for word in words]
    text = " ".join(words)
    return [Turn(draw.pick(REPEAT).format(text), text, "I repeat the words.", check=exact(text))]


def _varied(draw: Draw, word: str) -> str:
    if draw.chance(0.75):
        return word
    return draw.pick((invented(draw, 1, 3), str(draw.int(0, 99)), draw.pick(NAMES), word.capitalize(), draw.pick(COLOURS)))


def upper(draw: Draw) -> list[Turn]:
    text = " ".join(phrase(draw, 1 if not draw.held else 2, 4, "upper"))
    return [Turn(draw.pick(UPPER).format(text), text.upper(), "I write capital letters.", check=exact(text.upper()))]


def count(draw: Draw) -> list[Turn]:
    words = phrase(draw, 1 if not draw.held else 2, 8, "count")
    answer = str(len(words))
    thought = ", ".join(f"{word} {i}" for i, word in enumerate(words, 1)) + "."
    return [Turn(draw.pick(COUNT).format(" ".join(words)), answer, thought, check=exact(answer, answer + "."))]


