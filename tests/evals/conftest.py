from collections.abc import Iterator

import pytest

from kvsieve.engine.llm import LLM
from tests.tiny_model import write_tiny_gguf


@pytest.fixture(scope="package")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny model on the specification, its context a little over 500 tokens."""
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", heads=2, kv_heads=1, context=544
    )
    with LLM(path, backend="reference") as loaded:
        yield loaded
