"""What a request may be refused with, and OpenAI's envelope for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_vk.errors import MimoError, UsageError


class QueueFull(MimoError):
    """More requests wait than the server takes."""


class Unavailable(MimoError):
    """No model to ask: it is being loaded, its process has died, or the server is stopping."""


class InternalError(MimoError):
    """A bug of ours; its text stays in the server's log."""


INTERNAL = "internal error: the server's log has the details"


class ApiError(MimoError):
    """A refusal with an HTTP status. param: the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Jobs may raise it in the model's process: plain pickling would lose the named arguments."""
        return _rebuilt, (self.status, self.message, self.param, self.code, self.headers)


def _rebuilt(status: int, message: str, param: str | None, code: str | None, headers: dict[str, str]) -> ApiError:
    return ApiError(status, message, param=param, code=code, headers=headers)


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names its field."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}


def envelope(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as a refusal; what isn't for the client's eyes becomes a bare 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, UsageError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, INTERNAL, code="internal_error")
