"""Names and shapes of a model's tensors, and the shape of a layer, from its configuration."""

from kvsieve.kernels.backend import LayerShape
from kvsieve.models import checkpoint_config, config
from kvsieve.models.architecture import Architecture
from kvsieve.models.config import ModelConfig
from kvsieve.models.registry import ARCHITECTURES

OUTPUT_NORM = "output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

Shape = tuple[int, ...]


def embedding_name(model: ModelConfig) -> str:
    """Name of the embedding."""
    return config.EMBEDDING if model.source == "gguf" else checkpoint_config.EMBEDDING


def output_name(model: ModelConfig) -> str:
    """Name of the output matrix, which may be the embedding."""
    if model.tie_embeddings:
        return embedding_name(model)
    return config.OUTPUT if model.source == "gguf" else checkpoint_config.OUTPUT


def output_norm_name(model: ModelConfig) -> str:
    """Name of the norm before the output matrix."""
    return OUTPUT_NORM if model.source == "gguf" else "model.norm.weight"


def layer_matrices(model: ModelConfig, layer: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """Name and ``(rows, cols)`` of each matrix of a layer, by field of `LayerWeights`."""
    shapes = layer_shape(model, layer).matrix_shapes
    return {field: (_tensor_name(model, layer, field), shape) for field, shape in shapes.items()}


def layer_vectors(model: ModelConfig, layer: int) -> dict[str, tuple[str, int]]:
    """Name and length of each vector that a layer must have, likewise."""
    return _vectors(model, layer, ("attn_norm", "ffn_norm", *_architecture(model).vectors))


def optional_vectors(model: ModelConfig, layer: int) -> dict[str, tuple[str, int]]:
    """The same of those that a layer may have."""
    return _vectors(model, layer, _architecture(model).optional_vectors)


def tensor_shapes(model: ModelConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Shapes, by name, of the tensors that a file of this configuration must and may have."""
    table = (model.vocab_size, model.hidden_size)
    required: dict[str, Shape] = {
        embedding_name(model): table,
        output_norm_name(model): (model.hidden_size,),
        output_name(model): table,
    }
    optional: dict[str, Shape] = {}
    for layer in range(model.num_layers):
        required.update(layer_matrices(model, layer).values())
        for into, vectors in (
            (required, layer_vectors(model, layer)),
            (optional, optional_vectors(model, layer)),
        ):
            into.update((name, (length,)) for name, length in vectors.values())
    if model.source == "gguf" and _architecture(model).gguf_rope_factors:
        optional[ROPE_FACTORS] = (model.rope_dim // 2,)
    if model.source == "checkpoint" and model.tie_embeddings:
        optional[checkpoint_config.OUTPUT] = table  # saved although the embedding serves
    return required, optional


def layer_shape(model: ModelConfig, layer: int = 0) -> LayerShape:
    """What the kernels need to know of a layer."""
    return LayerShape(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope_interleaved=model.rope_interleaved,
        rope_dim=model.rope_dim,
        attention_scale=model.attention_scale,
        gate=model.gate,
        window=model.windows[layer],
    )


def is_norm(field: str) -> bool:
    """Whether a vector of `LayerWeights` is a norm's, not a bias."""
    return field.endswith("_norm")


def _vectors(model: ModelConfig, layer: int, fields: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    lengths = layer_shape(model, layer).vector_lengths
    return {field: (_tensor_name(model, layer, field), lengths[field]) for field in fields}


def _architecture(model: ModelConfig) -> Architecture:
    return ARCHITECTURES[model.architecture]


def _tensor_name(model: ModelConfig, layer: int, field: str) -> str:
    prefix = f"blk.{layer}." if model.source == "gguf" else f"model.layers.{layer}."
    return prefix + _architecture(model).parts(model.source)[field]
