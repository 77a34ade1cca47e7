"""Gemma 3: scaled embeddings, norms before and after each part, windows in 5 of 6 layers."""

from types import MappingProxyType

from kvsieve.models.architecture import CHECKPOINT_PARTS, Architecture

GEMMA3 = Architecture(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    vectors=("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm"),
    optional_vectors=(),
    gate="gelu",
    scaled_embedding=True,
    window_pattern=6,
    local_theta=10000.0,
    checkpoint_parts=MappingProxyType(
        {
            **CHECKPOINT_PARTS,
            "attn_post_norm": "post_attention_layernorm.weight",
            "ffn_norm": "pre_feedforward_layernorm.weight",
            "ffn_post_norm": "post_feedforward_layernorm.weight",
        }
    ),
    checkpoint_norm_offset=1.0,
    checkpoint_defaults=MappingProxyType(
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        }
    ),
)
