"""Qwen3-VL: the language model on kvsieve, the vision tower on Transformers."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
pytest.importorskip("transformers", reason="make test-transformers installs it")

from examples.transformers_qwen3_vl import IMAGE, prompt_with_picture  # noqa: E402

import kvsieve.transformers as kt  # noqa: E402
from kvsieve import SparseAttention  # noqa: E402
from tests.integrations.transformers.tiny import (  # noqa: E402
    CACHE,
    attention_under,
    qwen3_vl,
)

LENGTH = 60 + 1 + 64 + 1 + 80


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen3_vl()


@pytest.fixture
def prompt() -> dict[str, Any]:
    return prompt_with_picture(before=60, after=80)


def generated(model: Any, prompt: dict[str, Any], **options: Any) -> Any:
    return model.generate(
        **prompt,
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def test_exact_attention_equals_sdpa(model: Any, prompt: dict[str, Any]) -> None:
    expected = generated(model, prompt)
    with kt.exact(model, cache_type="f32") as run:
        got = generated(model, prompt)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert (ours - theirs).abs().max() < 1e-4
    assert run.report().attention.prefill.queries == LENGTH * 3 * 2
    assert run.report().attention.decode.queries == 7 * 3 * 2


def test_sparse_attention_equals_dense_attention_under_its_masks(
    model: Any, prompt: dict[str, Any]
) -> None:
    """Generation with a picture, then one pass over all of it under the blocks that were read."""
    settings = SparseAttention(k=3, dense_tail=0, selector="probe")
    with kt.sparse(model, settings, cache_type="f32", keep_masks=True) as run:
        got = generated(model, prompt)
    report = run.report()
    assert report.attention.mode == "sparse"
    assert report.sparse_layers == (0, 1, 2)
    for phase in (report.attention.prefill, report.attention.decode):
        assert phase.density is not None
        assert phase.density < 0.8
    ids = got.sequences[:, :-1]
    real = np.ones(ids.shape, np.bool_)
    whole = prompt | {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    with attention_under(model, run.masks, real), torch.no_grad():
        expected = model(**whole).logits[0, LENGTH - 1 :]
    ours = torch.cat(got.logits)
    assert (ours - expected).abs().max() < 1e-4
    assert (ours - torch.cat(generated(model, prompt).logits)).abs().max() > 1e-3


def test_the_picture_reaches_the_answer(model: Any, prompt: dict[str, Any]) -> None:
    with kt.sparse(model, k=3, dense_tail=0):
        one = generated(model, prompt)
        other = generated(model, prompt | {"pixel_values": -prompt["pixel_values"]})
    assert (one.logits[0] - other.logits[0]).abs().max() > 1e-3


def test_the_vision_tower_keeps_its_attention(model: Any, prompt: dict[str, Any]) -> None:
    visual = model.model.visual
    with torch.no_grad():
        expected = visual(prompt["pixel_values"], grid_thw=prompt["image_grid_thw"])
        with kt.sparse(model, k=1, keep_masks=True) as run:
            assert visual.config._attn_implementation == "sdpa"
            got = visual(prompt["pixel_values"], grid_thw=prompt["image_grid_thw"])
    assert torch.equal(got.pooler_output[0], expected.pooler_output[0])
    assert run.masks == []


def test_loaded_by_name(model: Any, prompt: dict[str, Any]) -> None:
    """Then the tower is asked for by the same name, and handed on to sdpa."""
    named = qwen3_vl(attn_implementation="kvsieve")
    named.load_state_dict(model.state_dict())
    assert named.model.visual.config._attn_implementation == "kvsieve"
    cache = kt.KVSieveCache(named.config, cache_type="f32")
    got = generated(named, prompt, **{CACHE: cache})
    expected = generated(model, prompt)
    assert torch.equal(got.sequences, expected.sequences)
    assert cache.report().attention.prefill.queries == LENGTH * 3 * 2
    blocks = -(-(LENGTH + 7) // 32)
    assert cache.num_bytes == 3 * blocks * 2 * (2 * 32 * 32 * 4)
