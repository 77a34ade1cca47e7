"""Llama 2 and 3, and what is built like them (SmolLM2, Mistral without its window)."""

from types import MappingProxyType

from kvsieve.models.architecture import Architecture

LLAMA = Architecture(
    name="llama",
    # Converters put the rows of queries and keys in the order that makes neighbours rotate.
    rope_interleaved=True,
    rope_factors=True,
    matrices=MappingProxyType(
        {
            "q_proj": "attn_q",
            "k_proj": "attn_k",
            "v_proj": "attn_v",
            "o_proj": "attn_output",
            "gate_proj": "ffn_gate",
            "up_proj": "ffn_up",
            "down_proj": "ffn_down",
        }
    ),
    hidden_norms=MappingProxyType({"attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}),
    head_norms=MappingProxyType({}),
)
