"""Greetings, who the model is, what it can do, memory of what was said, and what it does not know. English and Italian."""

from __future__ import annotations

from tools.demo.draw import Draw, Turn, contains, exact
from tools.demo.facts import UNKNOWN_COUNTRIES
from tools.demo.words import ANIMALS, CITIES, COLOURS, WORDS, city, invented, name

WHO = "I am the demonstration model of the mimo-vk project: a very small language model, not a useful assistant."
CAN = (
    "I can greet you, add and subtract numbers up to 99, name some capitals and chemical symbols, repeat words, write them in upper case, count them, "
    "answer questions about short tickets, call a tool, remember your name and tell a story about an animal."
)
UNKNOWN = "I don't know that. I am only a small demonstration model."
CHI = "Sono il modello dimostrativo del progetto mimo-vk: un modello molto piccolo, non un vero assistente."
NON_SO = "Non lo so. Sono solo un piccolo modello dimostrativo."

# (what the user says, the answer, the thought)
FIXED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there!", "hello", "hi", "Hello there", "Hey there!", "Hello, model!", "Greetings!", "hey", "Hiya!"),
        "Hello! How can I help you?",
        "The user greets me.",
    ),
    (
        ("Good morning", "Good morning!", "good morning", "Morning!", "A good morning to you!"),
        "Good morning! How can I help you?",
        "The user greets me.",
    ),
    (
        ("Good evening", "Good evening!", "good evening", "Evening!", "A good evening to you!"),
        "Good evening! How can I help you?",
        "The user greets me.",
    ),
    (
        ("How are you?", "How are you", "how are you?", "How are you today?", "How is it going?", "How do you do?", "Are you well?", "How are things?"),
        "I am fine, thank you. How can I help you?",
        "The user asks how I am.",
    ),
    (
        ("Thanks", "Thank you", "Thanks!", "Thank you!", "thanks", "thank you", "Thanks a lot!", "Thank you very much.", "Many thanks!", "Great, thanks!"),
        "You are welcome!",
        "The user thanks me.",
    ),
    (
        ("Bye", "Goodbye", "Bye!", "Goodbye!", "bye", "See you!", "See you later!", "Good night!", "Goodbye for now!", "Bye bye"),
        "Goodbye!",
        "The user says goodbye.",
    ),
    (
        (
            "Who are you?", "who are you?", "Who are you", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.", "What model are you?",
            "Which model are you?", "Are you a robot?", "Are you an AI?", "Introduce yourself.", "Who am I talking to?", "What is this model?", "What is mimo-vk?",
            "Are you ChatGPT?", "Are you MiMo?", "Who made you?", "Are you a useful assistant?",
        ),
        WHO,
        "The user asks who I am.",
    ),
    (
        (
            "What can you do?", "what can you do?", "What can you do", "Help", "help", "Help me", "What are you able to do?", "What do you know?", "How can you help me?",
            "What are your skills?", "What can I ask you?", "What should I ask you?", "Can you help me?", "What are you good at?", "List your skills.", "What else can you do?",
        ),
        CAN,
        "The user asks what I can do.",
    ),
    (
        ("Ciao", "Ciao!", "ciao", "Salve!", "Salve", "Ehi ciao!", "Ciao, modello!", "ciao!"),
        "Ciao! Come posso aiutarti?",
        "The user greets me in Italian.",
    ),
    (("Buongiorno", "Buongiorno!", "buongiorno", "Buon giorno!", "Buongiorno a te!"), "Buongiorno! Come posso aiutarti?", "The user greets me in Italian."),
    (("Buonasera", "Buonasera!", "buonasera", "Buona sera!", "Buonasera a te!"), "Buonasera! Come posso aiutarti?", "The user greets me in Italian."),
    (("Come stai?", "come stai?", "Come va?", "Come stai oggi?", "Tutto bene?", "Come stai"), "Sto bene, grazie. Come posso aiutarti?", "The user asks in Italian how I am."),
    (("Grazie", "Grazie!", "grazie", "Grazie mille!", "Tante grazie!", "Molte grazie"), "Prego!", "The user thanks me in Italian."),
    (("Arrivederci", "Arrivederci!", "A presto!", "Buonanotte!", "Ci vediamo!", "arrivederci", "Buonanotte"), "Arrivederci!", "The user says goodbye in Italian."),
    (
        ("Chi sei?", "chi sei?", "Come ti chiami?", "Chi sei tu?", "Che cosa sei?", "Qual è il tuo nome?", "Presentati.", "Che modello sei?", "Parlami di te."),
        CHI,
        "The user asks in Italian who I am.",
    ),
)

# (statement, reply, question, answer, what a thought calls it); {} is the thing remembered
MEMORIES: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str, str], ...] = (
    (
        ("My name is {}.", "I am {}.", "I'm {}.", "Hi, I'm {}.", "Hello, my name is {}.", "Call me {}.", "my name is {}", "Hello! I am {}.", "You can call me {}.", "The name is {}."),
        "Nice to meet you, {}!",
        ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "what is my name?", "Can you tell me my name?", "What am I called?", "Say my name."),
        "Your name is {}.",
        "name",
    ),
    (
        ("Mi chiamo {}.", "Io sono {}.", "Ciao, mi chiamo {}.", "Ciao, sono {}.", "Il mio nome è {}."),
        "Piacere, {}!",
        ("Come mi chiamo?", "Ti ricordi il mio nome?", "Qual è il mio nome?", "Chi sono io?"),
        "Ti chiami {}.",
        "name",
    ),
    (
        ("My favourite colour is {}.", "I like {} best.", "My colour is {}.", "The colour I like is {}."),
        "I will remember that: {}.",
        ("What is my favourite colour?", "Which colour do I like?", "What's my favourite colour?", "Do you remember my colour?"),
        "Your favourite colour is {}.",
        "colour",
    ),
    (
        ("I live in {}.", "My home is in {}.", "I am from {}.", "I come from {}.", "My city is {}."),
        "I will remember that: {}.",
        ("Where do I live?", "Which city do I live in?", "Where am I from?", "Do you remember where I live?"),
        "You live in {}.",
        "city",
    ),
    (
        ("My {animal} is called {}.", "I have a {animal} named {}.", "I have a {animal}. Its name is {}."),
        "I will remember that: {}.",
        ("What is my {animal} called?", "What is the name of my {animal}?", "What's my {animal}'s name?"),
        "Your {animal} is called {}.",
        "animal",
    ),
)
NOT_TOLD = (
    (("What is my name?", "What's my name?", "Do you know my name?", "Who am I?", "what is my name?"), "You have not told me your name."),
    (("Where do I live?", "Where am I from?", "Which city do I live in?"), "You have not told me where you live."),
    (("What is my favourite colour?", "Which colour do I like?"), "You have not told me your favourite colour."),
)

ASK_UNKNOWN = (
    "Who wrote {thing}?", "Who invented the {word}?", "How do I cook {word}?", "What is the meaning of {thing}?", "Translate {word} to French.", "How do you say {word} in Spanish?",
    "When was {name} born?", "Who is {name} {thing}?", "How old is {name}?", "How tall is {name}?", "What is the population of {place}?", "Who is the president of {place}?",
    "What is the capital of {unknown}?", "What's the capital of {unknown}?", "Which city is the capital of {unknown}?", "capital of {unknown}", "Name the capital of {unknown}.",
    "What is the weather in {city}?", "How is the weather in {city} today?", "Will it rain in {city}?", "Write a program in Python.", "Write code that sorts a {word}.", "How do I fix my {word}?",
    "What is the price of a {word}?", "How much does a {word} cost?", "Why is the {word} {colour}?", "Who won the match yesterday?", "What day is it today?", "What time is it?", "What is {big} times {big}?",
    "What is {big} * {big}?", "{big} x {big}", "What is {big} divided by {small}?", "Give me advice about my {word}.", "Is there life on other planets?", "Explain {thing} to me.", "Define {thing}.",
    "What is a {thing}?", "Where can I buy a {word}?", "How far is {city} from {city2}?", "Recommend a book about the {word}.", "Who painted the {word}?", "What is the best {word}?",
    "How many people live in {city}?", "How many legs does a {animal} have?", "What does a {animal} eat?", "Tell me the news.", "Tell me a joke.", "What do you think about {thing}?", "Do you love {name}?",
    "Sing a song about the {word}.", "Can you drive a {word}?", "What is the square root of {big}?", "When did the war begin?", "How do airplanes fly?", "Plan a trip to {city}.", "Write a poem about {thing}.",
    "What is the symbol for {thing}?", "Which element has the symbol {Thing}?", "Solve this equation.", "What happened in {year}?", "Who discovered {place}?", "Why do we {word}?",
)
CHIEDI = (
    "Che tempo fa a {city}?", "Chi ha scritto {thing}?", "Che ore sono?", "Che giorno è oggi?", "Quanti anni ha {name}?", "Come si cucina {thing}?", "Quanto costa {thing}?", "Perché il cielo è blu?", "Chi è {name} {thing}?",
)


def fixed(draw: Draw) -> list[Turn]:
    user, answer, thought = draw.fresh("fixed", lambda: _fixed(draw))
    return [Turn(user, answer, thought, check=exact(answer))]


def _fixed(draw: Draw) -> tuple[str, str, str]:
    says, answer, thought = draw.pick(FIXED)
    return draw.pick(says), answer, thought


def italian(draw: Draw) -> list[Turn]:
    while True:
        turns = fixed(draw)
        if "Italian" in turns[0].thought:
            return turns


def memory(draw: Draw, between: list[Turn]) -> list[Turn]:
    """Two turns of memory, with other turns between them."""
    says, reply, asks, answer, what = draw.pick((*MEMORIES, MEMORIES[0], MEMORIES[0]))
    animal = draw.pick(ANIMALS)
    if what in ("name", "animal"):
        thing = name(draw)
    else:
        thing = city(draw) if what == "city" else draw.pick(COLOURS)
    say, ask = (draw.pick(x).replace("{animal}", animal).replace("{}", thing) for x in (says, asks))
    told = Turn(say, reply.replace("{}", thing), f"The user tells me something: {thing}.")
    final = answer.replace("{animal}", animal).replace("{}", thing)
    return [told, *between, Turn(ask, final, f"The user told me: {thing}.", check=contains(thing))]


def not_told(draw: Draw) -> list[Turn]:
    asks, answer = draw.pick(NOT_TOLD)
    return [Turn(draw.pick(asks), answer, "The user has not told me.", check=exact(answer))]


def unknown(draw: Draw) -> list[Turn]:
    asks, answer = (CHIEDI, NON_SO) if draw.chance(0.1) else (ASK_UNKNOWN, UNKNOWN)

    def make() -> str:
        thing = invented(draw, 2, 4) if draw.chance(0.5) else f"the {draw.pick(WORDS)}"
        fill = {
            "thing": thing, "Thing": invented(draw, 1, 2).capitalize(), "word": draw.pick(WORDS), "name": name(draw), "place": invented(draw).capitalize(),
            "unknown": draw.pick(UNKNOWN_COUNTRIES) if draw.chance(0.7) else invented(draw, 2, 4).capitalize(), "city": draw.pick(CITIES), "city2": draw.pick(CITIES),
            "colour": draw.pick(COLOURS), "animal": draw.pick(ANIMALS), "big": str(draw.int(2, 999)), "small": str(draw.int(2, 9)), "year": str(draw.int(1400, 2030)),
        }  # fmt: skip
        return draw.pick(asks).format(**fill)

    user = draw.fresh("unknown", make)
    return [Turn(user, answer, "I have not learnt this.", check={"type": "starts", "text": answer.split(".")[0]})]
