"""The Llama architecture as a difference: which tensors a file has, and the shape of a layer."""

from kvsieve.kernels.backend import LayerShape
from kvsieve.models.config import EMBEDDING, OUTPUT, ModelConfig

OUTPUT_NORM = "output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

MATRICES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
"""Matrices of a layer: field of `LayerWeights`, and its name in the file."""

NORMS = {"attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}
"""Vectors of a layer, likewise."""


def tensor_name(layer: int, part: str) -> str:
    """Name in the file of a part of a layer, such as ``attn_q``."""
    return f"blk.{layer}.{part}.weight"


def tensor_shapes(
    config: ModelConfig,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes, by name, of the tensors that a file of this configuration must and may have."""
    table = (config.vocab_size, config.hidden_size)
    required: dict[str, tuple[int, ...]] = {EMBEDDING: table, OUTPUT_NORM: (config.hidden_size,)}
    if not config.tie_embeddings:
        required[OUTPUT] = table
    for layer in range(config.num_layers):
        for field, shape in layer_shape(config).matrix_shapes.items():
            required[tensor_name(layer, MATRICES[field])] = shape
        for part in NORMS.values():
            required[tensor_name(layer, part)] = (config.hidden_size,)
    return required, {ROPE_FACTORS: (config.rope_dim // 2,)}


def layer_shape(config: ModelConfig) -> LayerShape:
    """What the kernels need to know of a layer; every layer of a Llama has the same."""
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_interleaved=config.rope_interleaved,
        rope_dim=config.rope_dim,
        attention_scale=config.attention_scale,
    )
