"""What distinguishes one architecture from another in a file: a value, not code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from kvsieve.kernels.backend import Gate

SourceKind = Literal["gguf", "checkpoint"]
"""A GGUF file, or a folder in the layout of the Transformers library."""

GGUF_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "attn_norm.weight",
        "q_proj": "attn_q.weight",
        "k_proj": "attn_k.weight",
        "v_proj": "attn_v.weight",
        "o_proj": "attn_output.weight",
        "ffn_norm": "ffn_norm.weight",
        "gate_proj": "ffn_gate.weight",
        "up_proj": "ffn_up.weight",
        "down_proj": "ffn_down.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "q_bias": "attn_q.bias",
        "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias",
        "attn_post_norm": "post_attention_norm.weight",
        "ffn_post_norm": "post_ffw_norm.weight",
    }
)
"""Name of each field of `LayerWeights` in a GGUF, without ``blk.N.``: the format fixes them."""

CHECKPOINT_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm.weight",
        "q_proj": "self_attn.q_proj.weight",
        "k_proj": "self_attn.k_proj.weight",
        "v_proj": "self_attn.v_proj.weight",
        "o_proj": "self_attn.o_proj.weight",
        "ffn_norm": "post_attention_layernorm.weight",
        "gate_proj": "mlp.gate_proj.weight",
        "up_proj": "mlp.up_proj.weight",
        "down_proj": "mlp.down_proj.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "q_bias": "self_attn.q_proj.bias",
        "k_bias": "self_attn.k_proj.bias",
        "v_bias": "self_attn.v_proj.bias",
    }
)
"""The same in a checkpoint, without ``model.layers.N.``; an architecture may differ."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture: what a layer has, and how files of both kinds write it down."""

    name: str
    """As ``general.architecture`` of a GGUF has it; also the prefix of its keys."""
    model_types: tuple[str, ...]
    """As ``model_type`` of a ``config.json`` has it."""
    vectors: tuple[str, ...] = ()
    """Fields of `LayerWeights` that a layer has beside matrices, ``attn_norm`` and ``ffn_norm``."""
    optional_vectors: tuple[str, ...] = ("q_bias", "k_bias", "v_bias")
    """Those that some models of the name have."""
    gate: Gate = "silu"
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of their width."""
    gguf_interleaved: bool = False
    """Whether rope in a GGUF rotates pairs (2i, 2i+1); else, and in checkpoints, (i, i + dim/2)."""
    gguf_rope_factors: bool = False
    """Whether a GGUF may divide the frequencies of rope (``rope_freqs.weight``)."""
    window_pattern: int = 0
    """Every N-th layer reads all tokens, the others a window; 0: a file's window is refused."""
    local_theta: float | None = None
    """Base of rope in layers with a window; None: as elsewhere."""
    checkpoint_parts: Mapping[str, str] = field(default_factory=lambda: CHECKPOINT_PARTS)
    checkpoint_norm_offset: float = 0.0
    """Added to the norms' weights of a checkpoint, which store ``w`` of a factor ``1 + w``."""
    checkpoint_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What holds where ``config.json`` says nothing: files leave out what equals these."""

    def parts(self, kind: SourceKind) -> Mapping[str, str]:
        """Name of each field of `LayerWeights` in a file of that kind."""
        return GGUF_PARTS if kind == "gguf" else self.checkpoint_parts
