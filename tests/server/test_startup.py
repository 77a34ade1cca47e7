"""The server listens before its model is there."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from kvsieve.errors import ModelFileError
from kvsieve.server.app import attach, create_app
from kvsieve.server.config import ServerConfig
from kvsieve.server.served import Served
from kvsieve.server.startup import Ready, Startup
from tests.server.conftest import fake_served
from tests.server.fake_service import FakeService
from tests.server.live import CHAT, COMPLETION, PATIENCE_S, TEXT, USER, error_of, post, serving_app

LOADING = {"code": 503, "message": "Loading model", "type": "unavailable_error", "param": None}


def test_while_the_model_loads_everybody_is_told_so(served: Served, service: FakeService) -> None:
    config = ServerConfig(port=0, api_keys=("sesame",))
    app = create_app(None, config)
    with serving_app(app, config) as live:
        keys = {"Authorization": "Bearer sesame"}
        for path in ("/health", "/v1/health", "/health/"):
            assert error_of(live.client.get(path), 503) == LOADING
        for path in ("/v1/models", "/metrics", "/slots", "/props", "/nothing"):
            reply = live.client.get(path, headers=keys)
            assert error_of(reply, 503) == LOADING
            assert reply.headers["retry-after"] == "2"
        error_of(live.client.get("/v1/models"), 401)
        live.client.headers.update(keys)
        for path, body in ((CHAT, {"messages": [USER]}), (COMPLETION, b"no JSON")):
            assert error_of(post(live, path, body), 503) == LOADING
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="sesame", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="Loading model"):
                client.completions.create(model="m", prompt="x")
            attach(app, served, config)
            assert client.completions.create(model="m", prompt="x").choices[0].text == TEXT
        assert live.client.get("/health").json() == {"status": "ok"}


class Steps:
    """A load that goes on when it is told to."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.config = ServerConfig(port=0, alias="later")
        self.said: list[str] = []
        self.go = threading.Event()
        self.fail: Exception | None = None
        self.loaded = threading.Event()
        self.failed = threading.Event()

    @contextlib.contextmanager
    def load(self, check: Any) -> Iterator[Ready]:
        self.said.append("opened")
        try:
            while not self.go.wait(0.001):
                check(1, 2)
            if self.fail is not None:
                raise self.fail
            yield Ready(served=self.served, config=self.config)
        finally:
            self.said.append("closed")

    def startup(self, app: FastAPI) -> Startup:
        return Startup(
            app,
            self.load,
            on_loaded=lambda _: self.loaded.set(),
            on_failed=self.failed.set,
        )


@pytest.fixture
def steps(service: FakeService, tiny_file: Path) -> Steps:
    return Steps(fake_served(service, tiny_file))


def test_a_model_comes_and_goes(steps: Steps, service: FakeService) -> None:
    app = create_app(None, ServerConfig(port=0))
    startup = steps.startup(app)
    startup.begin()
    startup.end_requests()  # nothing runs yet
    assert app.state.context is None
    steps.go.set()
    assert steps.loaded.wait(PATIENCE_S)
    assert app.state.context.served is steps.served
    assert app.state.context.config is steps.config
    startup.end_requests()
    assert service.is_closed
    assert steps.said == ["opened"]
    startup.close()
    assert steps.said == ["opened", "closed"]


def test_a_load_that_fails_is_told_at_the_end(steps: Steps) -> None:
    startup = steps.startup(create_app(None, ServerConfig(port=0)))
    steps.fail = ModelFileError("[gguf] cut")
    steps.go.set()
    startup.begin()
    assert steps.failed.wait(PATIENCE_S)
    with pytest.raises(ModelFileError, match="cut"):
        startup.close()
    assert steps.said == ["opened", "closed"]


def test_a_server_that_is_stopped_does_not_load_to_the_end(steps: Steps) -> None:
    startup = steps.startup(create_app(None, ServerConfig(port=0)))
    startup.begin()
    startup.close()
    assert steps.said == ["opened", "closed"]
    assert not steps.loaded.is_set()
    assert not steps.failed.is_set()


def test_a_server_that_never_listened_has_nothing_to_close(steps: Steps) -> None:
    steps.startup(create_app(None, ServerConfig(port=0))).close()
    assert steps.said == []
