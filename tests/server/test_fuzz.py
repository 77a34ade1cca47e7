"""Requests made from the server's own OpenAPI document: odd ones by the thousand, no 5xx."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from kvsieve.server.config import ServerConfig
from kvsieve.server.served import Served
from tests.server.fake_service import FakeService
from tests.server.live import Live, serving

schemathesis = pytest.importorskip("schemathesis", reason="the fuzzer is not installed")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fuzzed(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = tmp_path_factory.mktemp("slots")
    with serving(served, ServerConfig(port=0, slot_save_path=str(folder))) as live:
        yield live


def test_nothing_breaks_the_server(fuzzed: Live, service: FakeService) -> None:
    document = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) >= 14
    for operation in operations:
        assert statuses(operation), operation.label


def statuses(operation: Any) -> set[int]:
    """What the server answers to odd requests for one endpoint, all of them checked."""
    seen: set[int] = set()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        reply = case.call()
        seen.add(reply.status_code)
        assert reply.status_code < 500, reply.text
        if reply.status_code >= 400:
            assert {"message", "type", "param", "code"} <= set(reply.json()["error"])

    ask()
    return seen


def test_the_document_describes_every_endpoint(fuzzed: Live) -> None:
    paths = fuzzed.client.get("/openapi.json").json()["paths"]
    assert {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/completion"),
        *("/v1/tokenize", "/v1/detokenize", "/v1/apply-template", "/v1/health", "/v1/props"),
        *("/v1/slots", "/v1/slots/{id_slot}", "/v1/metrics"),
    } <= set(paths)
    fields = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert fields["schema"]["$ref"].endswith("/ChatRequest")
