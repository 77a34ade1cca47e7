"""Tiny random models of Transformers, and attention in float64 under recorded masks."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from examples.transformers_qwen3_vl import END, IMAGE, START, tiny_config
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3VLForConditionalGeneration,
)
from transformers.masking_utils import sdpa_mask

from kvsieve.integrations.paged.recorder import ReadBlocks

CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)
"""What the installed release calls the cache, as an argument and in what a model returns."""

VOCAB = 120
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 119,
}


def _seeded(kind: type, config: Any, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind._from_config(config, **changes).eval()
    with torch.no_grad():  # spread attention out: random weights alone attend nearly evenly
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")) and "vision" not in name:
                weight.mul_(12)
    return model


def llama(**changes: Any) -> PreTrainedModel:
    shape = SHAPE | {name: changes.pop(name) for name in list(changes) if name in SHAPE}
    return _seeded(LlamaForCausalLM, LlamaConfig(**shape), **changes)


def mistral(window: int) -> PreTrainedModel:
    return _seeded(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=window))


def qwen3_vl(**changes: Any) -> PreTrainedModel:
    return _seeded(Qwen3VLForConditionalGeneration, tiny_config(**SHAPE), **changes)


def gemma3(window: int) -> PreTrainedModel:
    """Two window layers and one full; image tokens see each other."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3Config(
        text_config=SHAPE | {"sliding_window": window, "layer_types": layers},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return _seeded(Gemma3ForConditionalGeneration, config)


def token_ids(num_rows: int, num_tokens: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 110, (num_rows, num_tokens), generator=generator)


@contextmanager
def attention_under(
    model: PreTrainedModel, masks: list[ReadBlocks], real: np.ndarray
) -> Iterator[None]:
    """Let the decoder run in float64 under recorded masks, all positions in one pass.

    real  bool ``[B, T]``: the positions that the masks' rows and columns stand for
    """
    seen = token_masks(masks, real, num_heads=SHAPE["num_attention_heads"])

    def masked(module: Any, query: Any, key: Any, value: Any, _: Any, **kwargs: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
        logits = query.double() @ k.transpose(2, 3) * kwargs["scaling"]
        visible = torch.from_numpy(seen[module.layer_idx])
        weights = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
        return (weights @ v).transpose(1, 2).to(query.dtype).contiguous(), None

    decoder = model.config.get_text_config(decoder=True)
    AttentionInterface.register("masked", masked)
    AttentionMaskInterface.register("masked", sdpa_mask)
    before, decoder._attn_implementation = decoder._attn_implementation, "masked"
    try:
        yield
    finally:
        decoder._attn_implementation = before


def token_masks(
    masks: list[ReadBlocks], real: np.ndarray, *, num_heads: int
) -> dict[int, np.ndarray]:
    """Per layer ``bool [B, Hq, T, T]`` over positions, from masks over real tokens."""
    num_rows, length = real.shape
    result: dict[int, np.ndarray] = {}
    for read in masks:
        seen = result.setdefault(read.layer, np.zeros((num_rows, num_heads, length, length), bool))
        dense = read.mask.to_dense()
        dense = np.repeat(dense, num_heads // len(dense), axis=0)
        positions = np.flatnonzero(real[read.row])
        rows = positions[read.mask.kv_len - read.mask.q_len : read.mask.kv_len]
        columns = positions[: read.mask.kv_len]
        seen[read.row][:, rows[:, None], columns[None]] = dense
    return result
