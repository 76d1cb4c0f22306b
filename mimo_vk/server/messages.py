"""A request's messages and tools as the chat template takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mimo_vk.server.errors import bad_request
from mimo_vk.server.schemas import AssistantMessage, TextPart, ToolMessage


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Checked messages as plain ones: developer is system, parts are joined, results stand in their calls' order.

    ApiError 400 for a result that answers no call.
    """
    out: list[dict[str, Any]] = []
    calls: list[str] = []  # of the last assistant turn
    results: list[tuple[int, dict[str, Any]]] = []
    for i, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            place = _place(message, calls, f"messages[{i}].tool_call_id")
            if any(place == other for other, _ in results):
                raise bad_request(f"messages[{i}].tool_call_id", "this call has a result already")
            results.append((place, _plain(message)))
            continue
        out += _in_order(results)
        results = []
        calls = [call.id for call in message.tool_calls or ()] if isinstance(message, AssistantMessage) else []
        out.append(_plain(message))
    return out + _in_order(results)


def plain_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Declarations as the client wrote them, less what is null."""

    def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
        return {key: item for key, item in value.items() if item is not None}

    return [{**without_nulls(tool), "function": without_nulls(tool["function"])} for tool in tools]


def _place(message: ToolMessage, calls: list[str], where: str) -> int:
    """Which of the calls a result answers: the template tells them apart by their order alone."""
    if message.tool_call_id not in calls:
        raise bad_request(where, "no call of the assistant's message before it has this id")
    return calls.index(message.tool_call_id)


def _in_order(results: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [message for _, message in sorted(results, key=lambda result: result[0])]


def _plain(message: Any) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message.content)}
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


def _text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""
