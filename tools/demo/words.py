"""The lists that conversations draw from."""

from __future__ import annotations

from tools.demo.draw import Draw, reserved

NAMES = (
    "Anna Marco Lucia Peter Sofia Tom Giulia Paul Emma Luca Clara David Nora Hugo Laura Simon Elena Victor Alice Bruno Carla Felix Greta Henry Irene Jack "
    "Karen Leo Maria Nico Olga Oscar Paola Rita Sam Teresa Ugo Vera Walter Yara Zoe Ada Ben Chiara Dario Eva Franco Gina Ivan Julia Kim Lara Max Nina Omar "
    "Piero Rosa Sara Tina Viola Will Adam Bianca Carlo Diana Enzo Fiona Giorgio Helen Igor John Kate Lena Mario Nadia Otto Petra Rocco Silvia Theo Una Valentina "
    "Alberto Beatrice Claudio Dora Edgar Flora Guido Hannah Isabel Jonas Kurt Linda Mattia Noah Olivia Pietro Robin Stefan Thomas Ursula Vincent Wendy"
).split()
SYLLABLES = "ba be bo da de di do fa fi ga go ka ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re ri ro sa se si so ta te ti to va ve vi za zo".split()
WORDS = (
    "apple river stone cloud green yellow house window garden summer winter paper bread water fire light dark small large quick slow happy quiet loud "
    "door table chair lamp book letter road bridge city forest field mountain ocean island ship train bus boat horse bird fish cat dog fox bear wolf rabbit "
    "red blue white black warm cold soft hard sweet salt milk tea coffee sugar rice soup cheese egg lemon orange cherry grape music song dance story dream "
    "night morning evening today hand foot head eye heart friend child king queen baker farmer doctor teacher clock key box bag hat coat shoe ring glass plate spoon"
).split()
CITIES = (
    "Rome Paris London Berlin Madrid Milan Turin Naples Venice Florence Vienna Oslo Lisbon Athens Dublin Prague Zurich Geneva Munich Hamburg Boston Chicago "
    "Seattle Denver Tokyo Osaka Lima Cairo Delhi Mumbai Sydney Toronto Genoa Bologna Verona Pisa Palermo Bari Trieste Lyon Nice Porto Seville Krakow"
).split()
COLOURS = "red blue green yellow white black brown grey purple pink orange".split()
ANIMALS = "fox cat dog bear rabbit mouse owl horse wolf frog duck hedgehog squirrel turtle goat otter badger crow".split()
THINGS = (
    "lamp laptop printer phone camera keyboard screen bicycle kettle radio watch chair heater fan router speaker toaster tablet drill mixer"
).split()


def invented(draw: Draw, low: int = 2, high: int = 3) -> str:
    return "".join(draw.pick(SYLLABLES) for _ in range(draw.int(low, high)))


def name(draw: Draw) -> str:
    """A person's name: mostly from the list, sometimes made of syllables, so that copying is learnt letter by letter."""
    return draw.fresh("name", lambda: invented(draw).capitalize() if draw.chance(0.4) else draw.pick(NAMES))


def city(draw: Draw) -> str:
    return draw.fresh("city", lambda: invented(draw).capitalize() if draw.chance(0.3) else draw.pick(CITIES))


def phrase(draw: Draw, low: int, high: int, kind: str = "phrase") -> list[str]:
    """Distinct words, a combination on the right side of the reserve (single words are never reserved)."""

    def make() -> tuple[str, ...]:
        return tuple(draw.some(WORDS, draw.int(low, high)))

    while True:
        words = make()
        if len(words) == 1 and not draw.held or len(words) > 1 and reserved(kind, words) == draw.held:
            return list(words)
