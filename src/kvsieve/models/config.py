"""What a model file says about its model: one frozen value, every number checked for range.

Anything that would change the result and that we do not compute (another architecture, expert
layers, capped logits) is refused by name, never ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsieve.kernels.backend import Gate
from kvsieve.models.architecture import Architecture, SourceKind
from kvsieve.models.gguf import GgufFile, TensorInfo
from kvsieve.models.keys import Keys, config_error, describe
from kvsieve.models.registry import ARCHITECTURES
from kvsieve.models.rope import RopeScaling

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
MAX_THETA = 1e12
MAX_ROPE_FACTOR = 1e6

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
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
}

# Arrays with one entry per token, and their element types.
_VOCABULARY_ARRAYS = {
    "tokenizer.ggml.tokens": "strings",
    "tokenizer.ggml.scores": "float32",
    "tokenizer.ggml.token_type": "int32",
}

_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder-only model.

    ``rope_interleaved``: pairs are (2i, 2i+1), as a GGUF of the Llama architecture has them;
    otherwise (i, i + rope_dim/2).
    ``tie_embeddings``: the file has no output matrix of its own; the embedding's serves.
    ``windows``: of each layer, how many tokens a query reads, its own included; 0: all.
    ``local_rope_theta``: base of rope in layers with a window, which are not scaled; None: theirs
    is the others'.
    ``norm_offset``: added to the norms' weights as the file has them.
    """

    architecture: str
    source: SourceKind = "gguf"
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
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    context_length: int
    vocab_size: int
    tie_embeddings: bool
    attention_scale: float
    windows: tuple[int, ...]
    gate: Gate = "silu"
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    bos_id: int | None
    eos_id: int | None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that read all tokens, or, where that is asked for, the blocks that are chosen."""
        return tuple(layer for layer, window in enumerate(self.windows) if not window)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "ModelConfig":
        """Read and check the metadata of `file`; `ModelFileError` names the first bad key."""
        return cls.from_metadata(file.metadata, tensors=file.tensors)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], *, tensors: Mapping[str, TensorInfo]
    ) -> "ModelConfig":
        """The same from the two mappings of a file; `tensors` gives the vocabulary's size."""
        keys = Keys(metadata)
        name = keys.text("general.architecture")
        if name not in ARCHITECTURES:
            raise keys.error(
                "general.architecture", f"one of {', '.join(ARCHITECTURES)}", repr(name)
            )
        architecture = ARCHITECTURES[name]
        if keys.integer("split.count", 1, 65535, default=1) > 1:
            raise keys.error(
                "split.count", "a model in one file", f"{keys.get('split.count')} files"
            )
        keys.prefix = f"{name}."
        for key, neutral in _ONLY_NEUTRAL.items():
            keys.only(key, *neutral)
        if name != "qwen3vl":
            keys.only("rope.dimension_sections")
        num_layers = keys.integer("block_count", 1, MAX_LAYERS)
        context_length = keys.integer("context_length", 1, MAX_CONTEXT)
        windows = _windows(keys, architecture, num_layers, context_length)
        heads = read_heads(
            keys,
            hidden_size="embedding_length",
            num_q_heads="attention.head_count",
            num_kv_heads="attention.head_count_kv",
            head_dim="attention.key_length",
        )
        _check_value_dim(keys, heads.head_dim)
        vocab_size = _vocab_size(keys, tensors)
        return cls(
            architecture=name,
            name=_name(metadata),
            num_layers=num_layers,
            hidden_size=heads.hidden_size,
            intermediate_size=keys.integer(
                "feed_forward_length", GROUP, MAX_INTERMEDIATE, multiple=GROUP
            ),
            num_q_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
            rope_theta=keys.number("rope.freq_base", 1.0, MAX_THETA, default=10000.0),
            rope_dim=keys.integer(
                "rope.dimension_count", 2, heads.head_dim, multiple=2, default=heads.head_dim
            ),
            rope_interleaved=architecture.gguf_interleaved,
            rope_scaling=_rope_scaling(keys, context_length),
            local_rope_theta=_local_theta(keys, architecture),
            context_length=context_length,
            vocab_size=vocab_size,
            tie_embeddings=OUTPUT not in tensors,
            attention_scale=_attention_scale(keys, architecture, heads, num_layers),
            windows=windows,
            gate=architecture.gate,
            embedding_scale=embedding_scale(architecture, heads.hidden_size),
            bos_id=_token_id(keys, "bos", vocab_size),
            eos_id=_token_id(keys, "eos", vocab_size),
        )


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The widths of a layer that depend on each other."""

    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(
    keys: Keys, *, hidden_size: str, num_q_heads: str, num_kv_heads: str, head_dim: str
) -> Heads:
    """Read and check them from the keys of these names."""
    hidden = keys.integer(hidden_size, GROUP, MAX_HIDDEN, multiple=GROUP)
    q_heads = keys.integer(num_q_heads, 1, MAX_HEADS)
    kv_heads = keys.integer(num_kv_heads, 1, MAX_HEADS, default=q_heads)
    if q_heads % kv_heads:
        raise keys.error(num_q_heads, f"a multiple of {num_kv_heads}={kv_heads}", q_heads)
    if keys.get(head_dim) is None and hidden % q_heads:
        raise keys.error(hidden_size, f"a multiple of {num_q_heads}={q_heads}", hidden)
    dim = keys.integer(
        head_dim, HEAD_STEP, MAX_HEAD_DIM, multiple=HEAD_STEP, default=hidden // q_heads
    )
    return Heads(hidden_size=hidden, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim)


def embedding_scale(architecture: Architecture, hidden_size: int) -> float:
    """What embeddings are multiplied by."""
    return math.sqrt(hidden_size) if architecture.scaled_embedding else 1.0


def windows_of(
    num_layers: int, *, window: int, pattern: int, context_length: int
) -> tuple[int, ...]:
    """Windows where every `pattern`-th layer has none. One that no context outgrows is none."""
    if window >= context_length:
        window = 0
    return tuple(window if (i + 1) % pattern else 0 for i in range(num_layers))


def _windows(
    keys: Keys, architecture: Architecture, num_layers: int, context_length: int
) -> tuple[int, ...]:
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, default=0)
    pattern = architecture.window_pattern
    if not pattern:
        if 0 < window < context_length:
            raise keys.error(
                "attention.sliding_window",
                f"no sliding window (not supported in a GGUF of {architecture.name})",
                window,
            )
        return (0,) * num_layers
    pattern = keys.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, default=pattern)
    return windows_of(num_layers, window=window, pattern=pattern, context_length=context_length)


def _rope_scaling(keys: Keys, context_length: int) -> RopeScaling | None:
    kind = "none" if keys.get("rope.scaling.type") is None else keys.text("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", 0.0, MAX_ROPE_FACTOR, default=0.0) or 1.0
    if kind == "none":
        keys.only("rope.scaling.factor", 0.0, 1.0)
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        raise keys.error(
            "rope.scaling.type", "none, linear or yarn (no other is supported)", repr(kind)
        )
    keys.only("rope.scaling.yarn_ext_factor", -1.0, 1.0)
    keys.only("rope.scaling.yarn_log_multiplier", 0.0)
    # A file gives what yarn's own amplitude is multiplied by.
    amplitude = keys.number("rope.scaling.yarn_attn_factor", 0.0, 1e3, default=1.0)
    plain = RopeScaling(kind="yarn", factor=factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=keys.integer(
            "rope.scaling.original_context_length", 1, MAX_CONTEXT, default=context_length
        ),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0),
        attention_factor=plain.amplitude * amplitude,
    )


def _local_theta(keys: Keys, architecture: Architecture) -> float | None:
    default = architecture.local_theta
    if default is None:
        return None
    return keys.number("rope.freq_base_swa", 1.0, MAX_THETA, default=default)


def _attention_scale(
    keys: Keys, architecture: Architecture, heads: Heads, num_layers: int
) -> float:
    given = keys.number("attention.scale", 0.0, 1e3, default=0.0)
    width: float = heads.head_dim
    if architecture.name == "gemma3" and num_layers == _GEMMA3_27B_LAYERS:
        # The one Gemma 3 that scales by something else than its heads' width; files do not say so.
        width = heads.hidden_size / heads.num_q_heads
    return given or 1.0 / math.sqrt(width)


def _token_id(keys: Keys, which: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    value = keys.values.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise config_error(key, f"a token id below {vocab_size}", describe(value))
    return value


def _name(metadata: Mapping[str, Any]) -> str:
    names = (metadata.get(key) for key in ("general.name", "general.basename"))
    return next((name for name in names if isinstance(name, str) and name), "unnamed")


def _check_value_dim(keys: Keys, head_dim: int) -> None:
    value_dim = keys.integer("attention.value_length", 1, MAX_HEAD_DIM, default=head_dim)
    if value_dim != head_dim:
        raise keys.error("attention.value_length", f"attention.key_length={head_dim}", value_dim)


def embedding_rows(tensors: Mapping[str, TensorInfo], name: str) -> int:
    """How many tokens a model knows: rows of its embedding."""
    embedding = tensors.get(name)
    if embedding is None or len(embedding.shape) != 2:
        got = "none" if embedding is None else f"shape {embedding.shape}"
        raise config_error(f"tensor {name!r}", "a matrix", got)
    if embedding.shape[0] > MAX_VOCAB:
        raise config_error(f"tensor {name!r}", f"at most {MAX_VOCAB} rows", embedding.shape[0])
    return embedding.shape[0]


def _vocab_size(keys: Keys, tensors: Mapping[str, TensorInfo]) -> int:
    """Rows of the embedding, after checking that the tokenizer's lists agree with it."""
    rows = embedding_rows(tensors, EMBEDDING)
    keys.integer("vocab_size", rows, rows, default=rows)
    for name, kind in _VOCABULARY_ARRAYS.items():
        values = keys.values.get(name)
        if values is None:
            continue
        element = "strings" if isinstance(values, list) else str(getattr(values, "dtype", ""))
        if element != kind:
            raise config_error(name, f"an array of {kind}", describe(values))
        if len(values) != rows:
            raise config_error(name, f"{rows} entries, as {EMBEDDING!r} has rows", len(values))
    return rows
