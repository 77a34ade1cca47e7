"""A tiny random Qwen3-VL with a picture: kvsieve beside Transformers' own attention.

    python examples/transformers_qwen3_vl.py

Nothing is downloaded, so what it says is noise; the numbers show that the exact run is the model's,
and what the sparse run read. Needs: pip install 'kvsieve[transformers]'
"""

from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import kvsieve.transformers

IMAGE, VIDEO, START, END = 115, 116, 117, 118
PATCHES = 16


def tiny_config(**changes: Any) -> Qwen3VLConfig:
    """Four layers and a vision tower of two; `changes` to what the language model has."""
    text = {
        "vocab_size": 120,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        **changes,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def tiny_model() -> Qwen3VLForConditionalGeneration:
    """A model of that shape with random weights."""
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(tiny_config()).eval()


def prompt_with_picture(*, before: int, after: int) -> dict[str, torch.Tensor]:
    """A random picture between random texts of so many tokens; four patches become one token."""
    torch.manual_seed(1)
    picture = torch.full((PATCHES * PATCHES // 4,), IMAGE)
    first, last = torch.randint(3, 110, (before,)), torch.randint(3, 110, (after,))
    ids = torch.cat([first, torch.tensor([START]), picture, torch.tensor([END]), last])[None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(PATCHES * PATCHES, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, PATCHES, PATCHES]]),
    }


def main() -> None:
    """Generate with each attention from the same prompt, and compare the logits."""
    model, inputs = tiny_model(), prompt_with_picture(before=200, after=250)

    def first_logits() -> torch.Tensor:
        out = model.generate(
            **inputs,
            max_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.cat(out.logits)

    expected = first_logits()
    runs = {
        "exact, f32 cache": kvsieve.transformers.exact(model, cache_type="f32"),
        "exact, q8_0 cache": kvsieve.transformers.exact(model),
        "sparse, k=6": kvsieve.transformers.sparse(model, k=6, dense_tail=64),
    }
    print(f"{inputs['input_ids'].shape[1]} tokens, {PATCHES * PATCHES // 4} of them the picture's")
    for name, run in runs.items():
        with run:
            error = (first_logits() - expected).abs().max().item()
        attention = run.report().attention
        print(
            f"{name:18} logits differ from sdpa's by {error:.1e}; ran {attention.mode}; density "
            f"{attention.prefill.density:.2f} in the prompt, {attention.decode.density:.2f} after"
        )


if __name__ == "__main__":
    main()
