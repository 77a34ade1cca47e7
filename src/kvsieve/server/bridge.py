"""Between the engine's thread and the event loop: the sequences of one HTTP request."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from kvsieve.engine.requests import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    GenerationService,
    Ticket,
)
from kvsieve.errors import QueueFullError, ServiceClosedError
from kvsieve.server.errors import ApiError, from_engine, queue_full

Result = TypeVar("Result")


class Disconnected(Exception):  # noqa: N818 -- it is no error: nobody waits for the reply any more
    """The client closed its connection."""


class Job:
    """Submits sequences together, gives out their events in one order, and cancels them together.

    Made and used in an event loop. `close` has to be called however the request ends: it cancels
    whatever is still queued or running, and is harmless afterwards.
    """

    def __init__(self, service: GenerationService, requests: Sequence[GenerationRequest]) -> None:
        self._service = service
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._came = asyncio.Event()
        self._tickets: list[Ticket] = []
        self._open = 0

    def start(self) -> None:
        """Queue all sequences or none; ApiError says why not."""
        try:
            for index, request in enumerate(self._requests):
                self._tickets.append(self._service.submit(request, self._listener(index)))
                self._open += 1
        except QueueFullError as error:
            self.close()
            raise queue_full(str(error), retry_after_s=error.retry_after_s) from None
        except ServiceClosedError as error:
            self.close()
            raise stopping() from error
        except Exception as error:
            self.close()
            raise from_engine(error) from error

    async def events(
        self, *, silence_s: float | None = None
    ) -> AsyncIterator[tuple[int, Event] | None]:
        """Index of a sequence and its next event, until all have ended.

        None after each `silence_s` seconds in which nothing happened.
        """
        while self._open:
            if not self._events:
                await self._next(silence_s)
                if not self._events:
                    yield None
                continue
            index, event = self._events.popleft()
            if isinstance(event, Finished | Failed):
                self._open -= 1
            yield index, event

    def close(self) -> None:
        """Cancel what has not ended."""
        for ticket in self._tickets:
            ticket.cancel()

    async def _next(self, silence_s: float | None) -> None:
        """Wait for an event, or for the end of the silence.

        Not with `asyncio.wait_for`, which loses a cancellation that comes at the same moment as
        what it waits for (Python 3.11 and before): a client that left would be served to the end.
        """
        self._came.clear()
        alarm = None
        if silence_s is not None:
            alarm = self._loop.call_later(silence_s, self._came.set)
        try:
            await self._came.wait()
        finally:
            if alarm is not None:
                alarm.cancel()

    def _listener(self, index: int) -> Any:
        def on_event(event: Event) -> None:
            # After the loop has closed nobody waits for the event.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._arrived, index, event)

        return on_event

    def _arrived(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        self._came.set()


def stopping() -> ApiError:
    """The server takes no more requests, or ended this one to stop."""
    return ApiError(503, "the server is stopping", headers={"Retry-After": "5"})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves; then Disconnected."""
    task = asyncio.ensure_future(work)
    leaves = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, leaves}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        await _end(task)
        await _end(leaves)


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel until it is over: a library on the way may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
    if not task.cancelled():
        # Looked at, so that asyncio does not report it as forgotten.
        task.exception()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
