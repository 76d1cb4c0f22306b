"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``, with the fields that vLLM's server gives them.

Clients that count tokens themselves (lm-eval's ``remote`` tokenizer) need no copy of the tokenizer then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request
from starlette.responses import Response

from mimo_vk.server.body import parse_json, read_body
from mimo_vk.server.errors import bad_request
from mimo_vk.server.front import Front
from mimo_vk.server.models import check_model
from mimo_vk.server.record import Record
from mimo_vk.server.responses import Json
from mimo_vk.server.schemas import Strict, TokenId, parse

if TYPE_CHECKING:
    from mimo_vk.server.app import Context


class TokenizeRequest(Strict):
    """A text; control tokens written in it count, as in ``/v1/completions``. No token is put around it."""

    prompt: str
    model: str | None = None
    add_special_tokens: Literal[False] | None = None


class DetokenizeRequest(Strict):
    """Ids; control tokens are written out."""

    tokens: list[TokenId]
    model: str | None = None


async def tokenize(context: Context, request: Request, record: Record) -> Response:
    """The ids of a text."""
    return await asyncio.to_thread(_tokenized, context.front, await read_body(request))


async def detokenize(context: Context, request: Request, record: Record) -> Response:
    """The text of ids."""
    return await asyncio.to_thread(_detokenized, context.front, await read_body(request))


async def info(context: Context, request: Request, record: Record) -> Response:
    """The texts of the tokenizer's named tokens, and the chat template."""
    template = context.front.template
    named = template.variables if template is not None else {}
    return Json({**named, "chat_template": template.source if template is not None else None})


# Both take their time over a long text, and so does writing the answer down: none of it in the event loop.


def _tokenized(front: Front, data: bytes) -> Response:
    wanted: TokenizeRequest = parse(TokenizeRequest, parse_json(data))
    check_model(front, wanted.model)
    ids = front.tokenizer.encode(wanted.prompt, special=True)
    return Json({"tokens": ids, "count": len(ids), "max_model_len": front.ctx})


def _detokenized(front: Front, data: bytes) -> Response:
    wanted: DetokenizeRequest = parse(DetokenizeRequest, parse_json(data))
    check_model(front, wanted.model)
    for i, token in enumerate(wanted.tokens):
        if token >= front.vocab_size:
            raise bad_request(
                f"tokens[{i}]", f"token id {token} is outside the vocabulary (0 to {front.vocab_size - 1})"
            )
    return Json({"prompt": front.tokenizer.decode(wanted.tokens, keep_special=True)})
