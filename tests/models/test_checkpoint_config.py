"""``config.json``: right values, old and new spellings, and every wrong one refused by name."""

import math
from typing import Any

import pytest

from kvsieve.errors import ModelFileError
from kvsieve.models.checkpoint_config import checkpoint_config
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf_header import TensorInfo
from kvsieve.models.rope import RopeScaling
from tests.checkpoints import CONFIGS


def read(values: dict[str, Any], *, rows: int = 32, width: int = 64) -> ModelConfig:
    embedding = TensorInfo(
        name="model.embed_tokens.weight", shape=(rows, width), ggml_type="F32", offset=0, nbytes=0
    )
    return checkpoint_config(values, tensors={embedding.name: embedding}, name="tiny")


def changed(name: str, **changes: Any) -> ModelConfig:
    return read({key: v for key, v in (CONFIGS[name] | changes).items() if v != "absent"})


def test_values() -> None:
    config = changed("qwen3", bos_token_id=None, eos_token_id=[3, 5])
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 64, 96)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.rope_theta, config.rope_dim, config.rope_interleaved) == (1e6, 32, False)
    assert (config.context_length, config.vocab_size, config.tie_embeddings) == (512, 32, True)
    assert (config.bos_id, config.eos_id) == (None, 3)
    assert config.attention_scale == pytest.approx(32**-0.5)
    assert (
        changed(
            "qwen3",
            partial_rotary_factor=0.5,
            rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        ).rope_dim
        == 16
    )


def test_gemma_3() -> None:
    config = changed("gemma3")
    assert config.full_layers == (5,)
    assert config.windows[0] == 40
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert (config.gate, config.embedding_scale, config.norm_offset) == ("gelu", 8.0, 1.0)
    assert config.attention_scale == pytest.approx(24**-0.5)
    assert config.tie_embeddings


def test_a_gemma_3_that_leaves_out_what_equals_the_defaults() -> None:
    """As the 4B's text_config does: no heads, no vocabulary, no bases of rope."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(
        {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]},
        rows=200,
        width=2560,
    )
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert config.full_layers == (5, 11, 17, 23, 29)
    assert config.context_length == 131072
    assert config.attention_scale == 1 / 16
    assert config.eos_id == 1


def test_old_and_new_spellings_of_rope_say_the_same() -> None:
    old = changed("llama3-rope")
    parameters = {**CONFIGS["llama3-rope"]["rope_scaling"], "rope_theta": 500000.0}
    new = changed("llama3-rope", rope_theta="absent", rope_scaling=None, rope_parameters=parameters)
    assert new == old
    assert old.rope_scaling is not None
    assert (old.rope_scaling.kind, old.rope_scaling.original_context) == ("llama3", 64)
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    gemma = changed(
        "gemma3", rope_theta="absent", rope_local_base_freq="absent", rope_parameters=both
    )
    assert gemma == changed("gemma3-linear")


def test_a_part_of_each_head_may_rotate() -> None:
    assert changed("llama").rope_dim == 16
    assert changed("llama", partial_rotary_factor=0.5).rope_dim == 8
    new = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    assert changed("llama", rope_parameters=new).rope_dim == 4


def test_yarn() -> None:
    config = changed("yarn-rope")
    assert config.rope_scaling is not None
    assert config.rope_scaling.amplitude == pytest.approx(1 + 0.1 * math.log(4))
    assert config.context_length == 512
    assert changed("yarn-rope", max_position_embeddings=128).context_length == 512
    given = {**CONFIGS["yarn-rope"]["rope_scaling"], "mscale": 2.0, "mscale_all_dim": 1.0}
    scaling = changed("yarn-rope", rope_scaling=given).rope_scaling
    assert scaling is not None
    want = (1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4))
    assert scaling.amplitude == pytest.approx(want)
    scaling = changed("yarn-rope", rope_scaling={**given, "attention_factor": 1.25}).rope_scaling
    assert scaling is not None
    assert scaling.amplitude == 1.25


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mistral", {}, (50, 50)),
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("mistral", {"sliding_window": "absent", "max_position_embeddings": 32768}, (4096, 4096)),
        ("mistral", {"sliding_window": 512}, (0, 0)),  # no context outgrows it
        ("qwen2", {"sliding_window": 64, "max_window_layers": 1}, (0, 0)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            (0, 64),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 28},
            (0, 0),
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (64, 0),
        ),
        ("llama", {}, (0, 0)),
    ],
)
def test_windows(name: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert changed(name, **changes).windows == windows


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"model_type": "mamba"}, r"model_type: expected one of .*llama.*, got 'mamba'"),
        ("llama", {"model_type": "absent"}, "model_type: expected a string, got nothing"),
        ("qwen3-vl", {"text_config": {"model_type": "mamba"}}, "model_type: .*got 'mamba'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: expected none"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: expected one of silu, swish, got 'gelu'"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation: expected one of gelu_pyt"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected none"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected none"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: .*support"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers: expected an integer"),
        ("llama", {"hidden_size": 63}, "hidden_size: expected an integer .*multiple of 32"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads: expected a multiple of num_key",
        ),
        ("llama", {"head_dim": 24}, "head_dim: expected .*multiple of 16, got 24"),
        ("llama", {"rope_theta": "1e4"}, "rope_theta: expected a number"),
        ("llama", {"rope_scaling": []}, "rope_scaling: expected an object"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: .*'dynamic'"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type: .*'longrope'"),
        ("llama", {"rope_scaling": {"type": "su"}}, "rope_type: .*'su'"),
        ("llama", {"rope_parameters": {"rope_type": "ntk"}}, "rope_parameters.rope_type: .*'ntk'"),
        ("llama", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected a number from"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: expected a number"),
        (
            "llama3-rope",
            {"rope_scaling": {**CONFIGS["llama3-rope"]["rope_scaling"], "high_freq_factor": 1.0}},
            "high_freq_factor: expected more than low_freq_factor",
        ),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: expected a list of 2"),
        ("qwen2", {"layer_types": ["full_attention", "x"]}, "layer_types: expected full_att.*'x'"),
        ("llama", {"eos_token_id": 32}, "eos_token_id: expected a token id below 32, got 32"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
    ],
)
def test_wrong_values_are_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=rf"\[ModelConfig\] config\.json: .*{words}"):
        changed(name, **changes)


def test_the_embedding_decides_the_vocabulary() -> None:
    with pytest.raises(ModelFileError, match=r"tensor 'model\.embed_tokens\.weight'"):
        checkpoint_config(CONFIGS["llama"], tensors={}, name="x")
    assert read(CONFIGS["llama"], rows=77).vocab_size == 77
