"""Names and shapes of a model's tensors, and the shape of a layer, from its configuration."""

from kvsieve.kernels.backend import LayerShape
from kvsieve.models.config import EMBEDDING, OUTPUT, ModelConfig
from kvsieve.models.registry import ARCHITECTURES

OUTPUT_NORM = "output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

Shape = tuple[int, ...]


def layer_matrices(config: ModelConfig, layer: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """Name and ``(rows, cols)`` of each matrix of a layer, by field of `LayerWeights`."""
    names = ARCHITECTURES[config.architecture].matrices
    shapes = layer_shape(config).matrix_shapes
    return {field: (_tensor_name(layer, part), shapes[field]) for field, part in names.items()}


def layer_norms(config: ModelConfig, layer: int) -> dict[str, tuple[str, int]]:
    """Name and length of each vector of a layer, likewise."""
    architecture = ARCHITECTURES[config.architecture]
    groups = (
        (architecture.hidden_norms, config.hidden_size),
        (architecture.head_norms, config.head_dim),
    )
    return {
        field: (_tensor_name(layer, part), length)
        for names, length in groups
        for field, part in names.items()
    }


def tensor_shapes(config: ModelConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Shapes, by name, of the tensors that a file of this configuration must and may have."""
    table = (config.vocab_size, config.hidden_size)
    required: dict[str, Shape] = {EMBEDDING: table, OUTPUT_NORM: (config.hidden_size,)}
    if not config.tie_embeddings:
        required[OUTPUT] = table
    for layer in range(config.num_layers):
        required.update(layer_matrices(config, layer).values())
        required.update((name, (length,)) for name, length in layer_norms(config, layer).values())
    optional: dict[str, Shape] = {}
    if ARCHITECTURES[config.architecture].rope_factors:
        optional[ROPE_FACTORS] = (config.rope_dim // 2,)
    return required, optional


def layer_shape(config: ModelConfig) -> LayerShape:
    """What the kernels need to know of a layer; every layer of a model has the same."""
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


def _tensor_name(layer: int, part: str) -> str:
    return f"blk.{layer}.{part}.weight"
