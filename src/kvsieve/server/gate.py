"""What every request passes before an endpoint sees it: keys, origins, paths, request ids."""

import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvsieve.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/v1/health"})
"""Answered without a key: whoever restarts a server that hangs has none."""

_LOADING_RETRY_S = 2
"""Seconds after which a client may ask again whether the model is there."""

_PORT = re.compile(r":\d+$")
_METHODS = "GET, HEAD, POST, OPTIONS"


class RequestIds:
    """Gives every reply the header ``x-request-id``, which OpenAI's clients show with errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = f"req_{secrets.token_hex(12)}"
            await send(message)

        await self._app(scope, receive, named if scope["type"] == "http" else send)


class Gate:
    """Refuses requests without a valid key and those that foreign web pages made.

    A browser sends requests of any page to any server, this machine's own among them, and says
    where the page comes from in the header Origin. Unless that is this server itself, by its
    address, or one of `origins`, the request is refused; hiding the reply, which is all that
    browsers do, would be too late.

    While nothing is ready to answer, it says so.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        origins: Sequence[str],
        is_ready: Callable[[], bool],
    ) -> None:
        self._app = app
        self._is_ready = is_ready
        self._keys = [key.encode() for key in api_keys]
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path != "/" and path.endswith("/"):
            path = path.rstrip("/") or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        headers = Headers(scope=scope)
        error = self._refusal(headers, path, scope["method"])
        if error is not None:
            await error.response()(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await send(
                {
                    "type": "http.response.start",
                    "status": 204,
                    "headers": [(b"allow", _METHODS.encode())],
                }
            )
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, path: str, method: str) -> ApiError | None:
        for origin in headers.getlist("origin"):
            if not self._allows(origin, headers.get("host", "")):
                return ApiError(
                    403,
                    f"Origin: expected a page that --cors-origins allows, got {origin[:100]}",
                )
        # Keys travel with requests, not with the questions browsers ask before them.
        if method == "OPTIONS":
            return None
        if not self._keys or path in OPEN_PATHS or self._knows(headers):
            return None if self._is_ready() else _loading()
        return ApiError(
            401,
            "Authorization: expected Bearer and a valid API key, got "
            + ("another" if "authorization" in headers or "x-api-key" in headers else "none"),
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _allows(self, origin: str, host: str) -> bool:
        if self._origins & {"*", origin}:
            return True
        return origin.partition("://")[2] == host and _is_address(host)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Every key is compared, and each comparison takes the same time however much is right.
        found = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]
        return any(found)


def _is_address(host: str) -> bool:
    """Whether a Host header names a machine in a way that no foreign page can take over.

    Anybody can give a name of their own to this machine's address, and their pages would then seem
    to come from here (DNS rebinding).
    """
    name = host.rpartition(":")[0] if _PORT.search(host) else host
    if name == "localhost":
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _loading() -> ApiError:
    # llama.cpp's words, which its clients look for.
    return ApiError(503, "Loading model", headers={"Retry-After": str(_LOADING_RETRY_S)})
