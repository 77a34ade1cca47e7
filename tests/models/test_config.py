"""The model's shape from metadata: right values, and every wrong one refused by name."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvsieve.errors import ModelFileError
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import GgufFile, TensorInfo
from tests.models.test_gguf import smollm2
from tests.tiny_model import write_tiny_gguf


def tiny(tmp_path: Path, **options: Any) -> ModelConfig:
    with GgufFile.open(write_tiny_gguf(tmp_path / "tiny.gguf", **options)) as file:
        return ModelConfig.from_gguf(file)


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def from_metadata(
    changes: dict[str, Any], *, vocab: int = 300, shape: tuple[int, ...] | None = None
) -> ModelConfig:
    merged = {**METADATA, **changes}
    embedding = TensorInfo(
        name="token_embd.weight",
        shape=shape or (vocab, 64),
        ggml_type="F32",
        offset=0,
        nbytes=vocab * 256,
    )
    return ModelConfig.from_metadata(
        {key: value for key, value in merged.items() if value is not None},
        tensors={embedding.name: embedding},
    )


def test_values_of_a_tiny_model(tmp_path: Path) -> None:
    config = tiny(tmp_path, head_dim=32, tie=False, vocab=300, **{"llama.rope.freq_base": 5e5})
    assert (config.architecture, config.name) == ("llama", "tiny")
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 64, 96)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.rope_dim, config.rope_theta, config.rope_interleaved) == (32, 5e5, True)
    assert (config.context_length, config.vocab_size, config.tie_embeddings) == (512, 300, False)
    assert (config.bos_id, config.eos_id) == (1, 2)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.attention_scale == 1 / math.sqrt(32)
    assert tiny(tmp_path).tie_embeddings


def test_defaults_where_the_format_has_them() -> None:
    config = from_metadata({"llama.attention.head_count_kv": None})
    assert config.num_kv_heads == 4
    assert (config.head_dim, config.rope_dim, config.rope_theta) == (16, 16, 10000.0)
    assert (config.bos_id, config.eos_id, config.name) == (None, None, "unnamed")
    assert from_metadata({"llama.attention.scale": 0.5}).attention_scale == 0.5


def test_values_of_the_real_model() -> None:
    config = ModelConfig.from_gguf(GgufFile.open(smollm2()))
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (576, 1536, 64)
    assert (config.context_length, config.vocab_size, config.rope_theta) == (8192, 49152, 1e5)
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("general.architecture", (None, "qwen2", "", 3)),
        ("llama.block_count", (None, 0, 513, 2**32 - 1, "2", 2.0, True, np.array([2, 2]))),
        ("llama.context_length", (None, 0, 2**31)),
        ("llama.embedding_length", (None, 0, 16, 65, 80, 2**31)),
        ("llama.feed_forward_length", (None, 0, 97, 2**31, np.array([96, 96], np.int32))),
        ("llama.attention.head_count", (None, 0, 3, 5, 2048, np.array([4, 4], np.int32))),
        ("llama.attention.head_count_kv", (0, 3, 8, np.array([2, 2], np.int32))),
        ("llama.attention.key_length", (0, 8, 24, 4096)),
        ("llama.attention.value_length", (0, 32)),
        ("llama.attention.layer_norm_rms_epsilon", (None, 0.0, -1e-5, 1.0, math.nan, math.inf, "")),
        ("llama.attention.scale", (-1.0, math.nan, "x")),
        ("llama.rope.freq_base", (0.0, -1.0, math.nan, math.inf, "1e4")),
        ("llama.rope.dimension_count", (0, 1, 15, 32)),
        ("llama.vocab_size", (0, 299, 301, 2**40, "300")),
        ("tokenizer.ggml.bos_token_id", (300, 2**32 - 1, -1, "1")),
        ("tokenizer.ggml.eos_token_id", (300,)),
        ("tokenizer.ggml.tokens", (["a"] * 299, ["a"] * 301, [], np.zeros(300, np.int32), "abc")),
        (
            "tokenizer.ggml.scores",
            (np.zeros(299, np.float32), np.zeros(300, np.int32), ["a"] * 300),
        ),
        ("tokenizer.ggml.token_type", (np.zeros(301, np.int32), np.zeros(300, np.float32), 3)),
        ("split.count", (2, 0)),
    ],
)
def test_wrong_values_are_named(key: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ModelFileError, match=r"^\[ModelConfig\] ") as caught:
            from_metadata({key: value})
        named = {
            "llama.attention.head_count_kv": "head_count",
            "llama.attention.head_count": "head_count",
        }.get(key, key)
        assert named in str(caught.value), value
        assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "refused", "neutral"),
    [
        ("llama.expert_count", 8, 0),
        ("llama.expert_count", np.array([8]), 0),
        ("llama.attention.sliding_window", 256, 512),
        ("llama.attention.sliding_window", np.array([0, 4]), 0),
        ("llama.attention.causal", False, True),
        ("llama.attention.clamp_kqv", 8.0, 0.0),
        ("llama.rope.scaling.type", "yarn", "none"),
        ("llama.rope.scaling.type", "linear", "none"),
        ("llama.rope.scaling.factor", 4.0, 1.0),
        ("llama.rope.scale_linear", 2.0, 1.0),
        ("llama.logit_scale", 0.5, 1.0),
        ("llama.final_logit_softcapping", 30.0, 0.0),
    ],
)
def test_what_would_change_the_result_is_refused(key: str, refused: Any, neutral: Any) -> None:
    with pytest.raises(ModelFileError, match=key.replace(".", r"\.") + ".*support"):
        from_metadata({key: refused})
    assert from_metadata({key: neutral}) == from_metadata({})


def test_embedding_decides_the_vocabulary() -> None:
    assert from_metadata({}, vocab=77).vocab_size == 77
    for shape in ((300,), (300, 64, 1), (2**25, 64)):
        with pytest.raises(ModelFileError, match=r"token_embd\.weight"):
            from_metadata({}, shape=shape)
    with pytest.raises(ModelFileError, match=r"token_embd\.weight.*got none"):
        ModelConfig.from_metadata(METADATA, tensors={})


def test_wrong_types_in_a_file_arrive_as_named_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.block_count.*got 2\.0"):
        tiny(tmp_path, **{"llama.block_count": (2.0, gguf.GGUFValueType.FLOAT32)})
