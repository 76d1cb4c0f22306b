"""``POST /v1/chat/completions``: messages to a prompt, and an answer's pieces to OpenAI's objects."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from mimo_vk.errors import ImageError, UsageError
from mimo_vk.pictures import NONE, Picture, Pictures, bare
from mimo_vk.server.body import parse_json, read_body
from mimo_vk.server.completion_text import Delta
from mimo_vk.server.errors import ApiError, bad_request
from mimo_vk.server.front import Front
from mimo_vk.server.generation import Begun, ChatJob, Choice, Ended
from mimo_vk.server.logprobs import TokenLogprob, chat_entry
from mimo_vk.server.messages import plain_messages, plain_tools
from mimo_vk.server.models import check_model
from mimo_vk.server.record import Record
from mimo_vk.server.responses import EventStream, Json, unless_gone
from mimo_vk.server.schemas import ChatRequest, NamedChoice, parse
from mimo_vk.server.worker import Task
from mimo_vk.stream import END_THINK, ToolCall

if TYPE_CHECKING:
    from mimo_vk.server.app import Context

RESERVED = ("messages", "tools", "add_generation_prompt", "enable_thinking")


@dataclass(frozen=True)
class Prepared:
    """A request that can run, with what its answer's memory needs."""

    job: ChatJob
    rendered: str


async def endpoint(context: Context, request: Request, record: Record) -> Response:
    """Check all of the request, queue it, and answer whole or as a stream."""
    body = await read_body(request)
    wanted, prepared = await asyncio.to_thread(check, context.front, body)  # a long text takes its time
    record.stream = bool(wanted.stream)
    record.asked(lambda: [message.model_dump(exclude_none=True) for message in wanted.messages])
    reply = Reply(context.front, prepared, record, wanted)
    task = context.worker.submit(prepared.job)
    if wanted.stream:
        return EventStream(task, lambda: reply.chunks(task), record, keep_alive=context.keep_alive)
    return Json(await unless_gone(request, reply.whole(task)))


def check(front: Front, data: bytes) -> tuple[ChatRequest, Prepared]:
    """A body as a request that can run. ApiError and UsageError name what is wrong with it."""
    body = parse_json(data)
    wanted: ChatRequest = parse(ChatRequest, body)
    check_model(front, wanted.model)
    return wanted, prepare(front, wanted, body)


def prepare(front: Front, wanted: ChatRequest, body: dict[str, Any]) -> Prepared:
    """The job of a request. ApiError and UsageError name what is wrong with it."""
    tools, names = tools_of(wanted, body)
    thinking, variables = template_variables(front, wanted)
    messages = plain_messages(wanted.messages)
    pictures = pictures_of(front, messages)
    messages, _ = bare(messages)
    front.check_length(sum(map(_characters, messages)), "messages")
    try:
        rendered = front.render(messages, tools, thinking, variables)
        ids, placed = prompt_ids(front, rendered, pictures)
    except UsageError as error:
        raise _named(error) from None
    limit = wanted.max_completion_tokens if wanted.max_completion_tokens is not None else wanted.max_tokens
    name = "max_tokens" if wanted.max_completion_tokens is None else "max_completion_tokens"
    choice = Choice(
        front.room(len(ids), limit, name, placed),
        front.temperature if wanted.temperature is None else wanted.temperature,
        front.top_p if wanted.top_p is None else wanted.top_p,
        front.seed if wanted.seed is None else wanted.seed,
        wanted.stops,
    )
    job = ChatJob(
        ids,
        choice,
        tools=tools,
        may_call=tools is not None,
        call_names=names,
        may_think=not rendered.endswith(END_THINK),
        single_call=wanted.parallel_tool_calls is False,
        top_logprobs=(wanted.top_logprobs or 0) if wanted.logprobs else None,
        pictures=placed,
    )
    return Prepared(job, rendered)


def pictures_of(front: Front, messages: Sequence[dict[str, Any]]) -> list[Picture]:
    """The messages' pictures with their sizes, from their headers. ApiError names the field that is at fault."""
    found = []
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] != "image":
                continue
            if front.picture_tools is None:
                raise bad_request(part["where"], front.no_pictures, "unsupported_content")
            try:
                found.append(front.picture_tools.picture(part["data"]))
            except ImageError as error:
                raise bad_request(part["where"], str(error)) from None
    return found


def prompt_ids(front: Front, rendered: str, pictures: list[Picture]) -> tuple[list[int], Pictures]:
    """A rendered prompt's ids, and where its pictures are. A prompt with a picture goes on from nothing."""
    if front.picture_tools is None or not pictures:
        return front.turns.prompt_ids(rendered), NONE
    return front.picture_tools.place(front.tokenizer.encode_rendered(rendered), pictures)


def _characters(message: dict[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def tools_of(wanted: ChatRequest, body: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """The declarations that the model is shown (None: none), and the names of which one must be called."""
    declared = [tool.function.name for tool in wanted.tools or ()]
    choice = wanted.tool_choice
    if choice in (None, "auto", "none"):
        return (plain_tools(body["tools"]) if declared and choice != "none" else None), ()
    if not declared:
        raise bad_request("tool_choice", "only allowed where tools are given")
    tools = plain_tools(body["tools"])
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in declared:
            raise bad_request("tool_choice.function.name", f"{name!r} is none of the tools")
        return tools, (name,)
    return tools, tuple(declared)


def template_variables(front: Front, wanted: ChatRequest) -> tuple[bool | None, dict[str, Any]]:
    """Whether to think (None: the template's default), and what else the template is given."""
    variables = dict(wanted.chat_template_kwargs or {})
    said: dict[str, bool] = {}
    given = variables.pop("enable_thinking", None)
    if given is not None:
        if not isinstance(given, bool):
            raise bad_request("chat_template_kwargs.enable_thinking", "expected true or false")
        said["chat_template_kwargs.enable_thinking"] = given
    if wanted.enable_thinking is not None:
        said["enable_thinking"] = wanted.enable_thinking
    if wanted.reasoning_effort is not None:
        said["reasoning_effort"] = wanted.reasoning_effort != "none"
    if len(set(said.values())) > 1:
        raise bad_request(next(iter(said)), "contradicts " + " and ".join(list(said)[1:]))
    known = front.template.names if front.template is not None else frozenset()
    for name in variables:
        if name in RESERVED or name not in known:
            raise bad_request(f"chat_template_kwargs.{name}"[:100], "the chat template takes no such variable")
    return next(iter(said.values()), None), variables


def _named(error: UsageError) -> ApiError:
    """The error of the template's checks, with the field that its text begins with."""
    found = re.match(r"((?:messages|tools)[\w.\[\]]*):", str(error))
    return ApiError(400, str(error), param=found[1] if found else "messages", code="invalid_value")


class Reply:
    """One answer as OpenAI's objects."""

    def __init__(self, front: Front, prepared: Prepared, record: Record, wanted: ChatRequest) -> None:
        self._front, self._prepared, self._record = front, prepared, record
        self._id = "chatcmpl-" + record.id
        self._created = int(time.time())
        self._with_usage = bool(wanted.stream_options and wanted.stream_options.include_usage)
        self._stream = bool(wanted.stream)
        self._with_logprobs = bool(wanted.logprobs)
        self._calls = 0

    async def whole(self, task: Task) -> dict[str, Any]:
        """The answer in one object: what a stream's deltas join to."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        scores: list[Delta] = []
        async with task:
            async for delta in self._deltas(task):
                content.append(delta.content)
                reasoning.append(delta.reasoning)
                calls += delta.calls
                scores.append(delta)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content), "refusal": None}
        if not message["content"] and calls:
            message["content"] = None
        if any(reasoning):
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(scores),
            "finish_reason": self._finish_reason(task.result),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage(task.result)}

    async def chunks(self, task: Task) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream."""
        yield self._chunk({"role": "assistant", "content": ""})
        async for delta in self._deltas(task):
            shown: dict[str, Any] = {}
            if delta.reasoning:
                shown["reasoning_content"] = delta.reasoning
            if delta.content:
                shown["content"] = delta.content
            if delta.calls:
                shown["tool_calls"] = [{"index": call.index, **self._call(call)} for call in delta.calls]
            if shown or delta.logprobs or delta.reasoning_logprobs:
                yield self._chunk(shown, logprobs=self._logprobs([delta]))
        yield self._chunk({}, finish_reason=self._finish_reason(task.result))
        if self._with_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage(task.result)}

    async def _deltas(self, task: Task) -> AsyncIterator[Delta]:
        """The task's deltas, counted; at its end the answer is remembered."""
        record = self._record
        async for item in task:
            if isinstance(item, Begun):
                record.prompt_tokens, record.cached_tokens = item.tokens, item.cached
                continue
            if item.token:
                record.token()
            self._calls += len(item.calls)
            yield item
        job = self._prepared.job
        if not job.pictures:  # the text alone doesn't say which they were
            self._front.turns.remember(self._prepared.rendered, job.prompt_ids, task.result.ids)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._front.model_id}

    def _chunk(self, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return chunk | {"usage": None} if self._with_usage else chunk

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return {
            "id": f"call_{self._record.id[:20]}{call.index:04d}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _finish_reason(self, ended: Ended) -> str:
        return "tool_calls" if self._calls and ended.reason == "stop" else ended.reason

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        """OpenAI's list of the content's tokens, and another of the reasoning's."""
        if not self._with_logprobs:
            return None
        content: list[TokenLogprob] = [entry for delta in deltas for entry in delta.logprobs]
        reasoning = [entry for delta in deltas for entry in delta.reasoning_logprobs]
        out: dict[str, Any] = {"content": [chat_entry(entry) for entry in content], "refusal": None}
        if reasoning:
            out["reasoning_content"] = [chat_entry(entry) for entry in reasoning]
        return out

    def _usage(self, ended: Ended) -> dict[str, Any]:
        prompt, completion = self._record.prompt_tokens, len(ended.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._record.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
        }
