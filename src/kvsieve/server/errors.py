"""Mistakes as clients see them: a status and OpenAI's error object."""

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from kvsieve.errors import CapacityError, ConfigError, KvsieveError, TemplateError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

_SHOWN_CHARS = 1000


class ApiError(HTTPException):
    """An error reply. `param` names the field that is wrong, `facts` join the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        facts: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=dict(headers or {}))
        self.param = param
        self.kind = kind or _TYPES.get(status, "server_error")
        self.facts = dict(facts or {})

    def body(self) -> dict[str, Any]:
        """The object ``{"error": ...}``."""
        error = {
            "code": self.status_code,
            "message": self.detail,
            "type": self.kind,
            "param": self.param,
            **self.facts,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole reply."""
        return JSONResponse(self.body(), status_code=self.status_code, headers=self.headers)


def invalid(param: str, *, expected: str, got: object) -> ApiError:
    """A field that is wrong: a 400 in the words all our errors have."""
    shown = got if isinstance(got, str) else f"{got!r:.80}"
    return ApiError(400, f"{param}: expected {expected}, got {shown}", param=param)


def context_exceeded(*, prompt_tokens: int, ctx_size: int) -> ApiError:
    """A prompt that does not fit: a 400 with both numbers, so that a client can shorten it."""
    return ApiError(
        400,
        f"prompt: expected at most {ctx_size} tokens (the context size), got {prompt_tokens}",
        param="prompt",
        kind="exceed_context_size_error",
        facts={"n_prompt_tokens": prompt_tokens, "n_ctx": ctx_size},
    )


def queue_full(message: str, *, retry_after_s: float) -> ApiError:
    """No room in the queue: come back later."""
    seconds = max(1, round(retry_after_s))
    return ApiError(429, message, headers={"Retry-After": str(seconds)})


def from_engine(error: Exception, *, param: str | None = None) -> ApiError:
    """What an error of the engine means to a client; anything unknown is our own mistake."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError | TemplateError):
        where, colon, rest = str(error).partition("] ")
        message = rest if colon and where.startswith("[") else str(error)
        name = param or _leading_name(message)
        return ApiError(400, message[:_SHOWN_CHARS], param=name)
    if isinstance(error, CapacityError):
        return ApiError(503, str(error)[:_SHOWN_CHARS], headers={"Retry-After": "1"})
    if isinstance(error, KvsieveError):
        return ApiError(500, str(error)[:_SHOWN_CHARS])
    return ApiError(500, f"internal error: {type(error).__name__}")


def _leading_name(message: str) -> str | None:
    name, colon, _ = message.partition(":")
    return name if colon and name.replace("_", "").isalnum() else None
