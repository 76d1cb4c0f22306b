"""A request's messages and tools as the chat template takes them, its pictures apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mimo_vk.errors import ImageError
from mimo_vk.image_data import picture_of
from mimo_vk.pictures import image_part
from mimo_vk.server.errors import bad_request
from mimo_vk.server.schemas import AssistantMessage, ImagePart, TextPart, ToolMessage


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Checked messages as plain ones: developer is system, texts are joined, results stand in their calls' order.

    A message with pictures keeps its parts, each picture as ``image_part``. ApiError 400 for a result that answers no
    call, and for a picture that isn't a data: URI.
    """
    out: list[dict[str, Any]] = []
    calls: dict[str, int] = {}  # of the last assistant turn: their places by their ids
    results: dict[int, dict[str, Any]] = {}
    for i, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            place = _place(message, calls, f"messages[{i}].tool_call_id")
            if place in results:
                raise bad_request(f"messages[{i}].tool_call_id", "this call has a result already")
            results[place] = _plain(message, f"messages[{i}]")
            continue
        out += _in_order(results)
        results = {}
        made = (message.tool_calls or ()) if isinstance(message, AssistantMessage) else ()
        calls = {call.id: place for place, call in reversed(list(enumerate(made)))}  # of two of one id the first
        out.append(_plain(message, f"messages[{i}]"))
    return out + _in_order(results)


def plain_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Declarations as the client wrote them, less what is null."""

    def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
        return {key: item for key, item in value.items() if item is not None}

    return [{**without_nulls(tool), "function": without_nulls(tool["function"])} for tool in tools]


def _place(message: ToolMessage, calls: dict[str, int], where: str) -> int:
    """Which of the calls a result answers: the template tells them apart by their order alone."""
    if message.tool_call_id not in calls:
        raise bad_request(where, "no call of the assistant's message before it has this id")
    return calls[message.tool_call_id]


def _in_order(results: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [results[place] for place in sorted(results)]


def _plain(message: Any, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message.content, where)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.reasoning_content:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()}
                for call in message.tool_calls
            ]
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _content(content: str | list[TextPart | ImagePart] | None, where: str) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        return content or ""
    if any(isinstance(part, ImagePart) for part in content):
        return [_part(part, url_place(where, i)) for i, part in enumerate(content)]
    return "".join(part.text for part in content if isinstance(part, TextPart))


def url_place(message: str, part: int) -> str:
    """The field that holds a picture."""
    return f"{message}.content[{part}].image_url.url"


def _part(part: TextPart | ImagePart, where: str) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    try:
        return {**image_part(picture_of(part.image_url.url)), "where": where}
    except ImageError as error:
        raise bad_request(where, str(error)) from None
