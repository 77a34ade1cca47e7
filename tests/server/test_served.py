"""What a loaded model is called."""

from pathlib import Path

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.server.served import served_model
from tests.server.fake_service import FakeService
from tests.tiny_model import write_tiny_gguf


@pytest.mark.parametrize(
    ("file", "given", "name"),
    [
        ("Qwen2.5-0.5B.Q8_0.gguf", None, "Qwen2.5-0.5B.Q8_0"),
        ("no-suffix-2.5", None, "no-suffix-2.5"),
        # Files from the Hub lie in folders that are called by a hash.
        ("model.gguf", "user/repo:Q8_0", "user/repo:Q8_0"),
    ],
)
def test_names(
    tmp_path: Path, tokenizer: Tokenizer, file: str, given: str | None, name: str
) -> None:
    path = write_tiny_gguf(tmp_path / file)
    with LLM(path, backend="reference") as llm:
        served = served_model(llm, FakeService(tokenizer, "x"), name=given)
        served.close()
    assert (served.name, served.file_name) == (name, file)
