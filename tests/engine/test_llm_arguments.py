"""What an LLM and its calls refuse: by name, and before anything runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import CapacityError, ConfigError
from tests.tiny_model import BOS_ID, write_tiny_gguf

CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, backend="reference") as llm:
        yield llm


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(model: Path, llm: LLM):
    with pytest.raises(CapacityError, match=r"at most 256 tokens .* got 257"):
        llm.stream([5] * 257)
    small = LLM(model, backend="reference", ctx_size=40)
    assert small.ctx_size == 40
    with pytest.raises(CapacityError, match=r"at most 40 tokens .* got 41"):
        small.generate([5] * 41)


@pytest.mark.parametrize("ids", [[3, -1], [3, 10**6], [[3]], [1.5], ["a"], None, 7])
def test_bad_token_ids_are_refused_before_anything_runs(llm: LLM, ids: Any):
    with pytest.raises(ConfigError, match=r"\[LLM\] prompt: expected"):
        llm.stream(ids)


def test_an_empty_prompt_starts_from_bos(llm: LLM):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    empty = llm.generate("", params)
    assert empty.prompt_tokens == 1
    assert empty.token_ids == llm.generate([BOS_ID], params).token_ids


def test_an_empty_prompt_without_bos(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.bos_token_id": None})
    with pytest.raises(ConfigError, match="expected at least one token"):
        LLM(path, backend="reference").generate("")


@pytest.mark.parametrize("cache_type", ["q5_1", ("q8_0",), ("q8_0", "int8"), 8, None])
def test_unknown_cache_types(model: Path, cache_type: Any):
    with pytest.raises(ConfigError, match="cache_type: expected one of f32, f16, q8_0, q4_0"):
        LLM(model, backend="reference", cache_type=cache_type)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse": "even"}, "sparse: expected SparseAttention or None"),
        ({"sparse": True}, "sparse: expected SparseAttention or None"),
        ({"threads": "2"}, "threads: expected at least 1, got '2'"),
        ({"threads": 1.5}, "threads: expected at least 1, got 1.5"),
        ({"ctx_size": 40.5}, "ctx_size: expected 1 to 256 tokens, .* got 40.5"),
        ({"ctx_size": -1}, "ctx_size: expected 1 to 256 tokens, .* got -1"),
        ({"prefill_chunk": 33.5}, "prefill_chunk: expected at least 1 token, got 33.5"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected at least 1 token, got 0"),
        ({"backend": "gpu"}, "backend: expected one of native, reference, got 'gpu'"),
    ],
)
def test_wrong_options_are_refused_by_name(model: Path, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        LLM(model, **{"backend": "reference", **options})


def test_wrong_arguments_of_a_call_are_refused_by_name(llm: LLM):
    with pytest.raises(ConfigError, match=r"sparse: expected SparseAttention or None .* got True"):
        llm.stream("text", sparse=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"params: expected SamplingParams, got \{'max"):
        llm.stream("text", {"max_tokens": 3})  # type: ignore[arg-type]


def test_logits_need_a_prompt(llm: LLM):
    with pytest.raises(ConfigError, match="prompt_len: expected 1 to 5"):
        llm.logits([5] * 5, prompt_len=6)
