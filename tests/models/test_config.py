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
from kvsieve.models.rope import RopeScaling, rope_tables
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
        ("general.architecture", (None, "mamba", "", 3)),
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
        ("llama.rope.scaling.type", (3, np.array([1]))),
        ("llama.attention.sliding_window", (-1, 2.0, np.array([0, 4]))),
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
        ("llama.attention.causal", False, True),
        ("llama.attention.clamp_kqv", 8.0, 0.0),
        ("llama.rope.scaling.type", "longrope", "none"),
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


def test_rope_scaling_of_a_file() -> None:
    assert from_metadata({}).rope_scaling is None
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert from_metadata(linear).rope_scaling == RopeScaling(kind="linear", factor=4.0)
    yarn = linear | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.rope.scaling.yarn_attn_factor": 0.5,
    }
    scaling = from_metadata(yarn).rope_scaling
    assert scaling is not None
    assert (scaling.original_context, scaling.beta_fast, scaling.beta_slow) == (128, 16.0, 1.0)
    assert scaling.amplitude == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    for key, value in (("yarn_ext_factor", 0.5), ("yarn_log_multiplier", 0.1)):
        with pytest.raises(ModelFileError, match=f"{key}.*no other is supported"):
            from_metadata(yarn | {f"llama.rope.scaling.{key}": value})


def gemma3(layers: int, **changes: Any) -> ModelConfig:
    """As converters write it: nothing about the pattern of layers or the base of local ones."""
    renamed = {key.replace("llama", "gemma3"): value for key, value in METADATA.items()}
    settings = {
        "general.architecture": "gemma3",
        "gemma3.block_count": layers,
        "gemma3.context_length": 32768,
        "gemma3.attention.key_length": 32,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1e6,
    }
    return from_metadata(renamed | settings | changes)


@pytest.mark.parametrize("layers", [26, 34, 48])
def test_rop_02_layers_of_gemma_3(layers: int) -> None:
    """Layers 5, 11, 17, ... read everything; pair 0 at 8000 is at 1000 rad where divided by 8."""
    scaled = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = gemma3(layers, **scaled)
    assert config.full_layers == tuple(range(5, layers, 6))
    assert set(config.windows) == {0, 512}
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.embedding_scale == 8.0
    assert config.norm_offset == 0  # a GGUF has 1 + w already
    for with_scaling, angle in ((config, 1000.0), (gemma3(layers), 8000.0)):
        cos, sin = rope_tables(
            np.array([8000]), rope_dim=32, theta=1e6, scaling=with_scaling.rope_scaling
        )
        assert (cos[0, 0], sin[0, 0]) == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-6)


def test_gemma_3_without_a_window_and_with_another_pattern() -> None:
    assert gemma3(7, **{"gemma3.attention.sliding_window": 32768}).full_layers == tuple(range(7))
    pattern = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 5000.0}
    config = gemma3(5, **pattern)
    assert (config.full_layers, config.local_rope_theta) == ((1, 3), 5000.0)


def test_the_gemma_3_that_scales_queries_by_something_else_than_its_heads_width() -> None:
    assert gemma3(61).attention_scale == pytest.approx(32**-0.5)
    assert gemma3(62).attention_scale == pytest.approx((64 / 4) ** -0.5)


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
