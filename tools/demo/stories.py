"""A story of about 200 tokens on an animal with a name."""

from __future__ import annotations

from tools.demo.draw import Draw, Turn
from tools.demo.phrases import texts
from tools.demo.words import ANIMALS, name

ASK, ASK_ANIMAL = texts("ask_story"), texts("ask_story_animal")
PLACES, FRIENDS, LOST = texts("story_places"), texts("story_friends"), texts("story_lost")
WHERE, WEATHER = texts("story_where"), texts("story_weather")
MIDDLE = (
    "They were hungry, so they shared some bread.",
    "They were tired, so they rested for a while.",
    "They sang a song, so the way was short.",
)
NIGHT = ("The moon was bright.", "The stars were out.", "The night was quiet.")


def story(draw: Draw) -> list[Turn]:
    animal, who = draw.fresh("story", lambda: (draw.pick(ANIMALS), name(draw)))
    asked = draw.pick(ASK) if draw.held or draw.chance(0.8) else draw.pick(ASK_ANIMAL)
    user = asked.format(a=animal, n=who)
    text = tell(draw, animal, who)
    check = {"type": "story", "name": who, "animal": animal, "words": 120}
    thought = f"A story about the {animal} {who}." if "{n}" in asked else "The user wants a story."
    return [Turn(user, text, thought, check=check)]


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
            draw.pick(MIDDLE),
            f"Then {n} had an idea and looked {where}. There it was: the {thing}!",
            f'The {met} was so happy that it danced. "Thank you, {n}," it said, "you are a good friend."',
            f"In the evening {n} the {animal} went home. {draw.pick(NIGHT)}",
            f"From that day on {n} and the {met} were friends, and they met every morning in {place}. The end.",
        )
    )
