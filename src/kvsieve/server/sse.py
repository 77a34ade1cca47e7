"""Server-sent events: chunks of a reply while it is made, and signs of life in between."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from kvsieve.server.bridge import Disconnected, while_connected

DONE = "[DONE]"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers skip it. (An empty `data:` or an `id:` would reach some clients' JSON.)"""


class EventStream(Response):
    """Sends the pieces of `chunks`: objects and `DONE` as events, None as a comment.

    The status and headers go out before the first piece is there. When the client leaves, or
    accepts nothing for `send_s` seconds, nothing more is taken. `on_close` is called in any case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[dict[str, Any] | str | None],
        *,
        send_s: float,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._send_s = send_s
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            await while_connected(receive, self._send_all(send))
        except (Disconnected, OSError):
            # Nobody reads any more.
            pass
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._chunks:
            body = KEEP_ALIVE if chunk is None else encode_event(chunk)
            await self._within_patience(
                send({"type": "http.response.body", "body": body, "more_body": True})
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _within_patience(self, sending: Awaitable[None]) -> None:
        """Send a piece, or be cancelled. (`asyncio.wait_for` loses cancellations: see bridge.)"""
        task = asyncio.current_task()
        assert task is not None  # coroutines run in one
        alarm = asyncio.get_running_loop().call_later(self._send_s, task.cancel)
        try:
            await sending
        finally:
            alarm.cancel()


def encode_event(chunk: dict[str, Any] | str) -> bytes:
    """Bytes of one event. JSON has no line breaks of its own, so one `data:` line holds it."""
    text = (
        chunk
        if isinstance(chunk, str)
        else json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    )
    return f"data: {text}\n\n".encode()
