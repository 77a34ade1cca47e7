"""Tiny models of every architecture: weights from a seed, as a folder and as a GGUF file.

The configurations are what ``config.json`` holds. Both writers are independent of our readers:
`safetensors` and `gguf` write the files. `benchmarks/golden/make_transformers_golden.py` gives the
same weights to the Transformers library and freezes its logits.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

VOCAB = 32
POSITIONS = 200
LONG = "gemma3-long"
"""Beyond 2,900 tokens, where a wrong scaling of rope shows that 200 tokens hide."""
LONG_POSITIONS = 2950
KEPT = 16
"""Positions at the end that are frozen of the long one."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = _BASE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN = _BASE | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
_QWEN3_VL_TEXT = _QWEN | {
    "model_type": "qwen3_vl_text",
    "head_dim": 32,
    "rope_theta": 5e6,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [8, 4, 4],
    },
}
_GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 40,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama3-rope": _LLAMA
    | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear-rope": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn-rope": _LLAMA
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "mistral": _BASE
    | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 32,
        "sliding_window": 50,
    },
    "qwen2": _QWEN | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": _QWEN | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": _QWEN3_VL_TEXT,
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "gemma3": _GEMMA,
    "gemma3-linear": _GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    LONG: _GEMMA
    | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 4096,
        "num_hidden_layers": 6,
    },
}
"""``config.json`` by the name of the golden file."""

GGUF_NAMES = {"mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3-vl": "qwen3vl"}
"""Architecture in a GGUF, where it is not the first word of the name here."""

NOT_IN_A_GGUF = ("mistral",)
"""A GGUF of Mistral does not tell its window."""


def text_config(name: str) -> dict[str, Any]:
    """The configuration of the language model."""
    config = CONFIGS[name]
    return config.get("text_config", config)


def token_ids(name: str) -> np.ndarray:
    count = LONG_POSITIONS if name == LONG else POSITIONS
    return np.random.default_rng(7).integers(0, VOCAB, count)


def weights(name: str) -> Tensors:
    """Every tensor of the checkpoint, image tower left out, f32; the same on every machine."""
    config = text_config(name)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    gemma = name.startswith("gemma3")
    found: Tensors = {}

    def matrix(key: str, rows: int, cols: int, gain: float = 1.0) -> None:
        values = rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)
        found[key] = values.astype(np.float32)

    def vector(key: str, length: int, *, bias: bool = False) -> None:
        # Gemma's norms multiply by 1 + w.
        low, high = (-0.5, 0.5) if bias or gemma else (0.5, 1.5)
        found[key] = rng.uniform(low, high, length).astype(np.float32)

    tied = CONFIGS[name].get("tie_word_embeddings", gemma)
    matrix("model.embed_tokens.weight", VOCAB, hidden, 1.0 if tied else hidden**0.5)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        vector(prefix + "input_layernorm.weight", hidden)
        for key, rows in (
            ("q_proj", heads * dim),
            ("k_proj", kv_heads * dim),
            ("v_proj", kv_heads * dim),
        ):
            matrix(f"{prefix}self_attn.{key}.weight", rows, hidden, 1.5 if key != "v_proj" else 1.0)
            if name == "qwen2":
                vector(f"{prefix}self_attn.{key}.bias", rows, bias=True)
        if gemma or name.startswith("qwen3"):
            vector(prefix + "self_attn.q_norm.weight", dim)
            vector(prefix + "self_attn.k_norm.weight", dim)
        matrix(prefix + "self_attn.o_proj.weight", hidden, heads * dim)
        vector(prefix + "post_attention_layernorm.weight", hidden)
        if gemma:
            vector(prefix + "pre_feedforward_layernorm.weight", hidden)
            vector(prefix + "post_feedforward_layernorm.weight", hidden)
        matrix(prefix + "mlp.gate_proj.weight", ffn, hidden)
        matrix(prefix + "mlp.up_proj.weight", ffn, hidden)
        matrix(prefix + "mlp.down_proj.weight", hidden, ffn)
    vector("model.norm.weight", hidden)
    if not tied:
        matrix("lm_head.weight", VOCAB, hidden)
    return found


def stored_names(name: str, tensors: Tensors) -> Tensors:
    """As the folder has them: the parts of a larger model have a prefix of their own."""
    if name != "qwen3-vl":
        return tensors
    renamed = {key.replace("model.", "model.language_model.", 1): v for key, v in tensors.items()}
    vision = np.zeros((32, 32), np.float32)
    return renamed | {
        "model.visual.blocks.0.attn.qkv.weight": vision,
        "model.visual.merger.norm.weight": vision[0],
    }


def write_folder(folder: Path, name: str, *, changes: Mapping[str, Any] | None = None) -> Path:
    """A folder in Transformers' layout; `changes` to its configuration (None: left out)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**CONFIGS[name], **(changes or {})}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored_names(name, weights(name)), folder / "model.safetensors")
    return folder


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_PARTS = _GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_TABLES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _gguf_name(key: str, *, gemma: bool) -> str:
    stem, _, kind = key.rpartition(".")
    if stem in _GGUF_TABLES:
        return f"{_GGUF_TABLES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{(_GEMMA_PARTS if gemma else _GGUF_PARTS)[part]}.{kind}"


def neighbours_rotate(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """A checkpoint's query or key rows as a converter writes Llama's: 0, d/2, 1, d/2 + 1, ..."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def gguf_architecture(name: str) -> str:
    """``general.architecture`` of the model in a GGUF."""
    arch = GGUF_NAMES.get(name, name.split("-")[0])
    return "llama" if arch in ("llama3", "linear", "yarn") else arch


def write_gguf(path: Path, name: str, *, permute: bool = True, weight_type: str = "F32") -> Path:
    """The same model as a GGUF, as converters write it. `permute=False`: a wrong converter."""
    config = text_config(name)
    arch = gguf_architecture(name)
    gemma = arch == "gemma3"
    writer = gguf.GGUFWriter(str(path), arch)
    _add_metadata(writer, arch, config)
    for key, values in weights(name).items():
        if gemma and key.endswith("norm.weight"):
            values = values + np.float32(1)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if arch == "llama" and permute and part in key:
                values = neighbours_rotate(values, config[heads])
        stored = _gguf_name(key, gemma=gemma)
        if weight_type == "F32" or values.ndim == 1:
            writer.add_tensor(stored, np.ascontiguousarray(values))
        else:
            kind = gguf.GGMLQuantizationType[weight_type]
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        dim = config["hidden_size"] // config["num_attention_heads"]
        writer.add_tensor("rope_freqs.weight", _llama3_factors(scaling, config["rope_theta"], dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        # Converters leave this to the width of a head; this model has another, to show its use.
        scale = config["query_pre_attn_scalar"] ** -0.5
        writer.add_float32("gemma3.attention.scale", scale)
    if arch == "qwen3vl":
        sections = config["rope_scaling"]["mrope_section"]
        writer.add_rope_dimension_sections([*sections, 0])
        writer.add_uint32("qwen3vl.n_deepstack_layers", 1)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_tokenizer_model("no_vocab")


def _llama3_factors(scaling: Mapping[str, Any], theta: float, dim: int) -> np.ndarray:
    """What a converter puts into ``rope_freqs.weight``: the divisor of each frequency."""
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(factors, np.float32)
