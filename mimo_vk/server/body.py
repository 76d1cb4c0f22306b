"""Request bodies: limited in size, JSON without the numbers that JSON doesn't have."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import Request

from mimo_vk.server.errors import ApiError

LIMIT = 32 * 2**20  # bytes
_DRAINED = 4 * LIMIT  # of a body that is too large: read and dropped, so that the client gets to see the answer


async def read_body(request: Request, limit: int = LIMIT) -> bytes:
    """The whole body. ApiError 413 over ``limit``; ClientDisconnect if the client leaves."""
    parts: list[bytes] = []
    size = 0
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared) > limit
    async for part in request.stream():
        size += len(part)
        too_large = too_large or size > limit
        if too_large and size > _DRAINED:
            break
        if not too_large:
            parts.append(part)
    if too_large:
        raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    return b"".join(parts)


def parse_json(data: bytes) -> Any:
    """Bytes as JSON. ApiError 400 for anything else; NaN and Infinity are not JSON."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, json_fault(error, data), code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: nested too deeply", code="invalid_json") from None


def json_fault(error: ValueError, data: bytes) -> str:
    """What is wrong with a body that is not JSON, and where."""
    if not data.strip():
        return "the body is empty: expected JSON"
    if isinstance(error, json.JSONDecodeError):
        what = error.msg[:1].lower() + error.msg[1:]
        return f"the body is not valid JSON: {what} at line {error.lineno}, column {error.colno}"
    words = "a number has too many digits" if "digits" in str(error) else str(error)  # Python's own are about Python
    return f"the body is not valid JSON: {words}"


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
