"""``GET /openapi.json``: the API's description, from the bodies' own definitions."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic.json_schema import models_json_schema

from mimo_vk import __version__
from mimo_vk.server.schemas import ChatRequest, CompletionRequest
from mimo_vk.server.systemone import SCHEMA as SYSTEM_ONE
from mimo_vk.server.tokenizing import DetokenizeRequest, TokenizeRequest

BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
STREAMED = ("ChatRequest", "CompletionRequest")
REFS = "#/components/schemas/"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REFUSALS = {
    "400": "a field is wrong, and named",
    "401": "no key, or a wrong one",
    "403": "a Host or Origin that is not allowed",
    "404": "an unknown model",
    "413": "the body is too large",
    "415": "the body's encoding is unknown",
    "422": "the request is wrong, and each fault is named",
    "429": "too many requests wait",
    "500": "an error of the server's",
    "503": "the model is being loaded, or has died",
}
OPENAI_REFUSALS = tuple(status for status in REFUSALS if status not in ("415", "422"))
SYSTEM_ONE_REFUSALS = tuple(status for status in REFUSALS if status not in ("400", "404"))


@cache
def document(with_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies: list[tuple[Any, Literal["validation"]]] = [(body, "validation") for body in BODIES]
    _, definitions = models_json_schema(bodies, ref_template=REFS + "{model}")
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mimo-vk", "version": __version__},
        "paths": {
            "/health": {"get": _operation("Whether the model is ready", refusals=("503",), error=False)},
            "/metrics": {"get": _operation("Counters, for Prometheus", refusals=(), kind="text/plain")},
            "/v1/models": {"get": _operation("The model", refusals=("401", "403"))},
            "/v1/models/{model}": {"get": _operation("The model", refusals=("401", "403", "404"), path="model")},
            "/v1/chat/completions": {"post": _operation("A chat's answer", body="ChatRequest")},
            "/v1/completions": {"post": _operation("A text continued", body="CompletionRequest")},
            "/tokenize": {"post": _operation("The ids of a text", body="TokenizeRequest")},
            "/detokenize": {"post": _operation("The text of ids", body="DetokenizeRequest")},
            "/tokenizer_info": {"get": _operation("The tokenizer's named tokens", refusals=("401", "403"))},
            "/v1/systemone": {"post": _operation("Closed questions", body="SystemOne", refusals=SYSTEM_ONE_REFUSALS)},
        },
        "components": {"schemas": {**definitions.get("$defs", {}), "SystemOne": SYSTEM_ONE, "Error": ERROR}},
    }
    if with_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(
    about: str,
    *,
    body: str | None = None,
    refusals: tuple[str, ...] = OPENAI_REFUSALS,
    kind: str = "application/json",
    path: str | None = None,
    error: bool = True,
) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": {"type": "string"} if kind == "text/plain" else {"type": "object"}}}
    if body in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refused = {"application/json": {"schema": {"$ref": REFS + "Error"} if error else {"type": "object"}}}
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {
            "200": {"description": "the answer", "content": content},
            **{status: {"description": REFUSALS[status], "content": refused} for status in refusals},
        },
    }
    if body is not None:
        schema = {"$ref": REFS + body}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path is not None:
        operation["parameters"] = [{"name": path, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
