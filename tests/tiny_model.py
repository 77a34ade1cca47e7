"""Write a tiny but complete model file: random weights, a real tokenizer, a chat template.

The file is written by the `gguf` package, so it is also an independent check of our own reader.
Everything in it follows from the arguments and the seed.

Layout of the vocabulary: ids 0..2 are ``<|endoftext|>``, ``<|im_start|>`` (BOS), ``<|im_end|>``
(EOS); 3..258 are the 256 bytes in GPT-2's printable spelling; then one token per merge; then
unused tokens up to `vocab`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

Architecture = Literal["llama", "qwen3"]
WeightType = Literal[
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"
]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
FIRST_BYTE_ID = len(SPECIAL_TOKENS)
MERGES = (
    "t h", "th e", "Ġ the", "i n", "a n", "Ġ a", "Ġ s", "e r", "r e", "o n", "an d", "Ġ and",
    "i s", "Ġ is", "in g", "k e", "ke y", "Ġ key", "p a", "s s", "pa ss", "Ġ pass", "o u", "Ġ Ġ",
)  # fmt: skip
MIN_VOCAB = FIRST_BYTE_ID + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TABLES = ("token_embd.weight", "output.weight")

# Where a block of 256 values holds its f16 scales (the rest may be any byte), and the standard
# deviation of the values that random bytes give when those scales are 1.
_K_QUANTS: dict[str, tuple[tuple[int, ...], float]] = {
    "Q4_K": ((0, 2), 242.0),
    "Q5_K": ((0, 2), 510.0),
    "Q6_K": ((208,), 1390.0),
}


@dataclass(frozen=True, kw_only=True)
class _Shape:
    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int


def byte_spelling() -> list[str]:
    """GPT-2's printable character for each byte 0..255."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in kept}
    others = (byte for byte in range(256) if byte not in spelling)
    spelling.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [spelling[byte] for byte in range(256)]


def vocabulary(vocab: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of a vocabulary of `vocab` entries."""
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab: expected at least {MIN_VOCAB}, got {vocab}")
    merges = list(MERGES[: vocab - MIN_VOCAB])
    tokens = [*SPECIAL_TOKENS, *byte_spelling(), *(merge.replace(" ", "") for merge in merges)]
    types = [int(gguf.TokenType.CONTROL)] * len(SPECIAL_TOKENS)
    types += [int(gguf.TokenType.NORMAL)] * (len(tokens) - len(SPECIAL_TOKENS))
    unused = vocab - len(tokens)
    tokens += [f"<|unused_{i}|>" for i in range(unused)]
    types += [int(gguf.TokenType.UNUSED)] * unused
    return tokens, types, merges


def encode_weight(values: np.ndarray, weight_type: WeightType, *, seed: int = 0) -> np.ndarray:
    """File bytes ``u8 [rows, row_bytes]`` of a matrix in `weight_type`.

    For the k-quants, which the `gguf` package reads but does not write, the codes are random and
    only the scales follow the size of `values`.
    """
    if weight_type in _K_QUANTS:
        return _random_k_quant(values, weight_type, seed=seed)
    encoded = gguf.quants.quantize(
        np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType[weight_type]
    )
    return np.ascontiguousarray(encoded).view(np.uint8).reshape(values.shape[0], -1)


def _random_k_quant(values: np.ndarray, weight_type: str, *, seed: int) -> np.ndarray:
    rows, cols = values.shape
    if cols % 256:
        raise ValueError(f"{weight_type}: expected rows of a multiple of 256 values, got {cols}")
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[weight_type]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, cols // 256, block_bytes), dtype=np.uint8)
    offsets, unscaled = _K_QUANTS[weight_type]
    scale = float(values.std()) / unscaled
    for offset in offsets:
        scales = rng.uniform(0.5, 1.5, (rows, cols // 256)) * scale
        blocks[..., offset : offset + 2] = (
            scales.astype("<f2").view(np.uint8).reshape(rows, cols // 256, 2)
        )
    return blocks.reshape(rows, -1)


def write_tiny_gguf(
    path: str | Path,
    *,
    architecture: Architecture = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    vocab: int = MIN_VOCAB + len(MERGES) + 5,
    weight_type: WeightType = "F32",
    embedding_type: WeightType | None = None,
    seed: int = 0,
    context: int = 512,
    tie: bool = True,
    no_vocab: bool = False,
    rope_factors: Sequence[float] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    **overrides: Any,
) -> Path:
    """Write the model and return its path.

    head_dim        default ``hidden // heads``; anything else also writes ``attention.key_length``
    embedding_type  type of ``token_embd.weight`` (and of ``output.weight``); default `weight_type`
    no_vocab        leave out the tokenizer and the chat template, as ``no_vocab`` files do
    rope_factors    written as ``rope_freqs.weight``
    tensors         f32 arrays put in the place of generated ones, or added; None leaves one out
    overrides       metadata to change (``**{"llama.rope.freq_base": 5e5}``); None leaves a key out;
                    a pair ``(value, gguf.GGUFValueType)`` says the type, else int is u32, float f32
    """
    shape = _Shape(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        ffn=ffn,
        vocab=vocab,
        context=context,
    )
    tokenizer = {"tokenizer.ggml.model": "no_vocab"} if no_vocab else _tokenizer(shape)
    metadata = {**_metadata(shape), **tokenizer, **overrides}
    matrices, vectors = _weights(shape, seed=seed, tie=tie)
    if rope_factors is not None:
        vectors["rope_freqs.weight"] = np.asarray(rope_factors, np.float32)

    writer = gguf.GGUFWriter(str(path), str(metadata.pop("general.architecture", architecture)))
    writer.data_alignment = _alignment(metadata)
    for key, value in metadata.items():
        if value is not None:
            _add_value(writer, key, value)
    kinds = dict.fromkeys(matrices, weight_type)
    kinds.update(dict.fromkeys(_TABLES, embedding_type or weight_type))
    replaced = dict(tensors or {})
    for name, values in matrices.items():
        if name not in replaced:
            _add_matrix(writer, name, values, kind=kinds[name], seed=seed)
    for name, values in {**vectors, **replaced}.items():
        if values is not None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_matrix(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, *, kind: WeightType, seed: int
) -> None:
    if kind == "F32":
        writer.add_tensor(name, values)
    else:
        data = encode_weight(values, kind, seed=seed)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])


def _metadata(shape: _Shape) -> dict[str, Any]:
    """Keys of the model, those of the tokenizer aside, as converters write them."""
    model: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": shape.vocab,
    }
    if shape.architecture == "llama":
        model["rope.dimension_count"] = shape.head_dim
    if shape.architecture == "qwen3" or shape.head_dim * shape.heads != shape.hidden:
        model["attention.key_length"] = shape.head_dim
        model["attention.value_length"] = shape.head_dim
    prefixed = {f"{shape.architecture}.{name}": value for name, value in model.items()}
    return {"general.name": "tiny", **prefixed}


def _tokenizer(shape: _Shape) -> dict[str, Any]:
    tokens, types, merges = vocabulary(shape.vocab)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if shape.architecture == "qwen3" else "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges or None,
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _weights(
    shape: _Shape, *, seed: int, tie: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Matrices and vectors by name, f32."""
    rng = np.random.default_rng(seed)
    hidden, dim = shape.hidden, shape.head_dim
    matrices: dict[str, np.ndarray] = {}
    vectors: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, cols: int, *, gain: float) -> None:
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        matrices[name] = values * np.float32(gain / np.sqrt(cols))

    def norm(name: str, length: int = hidden) -> None:
        vectors[name] = rng.uniform(0.5, 1.5, length).astype(np.float32)

    # Embedding values of unit size; query and key gains of 1.5 make attention clearly uneven.
    matrix("token_embd.weight", shape.vocab, hidden, gain=hidden**0.5)
    for i in range(shape.layers):
        prefix = f"blk.{i}."
        norm(prefix + "attn_norm.weight")
        matrix(prefix + "attn_q.weight", shape.heads * dim, hidden, gain=1.5)
        matrix(prefix + "attn_k.weight", shape.kv_heads * dim, hidden, gain=1.5)
        if shape.architecture == "qwen3":
            norm(prefix + "attn_q_norm.weight", dim)
            norm(prefix + "attn_k_norm.weight", dim)
        matrix(prefix + "attn_v.weight", shape.kv_heads * dim, hidden, gain=1.0)
        matrix(prefix + "attn_output.weight", hidden, shape.heads * dim, gain=1.0)
        norm(prefix + "ffn_norm.weight")
        matrix(prefix + "ffn_gate.weight", shape.ffn, hidden, gain=1.0)
        matrix(prefix + "ffn_up.weight", shape.ffn, hidden, gain=1.0)
        matrix(prefix + "ffn_down.weight", hidden, shape.ffn, gain=1.0)
    norm("output_norm.weight")
    if not tie:
        matrix("output.weight", shape.vocab, hidden, gain=1.0)
    return matrices, vectors


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment")
    if isinstance(value, int) and value > 0 and not value & (value - 1):
        return value
    return 32


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, tuple):
        writer.add_key_value(key, value[0], value[1])
    elif isinstance(value, bool):
        writer.add_key_value(key, value, kinds.BOOL)
    elif isinstance(value, int):
        writer.add_key_value(key, value, kinds.UINT32)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kinds.FLOAT32)
    elif isinstance(value, str):
        writer.add_key_value(key, value, kinds.STRING)
    else:
        writer.add_key_value(key, list(value), kinds.ARRAY)
