"""Runs an application until it is told to stop, and lets running requests finish then."""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvsieve.errors import ConfigError
from kvsieve.server.config import ServerConfig

_HEADER_BYTES = 32 * 1024
_HEADERS_S = 30.0
"""Bytes and seconds in which the head of a request must have arrived."""

_GRACE_S = 5
"""Seconds to tell clients that their requests were ended, once the time to finish is over."""


class _Protocol(H11Protocol):
    """uvicorn's HTTP, which does not wait for ever for the head of a request."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request():
            self._stop_waiting()
        elif self._patience is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(_HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if not self._in_request():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server with two hooks: it says when it listens, and ends what does not finish."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        end_requests: Callable[[], None],
        drain_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._end_requests = end_requests
        self._drain_s = drain_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        close = threading.Thread(target=self._end_requests, daemon=True)
        timer = asyncio.get_running_loop().call_later(self._drain_s, close.start)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


class HttpServer:
    """An application on a socket. Whoever makes it closes the engine after `run`.

    end_requests  called when the time to finish is over
    on_ready      called when the server listens
    """

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        *,
        listener: socket.socket,
        end_requests: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="asyncio",
                log_level="error",
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=_HEADER_BYTES,
                limit_concurrency=config.connections,
                timeout_graceful_shutdown=int(config.drain_s) + _GRACE_S,
                ssl_keyfile=config.ssl_key_file,
                ssl_certfile=config.ssl_cert_file,
            ),
            end_requests=end_requests,
            drain_s=config.drain_s,
            on_ready=on_ready,
        )

    def run(self) -> None:
        """Serve until SIGTERM, Ctrl-C or `stop`."""
        with _signals_are_no_error():
            self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Let running requests finish, and end; from any thread."""
        self._server.should_exit = True


def bind(config: ServerConfig) -> socket.socket:
    """The socket a server will listen on; ConfigError says why there is none."""
    if config.host.endswith(".sock"):
        return _bind(socket.socket(socket.AF_UNIX), config.host, config)
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"[serve] host: expected an address of this machine, got {config.host!r}: {error}"
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _bind(listener, address, config)


@contextlib.contextmanager
def _signals_are_no_error() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more at its end: here that does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, _nothing) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by going on."""


def _bind(listener: socket.socket, address: object, config: ServerConfig) -> socket.socket:
    try:
        listener.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        listener.close()
        why = "which is taken" if error.errno == errno.EADDRINUSE else f"{error.strerror}"
        raise ConfigError(
            "[serve] host, port: expected an address that is free, "
            f"got {config.host}:{config.port}, {why}"
        ) from None
    return listener
