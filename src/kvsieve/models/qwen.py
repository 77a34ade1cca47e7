"""Qwen 2 and 3, and the language model of Qwen3-VL, as differences to Llama.

Text alone has the same position in all three parts of Qwen3-VL's rope, which is then plain rope.
"""

from dataclasses import replace
from types import MappingProxyType

from kvsieve.models.llama import LLAMA

_DEFAULTS = {**LLAMA.checkpoint_defaults, "max_position_embeddings": 32768}

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    model_types=("qwen2",),
    vectors=("q_bias", "k_bias", "v_bias"),
    optional_vectors=(),
    # The file has the checkpoint's rows as they are: a dimension rotates with one half a head away.
    gguf_interleaved=False,
    gguf_rope_factors=False,
    checkpoint_defaults=MappingProxyType(
        {**_DEFAULTS, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
    ),
)

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model_types=("qwen3",),
    vectors=("q_norm", "k_norm"),
    optional_vectors=("q_bias", "k_bias", "v_bias"),
    checkpoint_defaults=MappingProxyType({**QWEN2.checkpoint_defaults, "head_dim": 128}),
)

QWEN3_VL = replace(
    QWEN3,
    name="qwen3vl",
    model_types=("qwen3_vl", "qwen3_vl_text"),
    checkpoint_defaults=MappingProxyType(
        {**_DEFAULTS, "max_position_embeddings": 128000, "head_dim": 128, "rope_theta": 500000.0}
    ),
)
