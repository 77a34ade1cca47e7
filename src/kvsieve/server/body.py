"""Reads the body of a request: bounded in size, depth and time, and strict about what JSON is."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from kvsieve.server.config import RequestLimits
from kvsieve.server.errors import ApiError


class BoundedRequest(Request):
    """A request whose body is refused beyond the limits of ``app.state.limits``."""

    async def body(self) -> bytes:
        """The bytes of the body; a 413 as soon as there are too many, a 408 if they do not come."""
        if not hasattr(self, "_body"):
            limits: RequestLimits = self.app.state.limits
            try:
                self._body = await asyncio.wait_for(self._read(limits.body_bytes), limits.read_s)
            except asyncio.TimeoutError:
                raise ApiError(
                    408, f"body: expected to arrive within {limits.read_s:g} s, got a part of it"
                ) from None
        return self._body

    async def _read(self, limit: int) -> bytes:
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit, announced)
        parts: list[bytes] = []
        size = 0
        async for part in self.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit, "more")
            parts.append(part)
        return b"".join(parts)

    async def json(self) -> Any:
        """The value of the body; a 400 says what is wrong with it."""
        return parse_json(await self.body(), nesting=self.app.state.limits.nesting)


class BoundedRoute(APIRoute):
    """A route whose handler gets a `BoundedRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's own handler."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            scope = {**request.scope, "headers": _as_json(request.scope["headers"])}
            try:
                return await handle(BoundedRequest(scope, request.receive))
            except ClientDisconnect:
                # Nobody will read it.
                return Response(status_code=400)

        return bounded


def parse_json(data: bytes, *, nesting: int) -> Any:
    """Value of a JSON text in UTF-8; ApiError 400 for anything that is none.

    Python's own reader takes NaN, lone surrogates and numbers of any length, and ends the process'
    patience with deep nesting; none of it may get in.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"body: expected JSON in UTF-8, got an error: {error}") from None
    depth = _depth(value, most=nesting)
    if depth > nesting:
        raise ApiError(400, f"body: expected lists and objects at most {nesting} deep, got deeper")
    return value


def _depth(value: Any, *, most: int) -> int:
    """How deep lists and objects lie in each other, as far as `most` and one more."""
    level: list[Any] = [value]
    for depth in range(most + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
            elif isinstance(one, float) and math.isinf(one):
                raise ApiError(400, "body: expected finite numbers, got one that is too large")
        level = [one for one in inner if isinstance(one, dict | list | float)]
        if not level:
            return depth
    return most + 1


def _as_json(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers that call the body JSON, whatever the client does: many do not say, or say wrong."""
    others = [(name, value) for name, value in headers if name != b"content-type"]
    return [*others, (b"content-type", b"application/json")]


def _too_large(limit: int, got: str) -> ApiError:
    # The rest of the body is not read, so the connection is of no further use.
    return ApiError(
        413, f"body: expected at most {limit} bytes, got {got}", headers={"Connection": "close"}
    )
