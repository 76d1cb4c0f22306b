"""A story of about 200 tokens on an animal with a name."""

from __future__ import annotations

from tools.demo.draw import Draw, Turn
from tools.demo.words import ANIMALS, name

ASK = (
    "Tell me a story about a {a} named {n}.", "Tell me a story about a {a} called {n}.", "Write a story about a {a} named {n}.", "A story about {n} the {a}, please.", "Tell a story about the {a} {n}.", "I want a story about a {a} called {n}.",
    "Can you tell me a story about a {a} named {n}?", "Please write a story about {n} the {a}.", "story about a {a} named {n}",
)  # fmt: skip
ASK_ANIMAL = ("Tell me a story about a {a}.", "Write a story about a {a}.", "A story about a {a}, please.", "Tell me a story about an animal.", "Tell me a story.", "Raccontami una storia.")
PLACES = ("a quiet forest", "a small village", "a green valley", "an old garden", "a house by the sea", "a wide field")
FRIENDS = ("an old owl", "a young mouse", "a tired horse", "a small bird", "a funny frog", "a wise turtle")
LOST = ("a golden key", "a red ball", "a silver bell", "a blue hat", "a warm coat", "a little box")
WHERE = ("under a big stone", "behind the old mill", "near the river", "on top of the hill", "inside a hollow tree", "by the wooden bridge")
WEATHER = ("The sun was warm and the sky was blue.", "It was raining and the wind was cold.", "Snow lay on the ground and all was white.", "It was a fine spring morning.")


def story(draw: Draw) -> list[Turn]:
    animal, who = draw.fresh("story", lambda: (draw.pick(ANIMALS), name(draw)))
    asked = draw.pick(ASK) if draw.held or draw.chance(0.8) else draw.pick(ASK_ANIMAL)
    user = asked.format(a=animal, n=who)
    text = tell(draw, animal, who)
    check = {"type": "story", "name": who, "animal": animal, "words": 120}
    return [Turn(user, text, f"A story about the {animal} {who}." if "{n}" in asked else "The user wants a story.", check=check)]


def tell(draw: Draw, animal: str, n: str) -> str:
    place, friend, lost, where = draw.pick(PLACES), draw.pick(FRIENDS), draw.pick(LOST), draw.pick(WHERE)
    met = friend.split(" ", 1)[1]
    thing = lost.split(" ", 1)[1]
    return " ".join(
        (
            f"Once upon a time there was a {animal} named {n}. {n} lived in {place} and loved to walk in the morning.",
            f"One day {n} went out very early. {draw.pick(WEATHER)}",
            f"On the way {n} met {friend}. The {met} was sad and sat down on the grass.",
            f'"Why are you sad?" asked {n}. "I have lost {lost}," said the {met}, "and I cannot find it."',
            f'"I will help you," said {n}, "because two can look better than one."',
            f"They looked in the grass and they looked in the water, but the {thing} was not there.",
            f"{draw.pick(('They were hungry, so they shared some bread.', 'They were tired, so they rested for a while.', 'They sang a song, so the way was short.'))}",
            f"Then {n} had an idea and looked {where}. There it was: the {thing}!",
            f"The {met} was so happy that it danced. \"Thank you, {n},\" it said, \"you are a good friend.\"",
            f"In the evening {n} the {animal} went home. {draw.pick(('The moon was bright.', 'The stars were out.', 'The night was quiet.'))}",
            f"From that day on {n} and the {met} were friends, and they met every morning in {place}. The end.",
        )
    )
