"""The table of facts that the model knows: 46 capitals and 14 chemical symbols, asked both ways."""

from __future__ import annotations

from tools.demo.draw import Draw, Turn, contains
from tools.demo.phrases import table, texts

CAPITALS, SYMBOLS = table("capitals"), table("symbols")
UNKNOWN_COUNTRIES = texts("unknown_countries")
ASK_CAPITAL, ASK_COUNTRY = texts("ask_capital"), texts("ask_country")
ASK_SYMBOL, ASK_ELEMENT = texts("ask_symbol"), texts("ask_element")


def facts(draw: Draw) -> list[Turn]:
    user, answer, wanted = draw.fresh("fact", lambda: _fact(draw))
    return [Turn(user, answer, f"This is in my table: {wanted}.", check=contains(wanted))]


def _fact(draw: Draw) -> tuple[str, str, str]:
    backward = draw.chance(0.5)
    if draw.chance(0.77):
        country, city = draw.pick(list(CAPITALS.items()))
        if backward:
            return draw.pick(ASK_COUNTRY).format(city), f"{city} is the capital of {country}.", country
        return draw.pick(ASK_CAPITAL).format(country), f"The capital of {country} is {city}.", city
    element, symbol = draw.pick(list(SYMBOLS.items()))
    if backward:
        return draw.pick(ASK_ELEMENT).format(symbol), f"{symbol} is the symbol for {element}.", element
    return draw.pick(ASK_SYMBOL).format(element), f"The symbol for {element} is {symbol}.", symbol
