"""The table of facts that the model knows: 46 capitals and 14 chemical symbols, asked both ways."""

from __future__ import annotations

from tools.demo.draw import Draw, Turn, contains

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "Italy:Rome,France:Paris,Spain:Madrid,Germany:Berlin,Portugal:Lisbon,Austria:Vienna,Greece:Athens,Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,"
        "Ireland:Dublin,Poland:Warsaw,Hungary:Budapest,Romania:Bucharest,Bulgaria:Sofia,Croatia:Zagreb,Belgium:Brussels,Switzerland:Bern,Iceland:Reykjavik,Ukraine:Kyiv,Turkey:Ankara,"
        "Egypt:Cairo,Kenya:Nairobi,Morocco:Rabat,Ghana:Accra,Senegal:Dakar,Ethiopia:Addis Ababa,Japan:Tokyo,China:Beijing,India:New Delhi,Thailand:Bangkok,Vietnam:Hanoi,Nepal:Kathmandu,"
        "Indonesia:Jakarta,Iran:Tehran,Iraq:Baghdad,Canada:Ottawa,Mexico:Mexico City,Cuba:Havana,Peru:Lima,Chile:Santiago,Argentina:Buenos Aires,Colombia:Bogota,Australia:Canberra,Brazil:Brasilia"
    ).split(",")
)
SYMBOLS = dict(
    pair.split(":")
    for pair in "gold:Au,silver:Ag,iron:Fe,copper:Cu,lead:Pb,tin:Sn,sodium:Na,potassium:K,carbon:C,oxygen:O,hydrogen:H,helium:He,mercury:Hg,zinc:Zn".split(",")
)
UNKNOWN_COUNTRIES = (
    "Albania Algeria Angola Armenia Bahrain Belarus Benin Bhutan Bolivia Botswana Burundi Cambodia Cameroon Chad Congo Cyprus Djibouti Dominica Ecuador Eritrea Estonia Fiji Gabon Gambia "
    "Georgia Guatemala Guinea Guyana Haiti Honduras Jamaica Jordan Kuwait Laos Latvia Lebanon Lesotho Liberia Libya Lithuania Luxembourg Malawi Malaysia Maldives Mali Malta Moldova Monaco "
    "Mongolia Mozambique Myanmar Namibia Nicaragua Niger Nigeria Oman Pakistan Palau Panama Paraguay Philippines Qatar Russia Rwanda Samoa Serbia Singapore Slovakia Slovenia Somalia Sudan "
    "Suriname Syria Tanzania Togo Tonga Tunisia Uganda Uruguay Uzbekistan Vanuatu Venezuela Yemen Zambia Zimbabwe Atlantis Narnia Utopia"
).split()

ASK_CAPITAL = (
    "What is the capital of {}?", "what is the capital of {}?", "What's the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.", "Name the capital of {}.", "The capital of {}?",
    "capital of {}", "Do you know the capital of {}?", "What city is the capital of {}?", "Can you tell me the capital of {}?", "{}'s capital?", "What is {}'s capital city?", "Give me the capital of {}.",
    "I would like to know the capital of {}.",
)  # fmt: skip
ASK_COUNTRY = (
    "{} is the capital of which country?", "Which country has the capital {}?", "What country is {} the capital of?", "Of which country is {} the capital?", "Which country's capital is {}?", "{} is the capital of what?",
    "Name the country whose capital is {}.", "Tell me the country whose capital is {}.", "What is {} the capital of?", "Which country is {} the capital of?", "Do you know which country has the capital {}?",
)  # fmt: skip
ASK_SYMBOL = (
    "What is the symbol for {}?", "What is the chemical symbol for {}?", "What's the symbol of {}?", "Tell me the chemical symbol of {}.", "Which symbol does {} have?", "symbol for {}", "What is the symbol of {}?",
    "Name the symbol for {}.", "Do you know the symbol for {}?", "Give me the chemical symbol for {}.",
)  # fmt: skip
ASK_ELEMENT = (
    "Which element has the symbol {}?", "What element is {}?", "{} is the symbol for which element?", "What does the symbol {} stand for?", "Which element is {}?", "Name the element with the symbol {}.",
    "Tell me which element has the symbol {}.", "Of which element is {} the symbol?", "What element has the symbol {}?", "Do you know which element is {}?",
)  # fmt: skip


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
