"""``POST /v1/systemone``: closed questions, answered with probabilities. See ``mimo_vk.systemone``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mimo_vk.engine import Engine
from mimo_vk.errors import CheckpointError, ImageError, UsageError
from mimo_vk.sampling import F64
from mimo_vk.server.body import read_body
from mimo_vk.server.errors import ApiError, envelope
from mimo_vk.server.front import Front
from mimo_vk.server.jobs import Cancel, Emit
from mimo_vk.server.record import Record
from mimo_vk.server.responses import Json, unless_gone
from mimo_vk.server.systemone_body import decoded
from mimo_vk.session import Session
from mimo_vk.systemone import Prompts, answers_of, read, tokenise
from mimo_vk.systemone_pictures import NO_PICTURES, Inlay
from mimo_vk.systemone_request import Fault, InvalidRequest, Request, parse_request

if TYPE_CHECKING:
    from mimo_vk.server.app import Context

PROVIDER = "mimo-vk"


@dataclass(frozen=True)
class Found:
    """Each question's options as log-probabilities of their ids, and how many prompt tokens had to be computed."""

    logs: dict[str, list[F64]]
    prompt_tokens_fed: int


@dataclass(frozen=True)
class SystemOneJob:
    """Reads every question's options in the model's process."""

    prompts: Prompts
    pin_state: bool | None

    def run(self, engine: Engine, session: Session, emit: Emit, cancel: Cancel) -> Found:
        before = engine.stats.prefill_tokens
        logs = read(session, self.prompts, self.pin_state, cancel)
        options = [option for asked in self.prompts.questions.values() for option in asked.options]
        fed = engine.stats.prefill_tokens - before - sum(len(option) - 1 for option in options)
        return Found(logs, fed)


async def endpoint(context: Context, request: HttpRequest, record: Record) -> Response:
    """Check all of the request, queue it, and answer."""
    body = await read_body(request)
    try:
        wanted, prompts = await asyncio.to_thread(check, context.front, request.headers, body)
    except InvalidRequest as error:
        return invalid(error)
    record.asked(lambda: asked_text(wanted))
    found = Found({}, 0)
    if prompts.questions:
        try:
            found = await unless_gone(request, context.worker.call(SystemOneJob(prompts, wanted.pin_state)))
        except ImageError as error:  # its header was sound
            return invalid(InvalidRequest([Fault(("body", "assets"), str(error), "image_invalid")]))
    record.prompt_tokens = prompts.input_tokens
    record.cached_tokens = max(0, prompts.input_tokens - found.prompt_tokens_fed)
    usage = {"input_tokens": prompts.input_tokens, "output_tokens": prompts.output_tokens, "cost": 0}
    return Json(
        {
            "id": record.id,
            "model": context.front.model_id,
            "provider": PROVIDER,
            "answers": answers_of(wanted, found.logs),
            "usage": usage,
        }
    )


def asked_text(wanted: Request) -> dict[str, Any]:
    """What a request asks, without its pictures."""
    questions = {name: asdict(question) for name, question in wanted.questions.items()}
    return {"prefix": wanted.prefix, "state": wanted.state, "questions": questions}


def check(front: Front, headers: Mapping[str, str], body: bytes) -> tuple[Request, Prompts]:
    """A body as a request and its prompts. InvalidRequest holds all that is wrong with it; ApiError 413, 415."""
    wanted = parse_request(*decoded(headers, body))
    if front.template is None:
        raise InvalidRequest([Fault(("body",), "this checkpoint has no chat template to ask with", "not_supported")])
    try:
        return wanted, tokenise(front.tokenizer, front.template, wanted, front.ctx, inlay_of(front, wanted))
    except InvalidRequest:
        raise
    except CheckpointError:  # its text names a file
        message = "this checkpoint's chat template ends no turn with a token of its own"
        raise InvalidRequest([Fault(("body",), message, "not_supported")]) from None
    except UsageError as error:  # the template's own refusal
        raise InvalidRequest([Fault(("body",), str(error), "template")]) from None


def inlay_of(front: Front, wanted: Request) -> Inlay:
    """The request's pictures with their sizes, from their headers. InvalidRequest names each that can't be used."""
    tools, pictures, faults = front.picture_tools, {}, []
    if not wanted.assets:
        return NO_PICTURES
    if tools is None:
        raise InvalidRequest([Fault(("body", "assets"), front.no_pictures, "not_supported")])
    for name, data in wanted.assets.items():
        try:
            pictures[name] = tools.picture(data)
        except ImageError as error:
            faults.append(Fault(("body", "assets", name), str(error), "image_invalid"))
    if faults:
        raise InvalidRequest(faults)
    return Inlay(pictures, tools)


def invalid(error: InvalidRequest) -> Response:
    """A 422: OpenAI's envelope with the first fault's field, and all faults as ``detail``."""
    first = error.faults[0]
    param = ".".join(str(step) for step in first.loc[1:]) or None
    body = envelope(ApiError(422, str(error), param=param, code=first.type))
    body["detail"] = [fault.as_dict() for fault in error.faults]
    return Response(json.dumps(body).encode(), 422, media_type="application/json")


CONTENT = {"type": ["string", "object", "array"]}
OPTIONAL = {"type": ["string", "object", "array", "null"]}


def _question(kind: str, criteria: dict[str, Any], required: bool) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", "criteria"] if required else ["type"],
        "additionalProperties": False,
        "properties": {"type": {"const": kind}, "instructions": OPTIONAL, "criteria": criteria},
    }


NOUL_CRITERIA = {
    "type": ["object", "null"],
    "additionalProperties": False,
    "properties": {"true": OPTIONAL, "false": OPTIONAL},
}
CHOICE_CRITERIA = {"type": "object", "minProperties": 1, "maxProperties": 255, "additionalProperties": OPTIONAL}
SCORE_CRITERIA = {"type": "array", "minItems": 1, "maxItems": 255, "items": CONTENT}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["state", "questions"],
    "additionalProperties": False,
    "properties": {
        "state": CONTENT,
        "questions": {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 64,
            "additionalProperties": {
                "oneOf": [
                    _question("noul", NOUL_CRITERIA, required=False),
                    _question("choice", CHOICE_CRITERIA, required=True),
                    _question("score", SCORE_CRITERIA, required=True),
                ]
            },
        },
        "model": {"type": ["string", "null"]},
        "prefix": {"type": ["string", "null"]},
        "pin_state": {"type": ["boolean", "null"]},
        "normalize": {"enum": ["sum", "mean", None]},
        "assets": {
            "type": ["object", "null"],
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "type": {"enum": ["image", None]},
                    "format": {"type": ["string", "null"]},
                    "data_base64": {"type": ["string", "null"], "contentEncoding": "base64"},
                    "part": {"type": ["string", "null"]},
                },
            },
        },
        "user": {},
        "metadata": {},
        "store": {},
    },
}
