"""A model file without a vocabulary: token ids work everywhere, text is refused in one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import ConfigError, ModelFileError, TemplateError
from tests.tiny_model import BOS_ID, EOS_ID, write_tiny_gguf

REFUSED = r"^\[LLM\] \w+: expected token ids and no text.* tiny has no vocabulary, got "
IDS = [40, 41, 42, 43, 44]


def write(path: Path, **options: Any) -> Path:
    return write_tiny_gguf(path, architecture="qwen3", weight_type="Q8_0", **options)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write(tmp_path_factory.mktemp("model") / "tiny.gguf", no_vocab=True)
    with LLM(path, backend="reference") as llm:
        yield llm


def test_ids_give_what_the_same_weights_give_with_a_vocabulary(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=3)
    with LLM(write(tmp_path / "full.gguf"), backend="reference") as full:
        want = full.generate(IDS, params)
        assert full.logits(IDS).tobytes() == llm.logits(IDS).tobytes()
    got = llm.generate(IDS, params)
    assert want.text != ""
    assert got.text == ""
    assert (got.token_ids, got.finish_reason) == (want.token_ids, "length")
    assert [event.token_id for event in llm.stream(IDS, params)][:-1] == got.token_ids
    assert llm.generate(np.array(IDS), params).token_ids == got.token_ids


def test_ids_beyond_the_embedding_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="token ids from 0 to 287, got 288"):
        llm.generate([288])


def test_text_is_refused_before_anything_runs(llm: LLM) -> None:
    calls: list[Any] = [
        lambda: llm.generate("hello"),
        lambda: llm.stream(""),
        lambda: llm.tokenizer.encode("hello"),
        lambda: llm.tokenizer.decode(IDS),
        lambda: llm.tokenizer.token_text(40),
        lambda: llm.generate(IDS, SamplingParams(stop="x")),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=REFUSED):
            call()


def test_a_conversation_is_refused_with_a_template_and_without(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(TemplateError, match="chat template, got none"):
        llm.chat_prompt(messages)
    path = write(tmp_path / "m.gguf", no_vocab=True, **{"tokenizer.chat_template": "x"})
    with LLM(path, backend="reference") as other, pytest.raises(ConfigError, match=REFUSED):
        other.chat_prompt(messages)


def test_ids_that_the_file_names_still_count(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        llm.generate([])
    assert llm.tokenizer.eos_ids == frozenset()
    ids = {"tokenizer.ggml.bos_token_id": BOS_ID, "tokenizer.ggml.eos_token_id": EOS_ID}
    with LLM(write(tmp_path / "m.gguf", no_vocab=True, **ids), backend="reference") as other:
        assert other.tokenizer.eos_ids == {EOS_ID}
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        assert other.generate([], params).token_ids == llm.generate([BOS_ID], params).token_ids


def test_only_a_file_that_says_so_may_lack_a_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", no_vocab=True, **{"tokenizer.ggml.model": None})
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.model: expected 'gpt2'"):
        LLM(path, backend="reference")
