"""Closed questions on short tickets and descriptions: yes or no, a label, a number; as in chat and as in System One."""

from __future__ import annotations

import json

from tools.demo.draw import Draw, Turn, exact
from tools.demo.phrases import PHRASES, groups, texts
from tools.demo.words import ANIMALS, COLOURS, THINGS, name

PROBLEMS, ABOUT = groups("problems"), groups("about")  # by team
URGENCY: list[list[str]] = PHRASES["urgency"]  # by level
MOODS = groups("moods")
LEVELS: list[list[str]] = PHRASES["levels"]
ASK_URGENT, ASK_TEAM, ASK_LEVEL = texts("ask_urgent"), texts("ask_team"), texts("ask_level")
ASK_ANGRY, ASK_MOOD, ASK_ABOUT = texts("ask_angry"), texts("ask_mood"), texts("ask_about")
YES_NO = "Answer yes or no."


class Ticket:
    def __init__(self, draw: Draw) -> None:
        def parts() -> tuple[str, str, int, str]:
            team = draw.pick(list(PROBLEMS))
            level = draw.pick((0, 0, 1, 2, 2))
            return team, draw.pick(PROBLEMS[team]), level, draw.pick(URGENCY[level])

        self.team, problem, self.level, cue = draw.fresh("ticket", parts)
        problem = problem.format(thing=draw.pick(THINGS), colour=draw.pick(COLOURS))
        self.mood, lines = draw.pick(list(MOODS.items()))
        sentences = [problem, cue] if draw.chance(0.8) else [cue, problem]
        self.has_mood = draw.chance(0.4 if draw.held else 0.6)
        if self.has_mood:
            sentences.append(draw.pick(lines))
        self.text = " ".join(sentences)

    def state(self, draw: Draw) -> str:
        """The ticket as people and programs write it."""
        form = draw.int(0, 5)
        if form == 0:
            return f"Ticket: {self.text}"
        if form == 1:
            return json.dumps({draw.pick(("ticket", "text", "message")): self.text}, ensure_ascii=False)
        if form == 2:
            return json.dumps({"from": name(draw), "text": self.text}, ensure_ascii=False)
        return self.text


def options(draw: Draw, labels: list[str], about: dict[str, list[str]] | None) -> str:
    """One line per option, with or without its description."""
    form, described = draw.pick(("- {}", "{}", "{}", "* {}")), about is not None and draw.chance(0.6)
    lines = []
    for label in labels:
        text = f"{label}: {draw.pick(about[label])}" if described and about else label
        lines.append(form.format(text))
    return "\n".join(lines)


def behind(state: str, text: str, gap: str = "\n\n") -> str:
    return f"{state}{gap}{text}" if state else text


def yes_no(draw: Draw, state: str, question: str, truth: bool, why: str) -> Turn:
    form = draw.int(0, 5)
    if form <= 2:
        user = behind(state, f"{question}\n{YES_NO}")
    elif form == 3:
        user = behind(state, f"{question} {YES_NO}")
    elif form == 4:
        user = behind(state, f"{question} {YES_NO}", " ")
    else:
        mark = draw.pick(("- {}: {}", "{}: {}"))
        lines = [mark.format(word, text) for word, text in (("yes", "it is so"), ("no", "it is not so"))]
        user = "\n".join([behind(state, question), *lines, YES_NO])
    answer = "yes" if truth else "no"
    return Turn(user, answer, f"{why} So {answer}.", check=exact(answer))


About = dict[str, list[str]] | None


def choice(draw: Draw, state: str, question: str, labels: list[str], answer: str, about: About) -> Turn:
    labels = draw.some(labels, len(labels))
    if draw.chance(0.2):
        asked = f"{question} {', '.join(labels[:-1])} or {labels[-1]}?"
        user = behind(state, asked) if draw.chance(0.5) else behind(state, asked, " ")
    else:
        user = behind(state, f"{question}\n{options(draw, labels, about)}")
        if draw.chance(0.3):
            user += draw.pick(("\nAnswer with the label.", "\nAnswer with one label.", "\nAnswer with one of them."))
    return Turn(user, answer, f"It is {answer}.", check=exact(answer))


def score(draw: Draw, ticket: Ticket, state: str) -> Turn:
    form = draw.pick(("{}: {}", "{}. {}", "{} {}", "- {}: {}", "{} = {}"))
    lines = [form.format(i, text) for i, text in enumerate(draw.pick(LEVELS), 1)]
    user = "\n".join([behind(state, draw.pick(ASK_LEVEL)), *lines, "Answer with the number."])
    answer = str(ticket.level + 1)
    return Turn(user, answer, f"The level is {answer}.", check=exact(answer))


def interview(draw: Draw) -> list[Turn]:
    """A ticket asked about or summed up, then several questions that do not repeat it: much to learn from one text."""
    ticket = Ticket(draw)
    more = [ask(draw, ticket, "") for _ in range(draw.int(2, 4))]
    if draw.chance(0.7):
        return [ask(draw, ticket, ticket.state(draw)), *more]
    summed = f"It is for {ticket.team}. The level is {ticket.level + 1}."
    if ticket.has_mood:
        summed += f" The customer is {ticket.mood}."
    first = Turn(f"{ticket.state(draw)}\n\nSum up this ticket.", summed, "I sum up.")
    return [first, *more]


def inbox(draw: Draw) -> list[Turn]:
    """Short lines of several tickets, each of them to be named: its team, its urgency or its mood."""
    lines, names = [], []
    for i in range(1, draw.int(3, 7)):
        kind = draw.int(0, 4)
        if kind <= 2:
            team = draw.pick(list(PROBLEMS))
            line, named = draw.pick(PROBLEMS[team]).format(thing=draw.pick(THINGS), colour=draw.pick(COLOURS)), team
        elif kind == 3:
            level = draw.int(0, 2)
            line, named = draw.pick(URGENCY[level]), f"level {level + 1}"
        else:
            named, moods = draw.pick(list(MOODS.items()))
            line = draw.pick(moods)
        lines.append(f"{i}. {line}")
        names.append(f"{i}. {named}")
    asked = "\n".join([*lines, "Sort these lines."])
    return [Turn(asked, "\n".join(names), "I go through the lines.")]


def about_ticket(draw: Draw) -> Turn:
    ticket = Ticket(draw)
    return ask(draw, ticket, ticket.state(draw))


PRACTISED = (
    0,
    1,
    2,
    4,
    5,
    6,
    7,
    7,
    7,
    8,
    8,
    9,
    9,
    9,
    9,
    10,
    11,
)  # the kinds below in training: the rare ones more often


def ask(draw: Draw, ticket: Ticket, state: str) -> Turn:
    """One of the questions that a ticket answers."""
    kind = draw.int(0, 11) if draw.held else draw.pick(PRACTISED)
    if kind <= 3:
        why = ("It can wait.", "It has some days.", "It needs help now.")[ticket.level]
        return yes_no(draw, state, draw.pick(ASK_URGENT), ticket.level == 2, why)
    if kind <= 6:
        others = [team for team in PROBLEMS if team != ticket.team]
        labels = [ticket.team, *draw.some(others, draw.int(1, 4))]
        return choice(draw, state, draw.pick(ASK_TEAM), labels, ticket.team, ABOUT)
    if kind == 7:
        team = ticket.team if draw.chance(0.5) else draw.pick(list(PROBLEMS))
        return yes_no(draw, state, draw.pick(ASK_ABOUT).format(team), team == ticket.team, f"It is for {ticket.team}.")
    if kind == 8 and ticket.level != 1:
        answer = "urgent" if ticket.level else "not urgent"
        question = draw.pick(("Is it urgent or not?", "Urgent or not?", "How urgent is it?"))
        return choice(draw, state, question, ["urgent", "not urgent"], answer, None)
    if kind == 9 and ticket.has_mood:
        if draw.chance(0.5):
            why = f"The customer is {ticket.mood}."
            return yes_no(draw, state, draw.pick(ASK_ANGRY), ticket.mood == "angry", why)
        return choice(draw, state, draw.pick(ASK_MOOD), ["calm", "angry"], ticket.mood, None)
    return score(draw, ticket, state)


SIZES = ("big", "small", "old", "new")


Scene = tuple[str, str, str, str]  # two things and what each of them is like


def scene(draw: Draw) -> Scene:
    def parts() -> Scene:
        a, b = draw.some((*THINGS, *ANIMALS), 2)
        x, y = draw.some(COLOURS, 2) if draw.chance(0.6) else draw.some(SIZES, 2)
        return a, b, x, y

    return draw.fresh("scene", parts)


def described(scene: Scene) -> str:
    a, b, x, y = scene
    return f"The {a} is {x}. The {b} is {y}."


def ask_scene(draw: Draw, scene: Scene, state: str) -> Turn:
    """A question on one of the two things."""
    a, b, x, y = scene
    asked, truth = draw.pick(((a, x), (b, y)))
    if draw.chance(0.5):
        said = truth if draw.chance(0.5) else draw.pick((x, y))
        return yes_no(draw, state, f"Is the {asked} {said}?", said == truth, f"The {asked} is {truth}.")
    question = (
        draw.pick(("What colour is the {}?", "Which colour has the {}?")) if truth in COLOURS else "How is the {}?"
    )
    return choice(draw, state, question.format(asked), [x, y], truth, None)


def about_scene(draw: Draw) -> list[Turn]:
    """One question; in training more of them, without the scene again."""
    seen = scene(draw)
    first = ask_scene(draw, seen, described(seen))
    return [first] if draw.held else [first, *(ask_scene(draw, seen, "") for _ in range(draw.int(1, 3)))]


def closed(draw: Draw) -> list[Turn]:
    return about_scene(draw) if draw.chance(0.18 if draw.held else 0.4) else [about_ticket(draw)]
