"""``POST /v1/completions``: prompts as they are, their text and log-probabilities given back on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from mimo_vk.server.body import parse_json, read_body
from mimo_vk.server.completion_text import Piece
from mimo_vk.server.errors import bad_request
from mimo_vk.server.front import Front
from mimo_vk.server.generation import Begun, Choice, CompletionJob, Ended, IndexedPiece
from mimo_vk.server.models import check_model
from mimo_vk.server.record import Record
from mimo_vk.server.responses import EventStream, Json, unless_gone
from mimo_vk.server.schemas import CompletionRequest, parse
from mimo_vk.server.worker import Task

if TYPE_CHECKING:
    from mimo_vk.server.app import Context

MAX_TOKENS = 16  # OpenAI's default


async def endpoint(context: Context, request: Request, record: Record) -> Response:
    """Check all prompts, queue them as one job, and answer whole or as a stream."""
    body = await read_body(request)
    wanted, job = await asyncio.to_thread(check, context.front, body)  # a long text takes its time
    record.stream = bool(wanted.stream)
    record.asked(lambda: wanted.prompt)
    reply = Reply(context.front, record, wanted)
    task = context.worker.submit(job)
    if wanted.stream:
        return EventStream(task, lambda: reply.chunks(task), record, keep_alive=context.keep_alive)
    return Json(await unless_gone(request, reply.whole(task)))


def check(front: Front, data: bytes) -> tuple[CompletionRequest, CompletionJob]:
    """A body as a job. ApiError and UsageError name what is wrong with it."""
    wanted: CompletionRequest = parse(CompletionRequest, parse_json(data))
    check_model(front, wanted.model)
    prompts = prompt_ids(front, wanted.prompt)
    if wanted.max_tokens is None:  # the default takes what room there is
        limit = min(MAX_TOKENS, *(front.room(len(ids), None, "max_tokens") for ids in prompts))
    else:
        limit = min(front.room(len(ids), wanted.max_tokens, "max_tokens") for ids in prompts)
    choice = Choice(
        limit,
        front.temperature if wanted.temperature is None else wanted.temperature,
        front.top_p if wanted.top_p is None else wanted.top_p,
        front.seed if wanted.seed is None else wanted.seed,
        wanted.stops,
    )
    return wanted, CompletionJob(prompts, choice, bool(wanted.echo), wanted.logprobs)


def prompt_ids(front: Front, prompt: Any) -> list[list[int]]:
    """Every prompt's ids; control tokens written in a text count. ApiError names the prompt that can't be read."""
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    out = []
    for i, one in enumerate([prompt] if single else prompt):
        where = "prompt" if single else f"prompt[{i}]"
        if isinstance(one, str):
            front.check_length(len(one), where)
            ids = front.tokenizer.encode(one, special=True)
        else:
            ids = list(one)
        if not ids:
            raise bad_request(where, "the prompt is empty: at least one token is needed")
        bad = next((token for token in ids if token >= front.vocab_size), None)
        if bad is not None:
            raise bad_request(where, f"token id {bad} is outside the vocabulary (0 to {front.vocab_size - 1})")
        out.append(ids)
    return out


class Reply:
    """The completions as OpenAI's objects."""

    def __init__(self, front: Front, record: Record, wanted: CompletionRequest) -> None:
        self._front, self._record = front, record
        self._id = "cmpl-" + record.id
        self._created = int(time.time())
        self._with_usage = bool(wanted.stream_options and wanted.stream_options.include_usage)
        self._with_logprobs = wanted.logprobs is not None
        self._completion_tokens = 0

    async def whole(self, task: Task) -> dict[str, Any]:
        """All completions in one object."""
        pieces: dict[int, list[Piece]] = {}
        reasons: dict[int, str] = {}
        async with task:
            async for item in self._items(task):
                if isinstance(item, Ended):
                    reasons[item.index] = item.reason
                else:
                    pieces.setdefault(item.index, []).append(item.piece)
        choices = [self._choice(index, pieces.get(index, []), reasons[index]) for index in sorted(reasons)]
        return {**self._head(), "choices": choices, "usage": self._usage()}

    async def chunks(self, task: Task) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream."""
        async for item in self._items(task):
            if isinstance(item, Ended):
                yield self._chunk(self._choice(item.index, [], item.reason))
            elif item.piece.text or item.piece.logprobs:
                yield self._chunk(self._choice(item.index, [item.piece], None))
        if self._with_usage:
            yield {**self._head(), "choices": [], "usage": self._usage()}

    async def _items(self, task: Task) -> AsyncIterator[IndexedPiece | Ended]:
        """The task's pieces and ends, counted."""
        record = self._record
        async for item in task:
            if isinstance(item, Begun):
                record.prompt_tokens += item.tokens
                record.cached_tokens += item.cached
                continue
            if isinstance(item, IndexedPiece) and item.generated:
                record.token()
            elif isinstance(item, Ended):
                self._completion_tokens += len(item.ids)
            yield item

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._front.model_id,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [choice]}
        return chunk | {"usage": None} if self._with_usage else chunk

    def _choice(self, index: int, pieces: Sequence[Piece], reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(pieces),
            "finish_reason": reason,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """The four lists: a prompt's first token has neither a log-probability nor alternatives."""
        if not self._with_logprobs:
            return None
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for offset, entry in (entry for piece in pieces for entry in piece.logprobs):
            out["tokens"].append(entry.token.text)
            out["token_logprobs"].append(entry.token.logprob)
            listed = {token.text: token.logprob for token in (*entry.top, entry.token)}
            out["top_logprobs"].append(listed if entry.predicted else None)
            out["text_offset"].append(offset)
        return out

    def _usage(self) -> dict[str, Any]:
        prompt = self._record.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._record.cached_tokens},
        }
