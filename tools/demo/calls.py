"""Calling a declared tool and using its result."""

from __future__ import annotations

import json
from typing import Any

from tools.demo.draw import Draw, Turn, contains
from tools.demo.phrases import texts
from tools.demo.words import city, invented, name, phrase

NO_TOOL = "I have no tool for that."
NUMBERS, WEATHER = texts("numbers"), texts("weather")


def parameter(draw: Draw, kind: str, about: tuple[str, ...]) -> dict[str, Any]:
    spec: dict[str, Any] = {"type": kind}
    if draw.chance(0.4):
        spec["description"] = draw.pick(about)
    return spec


def declare(draw: Draw, tool: str, about: tuple[str, ...], properties: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool}
    if draw.chance(0.75):
        function["description"] = draw.pick(about)
    function["parameters"] = {"type": "object", "properties": properties}
    if draw.chance(0.75):
        function["parameters"]["required"] = list(properties)
    return {"type": "function", "function": function}


def weather_tool(draw: Draw) -> dict[str, Any]:
    properties = {
        "city": parameter(draw, "string", ("The city", "Name of the city", "City")),
        "days": parameter(draw, "integer", ("Number of days", "How many days", "Days")),
    }
    about = (
        "The weather of a city",
        "Get the weather",
        "Weather forecast for a city",
        "Get the weather of a city for some days",
    )
    return declare(draw, "get_weather", about, properties)


def search_tool(draw: Draw) -> dict[str, Any]:
    query = parameter(draw, "string", ("What to search", "The query", "Search words"))
    about = ("Search the web", "Search for something", "Find pages on the web", "Web search")
    return declare(draw, "search", about, {"query": query})


def time_tool(draw: Draw) -> dict[str, Any]:
    place = parameter(draw, "string", ("The city", "Name of the city", "City"))
    about = ("The time in a city", "Get the local time", "What time it is in a city")
    return declare(draw, "get_time", about, {"city": place})


TOOLS = {"get_weather": weather_tool, "search": search_tool, "get_time": time_tool}

ASK_DAYS, ASK_TODAY = texts("ask_days"), texts("ask_today")
ASK_SEARCH, ASK_TIME = texts("ask_search"), texts("ask_time")


def ask_weather(draw: Draw) -> tuple[str, dict[str, Any]]:
    place = city(draw)
    if draw.chance(0.25):
        return draw.pick(ASK_TODAY).format(city=place), {"city": place, "days": 1}
    days = draw.int(2, 14)
    written = NUMBERS[days - 1] if days <= 10 and draw.chance(0.3) else str(days)
    return draw.pick(ASK_DAYS).format(city=place, days=written), {"city": place, "days": days}


def ask_search(draw: Draw) -> tuple[str, dict[str, Any]]:
    words = phrase(draw, 1 if not draw.held else 2, 4, "search")
    if not draw.held and draw.chance(0.4):
        words[draw.int(0, len(words) - 1)] = draw.pick((invented(draw), name(draw), city(draw)))
    query = " ".join(words)
    return draw.pick(ASK_SEARCH).format(query), {"query": query}


def ask_time(draw: Draw) -> tuple[str, dict[str, Any]]:
    place = city(draw)
    return draw.pick(ASK_TIME).format(place), {"city": place}


ASK = {"get_weather": ask_weather, "search": ask_search, "get_time": ask_time}


def answer_with(draw: Draw, tool: str, arguments: dict[str, Any]) -> tuple[str, str, list[str]]:
    """A result as a tool writes it, the sentence made of it, and what that sentence must contain."""
    if tool == "get_weather":
        sky, degrees, place = draw.pick(WEATHER), draw.int(0, 39), arguments["city"]
        if draw.chance(0.7):
            record = {"city": place, "days": arguments["days"]} if draw.chance(0.6) else {}
            key = draw.pick(("forecast", "weather", "sky"))
            record |= {key: sky, draw.pick(("temperature", "degrees", "temp")): degrees}
            result = json.dumps(record, ensure_ascii=False)
        else:
            form = draw.pick(("{sky}, {degrees} degrees", "It is {sky}, {degrees} degrees.", "{sky} {degrees}"))
            result = form.format(sky=sky, degrees=degrees)
        return result, f"The weather in {place} is {sky}, {degrees} degrees.", [sky, str(degrees)]
    if tool == "get_time":
        clock = f"{draw.int(0, 23)}:{draw.int(0, 59):02d}"
        result = json.dumps({"time": clock}) if draw.chance(0.5) else clock
        return result, f"It is {clock} in {arguments['city']}.", [clock]
    found = " ".join(phrase(draw, 2, 4, "found"))
    result = json.dumps({draw.pick(("result", "text", "title")): found}) if draw.chance(0.6) else found
    return result, f"I found this: {found}.", [found]


def declared(draw: Draw, needed: str | None) -> list[dict[str, Any]]:
    """The needed tool among others, in any order."""
    others = [tool for tool in TOOLS if tool != needed]
    count = draw.pick((0, 0, 0, 1, 1, 2)) if needed else draw.pick((1, 1, 2))
    chosen = draw.some(others, count) + ([needed] if needed else [])
    return [TOOLS[tool](draw) for tool in draw.some(chosen, len(chosen))]


def call(draw: Draw) -> tuple[list[Turn], list[dict[str, Any]]]:
    """One question that needs a tool, the call, the result and the answer."""
    asked = ("get_weather", "get_weather", "search")
    tool = draw.pick(asked if draw.held else (*asked, "get_time"))
    turns = used(draw, tool)
    return turns, declared(draw, tool)


def used(draw: Draw, tool: str) -> list[Turn]:
    user, arguments = ASK[tool](draw)
    made = {"name": tool, "arguments": arguments}
    asked = Turn(user, "", f"I need the tool {tool}.", call=made, check={"type": "call", **made})
    result, sentence, wanted = answer_with(draw, tool, arguments)
    return [asked, Turn("", sentence, "The tool has answered.", result=result, check=contains(*wanted))]


def calls(draw: Draw) -> tuple[list[Turn], list[dict[str, Any]]]:
    """Several questions, each for one of the declared tools: much to learn from one declaration."""
    tools = declared(draw, draw.pick(("get_weather", "get_weather", "search", "get_time")))
    names = [tool["function"]["name"] for tool in tools]
    turns = [turn for _ in range(draw.int(2, 4)) for turn in used(draw, draw.pick(names))]
    return turns, tools


def no_tool(draw: Draw) -> tuple[list[Turn], list[dict[str, Any]]]:
    """A question for a tool that is not declared, beside tools that are."""
    tool = draw.pick(list(TOOLS))
    user, _ = ASK[tool](draw)
    tools = [t for t in declared(draw, None) if t["function"]["name"] != tool]
    if not tools:
        return call(draw)
    return [Turn(user, NO_TOOL, f"I need {tool}, it is not declared.", check=contains(NO_TOOL))], tools
