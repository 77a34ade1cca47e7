"""What a model file says about its model: one frozen value, every number checked for range.

Anything that would change the result and that we do not compute (another architecture, expert
layers, rope scaling, a sliding window) is refused by name, never ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsieve.errors import ModelFileError
from kvsieve.models.gguf import GgufFile, TensorInfo
from kvsieve.models.registry import ARCHITECTURES

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

# Largest values accepted: well above any published model, low enough to bound what is allocated.
MAX_LAYERS = 512
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 24
MAX_VOCAB = 1 << 24

# Matrix rows are cut into groups of 32 values (weights), head rows into steps of 16 (cache pages).
GROUP = 32
HEAD_STEP = 16

# Keys that change the result and are not computed, with the values under which they change nothing
# (none: the key itself is refused).
_ONLY_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.dimension_sections": (),
}

# Arrays with one entry per token, and their element types.
_VOCABULARY_ARRAYS = {
    "tokenizer.ggml.tokens": "strings",
    "tokenizer.ggml.scores": "float32",
    "tokenizer.ggml.token_type": "int32",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder-only model.

    ``rope_interleaved``: pairs are (2i, 2i+1), as a GGUF of the Llama architecture has them;
    otherwise (i, i + rope_dim/2).
    ``tie_embeddings``: the file has no output matrix of its own; the embedding's serves.
    """

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_dim: int
    rope_interleaved: bool
    context_length: int
    vocab_size: int
    tie_embeddings: bool
    attention_scale: float
    bos_id: int | None
    eos_id: int | None

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "ModelConfig":
        """Read and check the metadata of `file`; `ModelFileError` names the first bad key."""
        return cls.from_metadata(file.metadata, tensors=file.tensors)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], *, tensors: Mapping[str, TensorInfo]
    ) -> "ModelConfig":
        """The same from the two mappings of a file; `tensors` gives the vocabulary's size."""
        keys = _Keys(metadata)
        architecture = keys.text("general.architecture")
        if architecture not in ARCHITECTURES:
            raise _error(
                "general.architecture", f"one of {', '.join(ARCHITECTURES)}", repr(architecture)
            )
        if keys.integer("split.count", 1, 65535, default=1) > 1:
            raise _error("split.count", "a model in one file", f"{metadata['split.count']} files")
        keys.prefix = f"{architecture}."
        context_length = keys.integer("context_length", 1, MAX_CONTEXT)
        _refuse_unsupported(keys, context_length)

        hidden_size = keys.integer("embedding_length", GROUP, MAX_HIDDEN, multiple=GROUP)
        num_q_heads = keys.integer("attention.head_count", 1, MAX_HEADS)
        num_kv_heads = keys.integer("attention.head_count_kv", 1, MAX_HEADS, default=num_q_heads)
        if num_q_heads % num_kv_heads:
            raise _error(
                keys.prefix + "attention.head_count",
                f"a multiple of attention.head_count_kv={num_kv_heads}",
                num_q_heads,
            )
        head_dim = _head_dim(keys, hidden_size, num_q_heads)
        scale = keys.number("attention.scale", 0.0, 1e3, default=0.0)
        vocab_size = _vocab_size(keys, tensors)
        return cls(
            architecture=architecture,
            name=_name(metadata),
            num_layers=keys.integer("block_count", 1, MAX_LAYERS),
            hidden_size=hidden_size,
            intermediate_size=keys.integer(
                "feed_forward_length", GROUP, MAX_INTERMEDIATE, multiple=GROUP
            ),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
            rope_theta=keys.number("rope.freq_base", 1.0, 1e12, default=10000.0),
            rope_dim=keys.integer(
                "rope.dimension_count", 2, head_dim, multiple=2, default=head_dim
            ),
            rope_interleaved=ARCHITECTURES[architecture].rope_interleaved,
            context_length=context_length,
            vocab_size=vocab_size,
            tie_embeddings=OUTPUT not in tensors,
            attention_scale=scale or 1.0 / math.sqrt(head_dim),
            bos_id=keys.token_id("bos", vocab_size),
            eos_id=keys.token_id("eos", vocab_size),
        )


class _Keys:
    """Typed, range-checked access to metadata; `prefix` is put before names that need it."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.prefix = ""

    def get(self, name: str) -> Any:
        return self.metadata.get(self.prefix + name)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise _error(self.prefix + name, "a string", _describe(value))
        return value

    def integer(
        self, name: str, low: int, high: int, *, multiple: int = 1, default: int | None = None
    ) -> int:
        value = self.get(name)
        if value is None and default is not None:
            value = default
        if type(value) is not int or not low <= value <= high or value % multiple:
            step = f", a multiple of {multiple}" if multiple > 1 else ""
            raise _error(
                self.prefix + name, f"an integer from {low} to {high}{step}", _describe(value)
            )
        return value

    def number(self, name: str, low: float, high: float, *, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            value = default
        # The comparison is false for NaN too.
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high
        ):
            raise _error(self.prefix + name, f"a number from {low} to {high}", _describe(value))
        return float(value)

    def token_id(self, which: str, vocab_size: int) -> int | None:
        key = f"tokenizer.ggml.{which}_token_id"
        value = self.metadata.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise _error(key, f"a token id below {vocab_size}", _describe(value))
        return value


def _refuse_unsupported(keys: _Keys, context_length: int) -> None:
    for name, neutral in _ONLY_NEUTRAL.items():
        value = keys.get(name)
        if value is None or (isinstance(value, bool | int | float | str) and value in neutral):
            continue
        expected = f"{neutral[-1]!r} (no other is supported)" if neutral else "none (unsupported)"
        raise _error(keys.prefix + name, expected, _describe(value))
    # A window that no context outgrows changes nothing.
    window = keys.get("attention.sliding_window")
    if window is not None and not (
        type(window) is int and (window == 0 or window >= context_length)
    ):
        raise _error(
            keys.prefix + "attention.sliding_window",
            "no sliding window (it is not supported)",
            _describe(window),
        )


def _name(metadata: Mapping[str, Any]) -> str:
    names = (metadata.get(key) for key in ("general.name", "general.basename"))
    return next((name for name in names if isinstance(name, str) and name), "unnamed")


def _head_dim(keys: _Keys, hidden_size: int, num_q_heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden_size % num_q_heads:
        raise _error(
            keys.prefix + "embedding_length",
            f"a multiple of attention.head_count={num_q_heads}",
            hidden_size,
        )
    head_dim = keys.integer(
        "attention.key_length",
        HEAD_STEP,
        MAX_HEAD_DIM,
        multiple=HEAD_STEP,
        default=hidden_size // num_q_heads,
    )
    value_dim = keys.integer("attention.value_length", 1, MAX_HEAD_DIM, default=head_dim)
    if value_dim != head_dim:
        raise _error(
            keys.prefix + "attention.value_length", f"attention.key_length={head_dim}", value_dim
        )
    return head_dim


def _vocab_size(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> int:
    """Rows of the embedding, after checking that the tokenizer's lists agree with it."""
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        got = "none" if embedding is None else f"shape {embedding.shape}"
        raise _error(f"tensor {EMBEDDING!r}", "a matrix", got)
    rows = embedding.shape[0]
    if rows > MAX_VOCAB:
        raise _error(f"tensor {EMBEDDING!r}", f"at most {MAX_VOCAB} rows", rows)
    keys.integer("vocab_size", rows, rows, default=rows)
    for name, kind in _VOCABULARY_ARRAYS.items():
        values = keys.metadata.get(name)
        if values is None:
            continue
        element = "strings" if isinstance(values, list) else str(getattr(values, "dtype", ""))
        if element != kind:
            raise _error(name, f"an array of {kind}", _describe(values))
        if len(values) != rows:
            raise _error(name, f"{rows} entries, as {EMBEDDING!r} has rows", len(values))
    return rows


def _describe(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return repr(value)


def _error(key: str, expected: str, got: object) -> ModelFileError:
    return ModelFileError(f"[ModelConfig] {key}: expected {expected}, got {got}")
