"""A model's configuration from the ``config.json`` of a checkpoint in Transformers' layout."""

import math
from collections.abc import Mapping
from typing import Any

from kvsieve.models.architecture import Architecture
from kvsieve.models.config import (
    GROUP,
    MAX_CONTEXT,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_ROPE_FACTOR,
    MAX_THETA,
    Heads,
    ModelConfig,
    embedding_rows,
    embedding_scale,
    read_heads,
    windows_of,
)
from kvsieve.models.gguf_header import TensorInfo
from kvsieve.models.keys import Keys, describe
from kvsieve.models.registry import MODEL_TYPES
from kvsieve.models.rope import RopeScaling, yarn_amplitude

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

_GATES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
_PLAIN_ROPE = ("default", "mrope")  # text has the same position in every part of an mrope


def checkpoint_config(
    values: Mapping[str, Any], *, tensors: Mapping[str, TensorInfo], name: str
) -> ModelConfig:
    """Read and check a ``config.json``; `ModelFileError` names the first bad key.

    Of a model that also sees or hears, the language model is read: its ``text_config``.
    """
    keys, architecture = _language_model(values)
    _refuse_unsupported(keys, architecture)
    num_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
    heads = read_heads(
        keys,
        hidden_size="hidden_size",
        num_q_heads="num_attention_heads",
        num_kv_heads="num_key_value_heads",
        head_dim="head_dim",
    )
    rope, local_rope = _ropes(keys)
    scaling = _rope_scaling(rope)
    context_length = keys.integer("max_position_embeddings", 1, MAX_CONTEXT)
    if scaling is not None and scaling.kind == "yarn":
        context_length = max(context_length, int(scaling.factor * scaling.original_context))
    share = rope.number(
        "partial_rotary_factor",
        0.01,
        1.0,
        default=keys.number("partial_rotary_factor", 0.01, 1.0, default=1.0),
    )
    vocab_size = embedding_rows(tensors, EMBEDDING)
    return ModelConfig(
        architecture=architecture.name,
        source="checkpoint",
        name=name,
        num_layers=num_layers,
        hidden_size=heads.hidden_size,
        intermediate_size=keys.integer(
            "intermediate_size", GROUP, MAX_INTERMEDIATE, multiple=GROUP
        ),
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-12, 0.1),
        rope_theta=_theta(rope, keys, "rope_theta", 10000.0),
        rope_dim=int(heads.head_dim * share) // 2 * 2,
        rope_interleaved=False,
        rope_scaling=scaling,
        local_rope_theta=_local_theta(keys, local_rope, architecture),
        context_length=context_length,
        vocab_size=vocab_size,
        tie_embeddings=keys.flag("tie_word_embeddings", default=False),
        attention_scale=_attention_scale(keys, heads),
        windows=_windows(keys, architecture, num_layers, context_length),
        gate=architecture.gate,
        embedding_scale=embedding_scale(architecture, heads.hidden_size),
        norm_offset=architecture.checkpoint_norm_offset,
        bos_id=_token_id(keys, "bos_token_id", vocab_size),
        eos_id=_token_id(keys, "eos_token_id", vocab_size),
    )


def _language_model(values: Mapping[str, Any]) -> tuple[Keys, Architecture]:
    """The keys of the language model, defaults filled in."""
    outer = Keys(values, where="config.json: ")
    outer.only("quantization_config")
    text = outer.mapping("text_config")
    model_type = str((text or values).get("model_type") or outer.text("model_type"))
    if outer.text("model_type") not in MODEL_TYPES or model_type not in MODEL_TYPES:
        raise outer.error("model_type", f"one of {', '.join(MODEL_TYPES)}", repr(model_type))
    architecture = MODEL_TYPES[model_type]
    # What a file leaves out is in its text_config, beside it, or a default of the architecture.
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    beside = {key: values[key] for key in shared if values.get(key) is not None}
    merged = {**architecture.checkpoint_defaults, **beside, **(text or values)}
    return Keys(merged, where=outer.where), architecture


def _refuse_unsupported(keys: Keys, architecture: Architecture) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "quantization_config"):
        keys.only(name)
    keys.only("use_bidirectional_attention", False)
    for name in ("hidden_act", "hidden_activation"):
        value = keys.get(name)
        if value is not None and _GATES.get(str(value)) != architecture.gate:
            wanted = ", ".join(one for one, gate in _GATES.items() if gate == architecture.gate)
            raise keys.error(name, f"one of {wanted}", describe(value))


def _ropes(keys: Keys) -> tuple[Keys, Keys]:
    """The parameters of rope, and those of layers with a window.

    Newer files have them in ``rope_parameters``, by kind of layer where kinds differ; older ones
    in ``rope_scaling`` and in keys of their own.
    """
    where = "config.json: "
    given = keys.mapping("rope_parameters")
    if not given:
        return Keys(keys.mapping("rope_scaling"), where=where + "rope_scaling."), Keys({})
    where += "rope_parameters."
    if isinstance(given.get("full_attention"), dict):
        local = given.get("sliding_attention")
        return (
            Keys(given["full_attention"], where=where + "full_attention."),
            Keys(local if isinstance(local, dict) else {}, where=where + "sliding_attention."),
        )
    return Keys(given, where=where), Keys({})


def _theta(rope: Keys, keys: Keys, name: str, default: float) -> float:
    if rope.get("rope_theta") is not None:
        return rope.number("rope_theta", 1.0, MAX_THETA)
    return keys.number(name, 1.0, MAX_THETA, default=default)


def _local_theta(keys: Keys, rope: Keys, architecture: Architecture) -> float | None:
    if architecture.local_theta is None:
        return None
    if _rope_scaling(rope) is not None:
        raise rope.error("rope_type", "default (layers with a window are not scaled)", "another")
    return _theta(rope, keys, "rope_local_base_freq", architecture.local_theta)


def _rope_scaling(rope: Keys) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in _PLAIN_ROPE:
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise rope.error("rope_type", "one of default, linear, llama3, yarn", describe(kind))
    factor = rope.number("factor", 1e-3, MAX_ROPE_FACTOR)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    original = rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    if kind == "llama3":
        low = rope.number("low_freq_factor", 1e-3, 1e6)
        high = rope.number("high_freq_factor", 1e-3, 1e6)
        if high <= low:
            raise rope.error("high_freq_factor", f"more than low_freq_factor={low}", high)
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_context=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=rope.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=rope.number("beta_slow", 1e-3, 1e6, default=1.0),
        attention_factor=_yarn_amplitude(rope, factor),
        truncate=rope.flag("truncate", default=True),
    )


def _yarn_amplitude(rope: Keys, factor: float) -> float | None:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", 1e-3, 1e3)
    above = rope.number("mscale", 0.0, 1e3, default=0.0)
    below = rope.number("mscale_all_dim", 0.0, 1e3, default=0.0)
    if above and below:
        return yarn_amplitude(factor, above) / yarn_amplitude(factor, below)
    return None


def _attention_scale(keys: Keys, heads: Heads) -> float:
    width = keys.number("query_pre_attn_scalar", 1e-3, 1e6, default=float(heads.head_dim))
    return 1.0 / math.sqrt(width)


def _windows(
    keys: Keys, architecture: Architecture, num_layers: int, context_length: int
) -> tuple[int, ...]:
    window = keys.integer("sliding_window", 0, MAX_CONTEXT, default=0)
    if not keys.flag("use_sliding_window", default=True) or window >= context_length:
        window = 0
    kinds = keys.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise keys.error("layer_types", f"a list of {num_layers}", describe(kinds))
        of_kind = {"full_attention": 0, "sliding_attention": window}
        for kind in kinds:
            if kind not in of_kind:
                raise keys.error("layer_types", f"{' or '.join(of_kind)} each", describe(kind))
        return tuple(of_kind[kind] for kind in kinds)
    if architecture.window_pattern:
        pattern = keys.integer(
            "sliding_window_pattern", 1, MAX_LAYERS, default=architecture.window_pattern
        )
        return windows_of(num_layers, window=window, pattern=pattern, context_length=context_length)
    first = keys.integer("max_window_layers", 0, 1 << 16, default=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _token_id(keys: Keys, name: str, vocab_size: int) -> int | None:
    """A token id; of several, the first."""
    value = keys.get(name)
    if isinstance(value, list) and value:
        value = value[0]
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise keys.error(name, f"a token id below {vocab_size}", describe(value))
    return value
