"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from mimo_vk.server.errors import ApiError
from mimo_vk.server.front import Front
from mimo_vk.server.record import Record
from mimo_vk.server.responses import Json

if TYPE_CHECKING:
    from mimo_vk.server.app import Context


ABOUT = "a chat model on this machine: answers in text, and closed questions with probabilities"


async def listing(context: Context, request: Request, record: Record) -> Response:
    """The one model, once for OpenAI's clients and once for System One's."""
    front = context.front
    card = {"name": front.model_id, "description": ABOUT, "release_date": front.released}
    return Json({"object": "list", "data": [described(front)], "models": [card]})


async def one(context: Context, request: Request, record: Record) -> Response:
    """The model, by its name."""
    check_model(context.front, request.url.path.removeprefix("/v1/models/"))
    return Json(described(context.front))


def described(front: Front) -> dict[str, Any]:
    """OpenAI's object for the model."""
    return {"id": front.model_id, "object": "model", "created": front.created, "owned_by": "mimo-vk"}


def check_model(front: Front, name: str | None) -> None:
    """ApiError 404 for another model's name."""
    if name is not None and name != front.model_id:
        shown = name if len(name) <= 100 else name[:100] + "..."
        raise ApiError(
            404,
            f"model: there is no {shown!r} here, only {front.model_id!r}",
            param="model",
            code="model_not_found",
        )
