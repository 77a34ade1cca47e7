"""The client leaves, or does not read, or brings a template that has no end."""

import socket
import struct
import time
from pathlib import Path

import pytest

from kvsieve.engine.template_worker import TemplateWorker
from kvsieve.server.config import ServerConfig
from kvsieve.server.served import Served
from tests.server.conftest import fake_served
from tests.server.fake_service import FakeService
from tests.server.live import (
    CHAT,
    TEXT,
    USER,
    Live,
    assert_still_serving,
    begin,
    serving,
    wait_until,
)

# -- the client leaves -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["queued", "running"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_leaving_ends_the_generation(
    live: Live, service: FakeService, stream: bool, when: str, how: str
) -> None:
    """Case SRV-06 for the HTTP side: streamed or not, before and after the first token."""
    service.pause_s = 0.005
    service.script = lambda _: service.tokenizer.encode("x") * 20_000
    if when == "queued":
        service.go.clear()
    connection = begin(live, {"prompt": "x", "max_tokens": 20_000, "stream": stream, "n": 2})
    wait_until(lambda: len(service.tickets) == 2)
    if when == "running":
        wait_until(lambda: all(ticket.said > 2 for ticket in service.tickets))
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    said = [ticket.said for ticket in service.tickets]
    connection.close()
    wait_until(lambda: not service.running)
    assert all(ticket.cancelled.is_set() for ticket in service.tickets)
    assert all(ticket.said < 10_000 for ticket in service.tickets), said
    service.go.set()
    service.script = lambda _: service.tokenizer.encode(TEXT)
    assert_still_serving(live)


def test_a_client_that_reads_nothing_is_given_up(served: Served, service: FakeService) -> None:
    service.script = lambda _: service.tokenizer.encode("x") * 10**6
    with serving(served, ServerConfig(port=0, send_s=0.2)) as live:
        connection = begin(live, {"prompt": "x", "max_tokens": 10**6, "stream": True})
        wait_until(lambda: bool(service.tickets))
        wait_until(lambda: service.tickets[0].ended.is_set())
        assert service.tickets[0].cancelled.is_set()
        connection.close()
        service.script = lambda _: service.tokenizer.encode(TEXT)
        assert_still_serving(live)


def test_a_template_without_end_does_not_stop_the_server(
    service: FakeService, tiny_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While one client's rendering runs in its process, others are answered."""
    import os

    (tmp_path / "sitecustomize.py").write_text(
        "import kvsieve.engine.template_sandbox as sandbox\nsandbox.MAX_STEPS = 10**18\n"
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    worker = TemplateWorker(source, cpu_s=1)
    served = fake_served(service, tiny_file, renderer=worker)
    with serving(served) as live:
        connection = begin(live, {"messages": [USER]}, path=CHAT)
        time.sleep(0.1)
        assert_still_serving(live)
        reply = b""
        while b"processor time" not in reply:
            part = connection.recv(65536)
            assert part, reply
            reply += part
        assert reply.startswith(b"HTTP/1.1 400 ")
        connection.close()
    worker.close()
