"""The shipped model behind the HTTP API: what it says tells whether each part of a request reached it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mimo_vk.engine import shipped_model
from mimo_vk.pictures import data_uri
from tests.live_server import LiveServer, serving
from tools.demo.pictures import Picture, png

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(shipped_model(), "--ctx", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, content: Any, *before: Any, **more: Any) -> Any:
    messages = [*before, {"role": "user", "content": content}]
    return client.chat.completions.create(model="demo", messages=messages, temperature=0, **more)


def said(client: openai.OpenAI, content: Any, *before: Any, **more: Any) -> str:
    return ask(client, content, *before, **more).choices[0].message.content


def shown(picture: Picture, question: str) -> list[Any]:
    return [
        {"type": "image_url", "image_url": {"url": data_uri(png(picture))}},
        {"type": "text", "text": question},
    ]


def circle(red: int, green: int, blue: int) -> Picture:
    return {
        "size": [96, 96],
        "background": [255, 255, 255],
        "shapes": [["circle", [red, green, blue], 48, 48, 36, 0]],
    }


@pytest.mark.parametrize(("colour", "word"), [((220, 20, 30), "red"), ((30, 40, 220), "blue")])
def test_it_sees_the_picture_of_the_request(client, colour, word):
    """One question, two pictures one after the other: each answer is about its own."""
    assert said(client, shown(circle(*colour), "What colour is it?")) == word


def test_a_stream_says_what_an_answer_in_one_piece_says(client):
    question = "Tell me a story about a fox named Milo."
    whole = said(client, question, max_tokens=120)
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, question, max_tokens=120, stream=True)]
    assert "Milo" in whole and len(pieces) > 50
    assert "".join(pieces) == whole


def test_it_stops_before_a_stop_string(client):
    answer = ask(client, "Repeat: apple river stone cloud", stop=[" stone"]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("apple river", "stop")


def test_it_thinks_before_it_answers_when_asked_to(client):
    answer = ask(client, "What is 38 + 45?", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    message = answer.choices[0].message
    assert message.content == "83"
    assert "carry 1" in message.model_extra["reasoning_content"]


def test_it_calls_a_tool_and_uses_the_result(client):
    question = "What is the weather in Rome for the next 3 days?"
    first = ask(client, question, tools=[WEATHER]).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome", "days": 3})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"forecast": "sunny", "temperature": 21}'}
    messages: Any = [{"role": "user", "content": question}, first.message.model_dump(), result]
    second = client.chat.completions.create(model="demo", messages=messages, temperature=0, tools=[WEATHER])
    text = second.choices[0].message.content
    assert "sunny" in text and "21" in text


def test_it_remembers_an_earlier_turn(client):
    told = {"role": "user", "content": "My name is Paul."}
    reply = {"role": "assistant", "content": said(client, told["content"])}
    assert "Paul" in said(client, "What is my name?", told, reply)
    other = [told | {"content": "My name is Anna."}, reply | {"content": "Nice to meet you, Anna!"}]
    assert "Anna" in said(client, "What is my name?", *other)


def test_closed_questions_are_answered_with_probabilities(server):
    """Two tickets, the same questions: what is likely follows the ticket."""
    questions = {
        "urgent": {"type": "noul", "instructions": "Is this urgent?"},
        "team": {"type": "choice", "instructions": "Which team?", "criteria": {"billing": None, "technical": None}},
    }
    states = ("The printer shows an error. I need help right now!", "I was charged twice for the lamp. No rush.")
    replies = [server.post("/v1/systemone", state=state, questions=questions) for state in states]
    found = [reply.json()["answers"] for reply in replies]
    assert found[0]["urgent"]["noul"] > 0.5 > found[1]["urgent"]["noul"]
    assert [answers["team"]["choice"] for answers in found] == ["technical", "billing"]
