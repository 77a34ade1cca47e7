"""Llama 2 and 3, and what is built like them (SmolLM2); Mistral, which may have a window."""

from dataclasses import replace
from types import MappingProxyType

from kvsieve.models.architecture import Architecture

LLAMA = Architecture(
    name="llama",
    model_types=("llama",),
    # Converters put the rows of queries and keys in the order that makes neighbours rotate.
    gguf_interleaved=True,
    gguf_rope_factors=True,
    checkpoint_defaults=MappingProxyType(
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    ),
)

# A GGUF of Mistral calls itself llama.
MISTRAL = replace(
    LLAMA,
    name="llama",
    model_types=("mistral",),
    checkpoint_defaults=MappingProxyType(
        {
            **LLAMA.checkpoint_defaults,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        }
    ),
)
