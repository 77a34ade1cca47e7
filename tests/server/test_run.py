"""The server as a process: signals, sockets, clients that are slow to speak."""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import ConfigError
from kvsieve.server import run
from kvsieve.server.config import ServerConfig
from kvsieve.server.served import Served
from tests.server.conftest import fake_served
from tests.server.fake_service import FakeService
from tests.server.live import PATIENCE_S, Live, serving, wait_until

PROCESS = """
import sys
from pathlib import Path
from tests.server.conftest import fake_served
from tests.server.fake_service import FakeService
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.models.gguf import GgufFile
from kvsieve.server.app import create_app
from kvsieve.server.config import ServerConfig
from kvsieve.server.run import HttpServer, bind

path = Path(sys.argv[1])
with GgufFile.open(path) as file:
    tokenizer = Tokenizer.from_metadata(file.metadata)
service = FakeService(tokenizer, "x" * 100)
service.pause_s = 0.01
config = ServerConfig(port=0, drain_s=float(sys.argv[2]))
listener = bind(config)
app = create_app(fake_served(service, path), config)
port = listener.getsockname()[1]
ready = lambda: print(port, flush=True)
HttpServer(
    app, config, listener=listener, end_requests=service.close, on_ready=ready
).run()
print("ended", len(service.running), flush=True)
"""


@contextlib.contextmanager
def process(tiny_file: Path, *, drain_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(tiny_file), str(drain_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
    )
    assert child.stdout is not None
    try:
        yield child, f"http://127.0.0.1:{child.stdout.readline().strip()}"
    finally:
        child.kill()
        child.communicate()


def stream_of(url: str, **body: Any) -> tuple[threading.Thread, list[str]]:
    """A client that reads a stream in a thread, and the lines it has got so far."""
    lines: list[str] = []

    def read() -> None:
        asked = {"prompt": "x", "max_tokens": 1000, "stream": True, **body}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=None) as reply:
            for line in reply.iter_lines():
                lines.append(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, lines


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_running_requests_finish_when_the_server_is_told_to_stop(
    tiny_file: Path, number: signal.Signals
) -> None:
    with process(tiny_file, drain_s=600) as (child, url):
        thread, lines = stream_of(url)
        wait_until(lambda: len(lines) > 6)
        child.send_signal(number)
        thread.join()
        texts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(one["choices"][0]["text"] for one in texts) == "x" * 100
        assert "data: [DONE]" in lines
        out, err = child.communicate()
        assert (child.returncode, out, err) == (0, "ended 0\n", "")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_what_does_not_finish_in_time_is_told_so(tiny_file: Path) -> None:
    with process(tiny_file, drain_s=0.05) as (child, url):
        thread, lines = stream_of(url)
        wait_until(lambda: len(lines) > 6)
        child.send_signal(signal.SIGTERM)
        thread.join()
        last = [line for line in lines if line.startswith("data:")][-1]
        assert json.loads(last[6:])["error"]["code"] == 503
        out, err = child.communicate()
        assert (child.returncode, out, err) == (0, "ended 0\n", "")


def test_a_port_that_is_taken_is_named() -> None:
    with run.bind(ServerConfig(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"expected an address that is free, got .*:{port}"):
            run.bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="expected an address of this machine"):
        run.bind(ServerConfig(host="no such host", port=0))


def test_a_unix_socket(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "kvsieve.sock"
    config = ServerConfig(host=str(path))
    assert config.is_loopback
    listener = run.bind(config)
    listener.close()
    assert path.is_socket()


def test_a_head_that_does_not_come_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_HEADERS_S", 0.2)
    with serving(served) as live:
        for sent in (b"", b"GET /health HTTP/1.1\r\nX: "):
            with socket.create_connection(("127.0.0.1", live.port)) as connection:
                connection.sendall(sent)
                assert connection.recv(100) == b""
        # A whole request, and then the beginning of another one on the same connection.
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"GET /hea")
            while connection.recv(1000):
                pass


def test_a_long_reply_is_not_taken_for_a_slow_head(
    served: Served, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_HEADERS_S", 0.1)
    service.go.clear()
    with serving(served) as live:
        thread, lines = stream_of(live.url)
        wait_until(lambda: lines.count(": keep-alive") >= 2)
        service.go.set()
        thread.join()
        assert "data: [DONE]" in lines


def test_connections_beyond_the_limit_are_turned_away(served: Served) -> None:
    with serving(served, ServerConfig(port=0, connections=3)) as live:
        idle = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(3)]
        wait_until(lambda: live.client.get("/health").status_code == 503)
        for connection in idle:
            connection.close()
        wait_until(lambda: live.client.get("/health").status_code == 200)


def test_clients_that_come_and_go_leave_nothing_behind(live: Live, service: FakeService) -> None:
    service.pause_s = 0.002
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            body = b'{"prompt": "x", "stream": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            connection.recv(10)
    wait_until(lambda: not service.running)
    assert live.client.get("/health").status_code == 200


def test_a_server_that_ended_holds_no_model(tokenizer: Tokenizer, tiny_file: Path) -> None:
    """Frameworks remember endpoints; a process may start one server after the other."""
    service = FakeService(tokenizer, "x")
    gone = weakref.ref(service)
    with serving(fake_served(service, tiny_file)) as live:
        assert live.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    for ticket in service.tickets:
        assert ticket.ended.wait(PATIENCE_S)
    del live, service, ticket
    gc.collect()
    assert gone() is None
