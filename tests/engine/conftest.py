"""A service on a tiny model, for the tests of whatever it is made of."""

from collections.abc import Iterator

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.service import Service
from tests.engine.serving import CONTEXT, MakeService
from tests.tiny_model import write_tiny_gguf


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    pytest.importorskip("kvsieve._native", reason="the C++ core is not built")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, head_dim=32, weight_type="Q8_0", context=CONTEXT)
    with LLM(path, threads=2, prefill_chunk=64) as llm:
        yield llm


@pytest.fixture
def make_service(served: LLM) -> Iterator[MakeService]:
    """Makes services and closes them; each owns the model's thread for itself."""
    made: list[Service] = []

    def make(**settings: object) -> Service:
        settings = {"cache_ram_bytes": 1 << 24, **settings}
        made.append(Service(served, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for service in made:
        service.close()
