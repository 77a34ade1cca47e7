"""A real server on a loopback port, in a thread of the test."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from kvsieve.engine.requests import GenerationService
from kvsieve.server.app import create_app
from kvsieve.server.config import ServerConfig
from kvsieve.server.run import HttpServer, bind
from kvsieve.server.served import Served

PATIENCE_S = 900.0
"""How long anything may take before a test calls it stuck: machines may be busy, or suspended."""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


TEXT = "Hello there, world"
"""What the scripted engine says if it was told nothing else."""

USER = {"role": "user", "content": "x"}
CHAT, COMPLETION, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"


@dataclass(frozen=True, kw_only=True)
class Live:
    """Where a server answers, and what is behind it."""

    port: int
    server: HttpServer
    thread: threading.Thread
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def begin(live: Live, body: Any, *, path: str = "/v1/completions") -> socket.socket:
    """A connection on which a request was sent, and nothing read yet."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", live.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def post(live: Live, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return live.client.post(path, content=content)


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a reply, which has to be whole."""
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["code"] == status
    return error


def assert_still_serving(live: Live) -> None:
    assert post(live, COMPLETION, {"prompt": "x"}).json()["choices"][0]["text"] == TEXT


@contextlib.contextmanager
def serving(served: Served, config: ServerConfig | None = None) -> Iterator[Live]:
    config = config or ServerConfig(port=0, ping_s=0.2)
    with serving_app(create_app(served, config), config, service=served.service) as live:
        yield live


@contextlib.contextmanager
def serving_app(
    app: FastAPI, config: ServerConfig, *, service: GenerationService | None = None
) -> Iterator[Live]:
    listener = bind(config)
    ready = threading.Event()
    server = HttpServer(
        app,
        config,
        listener=listener,
        end_requests=(lambda: None) if service is None else service.close,
        on_ready=ready.set,
    )
    thread = threading.Thread(target=server.run, daemon=True)
    port = listener.getsockname()[1]
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            yield Live(port=port, server=server, thread=thread, client=client)
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"
