"""Closed questions on short tickets and descriptions: yes or no, a label, a number; in chat's words and in System One's form."""

from __future__ import annotations

import json

from tools.demo.draw import Draw, Turn, exact
from tools.demo.words import ANIMALS, COLOURS, THINGS, name

PROBLEMS: dict[str, tuple[str, ...]] = {
    "billing": (
        "I was charged twice for the {thing}.", "The invoice for my {thing} is wrong.", "I want my money back for the {thing}.", "My refund for the {thing} has not come.", "The price on the bill is too high.",
        "My card was charged but I have no {thing}.", "Please send me the invoice for the {thing}.", "I paid for the {thing} two times.", "The discount is missing on my bill.",
    ),
    "technical": (
        "The {thing} does not start.", "My {thing} is broken.", "The {thing} shows an error.", "The app crashes when I use the {thing}.", "The {thing} makes a strange noise.", "My {thing} stopped working.",
        "The {thing} gets too hot.", "The update of my {thing} fails.", "There is a bug in the {thing}.",
    ),
    "shipping": (
        "My {thing} has not arrived.", "The parcel with the {thing} is late.", "Where is my {thing}?", "The {thing} went to the wrong address.", "The box of the {thing} came empty.", "When will you deliver the {thing}?",
        "The parcel with my {thing} is lost.", "The tracking of my {thing} does not move.", "The courier left the {thing} in the rain.",
    ),
    "sales": (
        "I want to buy a new {thing}.", "Do you sell a bigger {thing}?", "How much is the {thing}?", "Can I get an offer for ten units of the {thing}?", "Which {thing} should I buy?", "Is the {thing} in stock?",
        "I would like to order a {thing}.", "Do you have the {thing} in {colour}?", "Please send me your price list.",
    ),
    "account": (
        "I forgot my password.", "I cannot log in.", "Please delete my account.", "How do I change my email address?", "My account is locked.", "The login page does not accept my password.",
        "I want to change my user name.", "Someone else uses my account.", "I never got the code to log in.",
    ),
}  # fmt: skip
ABOUT = {
    "billing": ("payments and invoices", "money, bills and refunds", "charges and refunds"),
    "technical": ("broken or faulty devices", "errors and defects", "things that do not work"),
    "shipping": ("parcels and delivery", "delivery of orders", "late or lost parcels"),
    "sales": ("new orders and offers", "people who want to buy", "prices and orders"),
    "account": ("login and passwords", "users and passwords", "access to the account"),
}
URGENCY = (
    (
        "There is no hurry.", "Answer when you have time.", "It can wait.", "This is not urgent.", "Take your time.", "No rush.", "Next month is fine.", "Just asking.", "Whenever you can.", "It is only a small thing.",
    ),
    (
        "Please answer this week.", "I hope to hear from you soon.", "A reply in a few days is fine.", "I need it next week.", "Please look at it in the coming days.", "Some time this week would be good.",
    ),
    (
        "I need help right now!", "This is urgent.", "Please help immediately!", "It cannot wait.", "All our work has stopped.", "We are losing money every minute.", "It is an emergency!", "Call me at once!", "I need it today.",
        "Everything is down and customers are waiting.",
    ),
)  # fmt: skip
MOODS = (
    ("calm", ("Thank you.", "Thanks for your help.", "Kind regards.", "You are always kind.", "I like your shop.")),
    ("angry", ("I am very angry!", "This is a disgrace!", "Your service is terrible!", "I am fed up with you!", "I will never buy here again!")),
)
LEVELS = (("can wait", "this week", "now"), ("low", "medium", "high"), ("not urgent", "soon", "urgent"), ("no hurry", "some days", "at once"))
ASK_URGENT = ("Is this urgent?", "Is the ticket urgent?", "Is this ticket urgent?", "Does this need an answer right now?", "Is it urgent?", "Must someone act at once?")
ASK_TEAM = ("Which team should answer?", "Which team?", "Which team is this for?", "Who should handle this ticket?", "Where does this ticket go?", "Choose the team.", "What is this about?")
ASK_LEVEL = ("How urgent is it?", "How urgent is this ticket?", "Rate the urgency.", "How soon must we answer?")
ASK_ANGRY = ("Is the customer angry?", "Is the writer angry?", "Does the customer sound angry?")
ASK_MOOD = ("What is the customer's mood?", "How does the customer feel?", "Which mood is it?")
ASK_ABOUT = ("Is this about {}?", "Is this a ticket for {}?", "Does this belong to {}?", "Should {} answer this?")
YES_NO = "Answer yes or no."


class Ticket:
    def __init__(self, draw: Draw) -> None:
        def parts() -> tuple[str, str, int, str]:
            team = draw.pick(list(PROBLEMS))
            level = draw.pick((0, 0, 1, 2, 2))
            return team, draw.pick(PROBLEMS[team]), level, draw.pick(URGENCY[level])

        self.team, problem, self.level, cue = draw.fresh("ticket", parts)
        problem = problem.format(thing=draw.pick(THINGS), colour=draw.pick(COLOURS))
        self.mood, lines = draw.pick(MOODS)
        sentences = [problem, cue] if draw.chance(0.8) else [cue, problem]
        self.has_mood = draw.chance(0.4)
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


def options(draw: Draw, labels: list[str], about: dict[str, tuple[str, ...]] | None) -> str:
    """One line per option, with or without its description."""
    form, described = draw.pick(("- {}", "{}", "{}", "* {}")), about is not None and draw.chance(0.6)
    lines = []
    for label in labels:
        text = f"{label}: {draw.pick(about[label])}" if described and about else label
        lines.append(form.format(text))
    return "\n".join(lines)


def yes_no(draw: Draw, state: str, question: str, truth: bool, why: str) -> Turn:
    form = draw.int(0, 5)
    if form <= 2:
        user = f"{state}\n\n{question}\n{YES_NO}"
    elif form == 3:
        user = f"{state}\n\n{question} {YES_NO}"
    elif form == 4:
        user = f"{state} {question} {YES_NO}"
    else:
        mark = draw.pick(("- {}: {}", "{}: {}"))
        lines = [mark.format(word, text) for word, text in (("yes", "it is so"), ("no", "it is not so"))]
        user = "\n".join([f"{state}\n\n{question}", *lines, YES_NO])
    answer = "yes" if truth else "no"
    return Turn(user, answer, f"{why} So {answer}.", check=exact(answer))


def choice(draw: Draw, state: str, question: str, labels: list[str], answer: str, about: dict[str, tuple[str, ...]] | None) -> Turn:
    labels = draw.some(labels, len(labels))
    if draw.chance(0.2):
        asked = f"{question} {', '.join(labels[:-1])} or {labels[-1]}?"
        user = f"{state}\n\n{asked}" if draw.chance(0.5) else f"{state} {asked}"
    else:
        user = f"{state}\n\n{question}\n{options(draw, labels, about)}"
        if draw.chance(0.3):
            user += draw.pick(("\nAnswer with the label.", "\nAnswer with one label.", "\nAnswer with one of them."))
    return Turn(user, answer, f"It is {answer}.", check=exact(answer))


def score(draw: Draw, ticket: Ticket, state: str) -> Turn:
    form = draw.pick(("{}: {}", "{}. {}", "{} {}", "- {}: {}", "{} = {}"))
    lines = [form.format(i, text) for i, text in enumerate(draw.pick(LEVELS), 1)]
    user = "\n".join([f"{state}\n\n{draw.pick(ASK_LEVEL)}", *lines, "Answer with the number."])
    answer = str(ticket.level + 1)
    return Turn(user, answer, f"The level is {answer}.", check=exact(answer))


def about_ticket(draw: Draw) -> Turn:
    ticket = Ticket(draw)
    state = ticket.state(draw)
    kind = draw.int(0, 11)
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
        return choice(draw, state, draw.pick(("Is it urgent or not?", "Urgent or not?", "How urgent is it?")), ["urgent", "not urgent"], answer, None)
    if kind == 9 and ticket.has_mood:
        if draw.chance(0.5):
            return yes_no(draw, state, draw.pick(ASK_ANGRY), ticket.mood == "angry", f"The customer is {ticket.mood}.")
        return choice(draw, state, draw.pick(ASK_MOOD), ["calm", "angry"], ticket.mood, None)
    return score(draw, ticket, state)


SIZES = ("big", "small", "old", "new")


def about_scene(draw: Draw) -> Turn:
    """Two things with their attributes; a question on one of them."""

    def parts() -> tuple[str, str, str, str]:
        a, b = draw.some((*THINGS, *ANIMALS), 2)
        x, y = draw.some(COLOURS, 2) if draw.chance(0.6) else draw.some(SIZES, 2)
        return a, b, x, y

    a, b, x, y = draw.fresh("scene", parts)
    state = f"The {a} is {x}. The {b} is {y}."
    asked, truth = draw.pick(((a, x), (b, y)))
    if draw.chance(0.5):
        said = truth if draw.chance(0.5) else draw.pick((x, y))
        return yes_no(draw, state, f"Is the {asked} {said}?", said == truth, f"The {asked} is {truth}.")
    question = draw.pick(("What colour is the {}?", "Which colour has the {}?")) if truth in COLOURS else "How is the {}?"
    return choice(draw, state, question.format(asked), [x, y], truth, None)


def closed(draw: Draw) -> list[Turn]:
    return [about_scene(draw) if draw.chance(0.18) else about_ticket(draw)]
