"""Layers with a sliding window, and image tokens that see each other."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
pytest.importorskip("transformers", reason="make test-transformers installs it")

from transformers.cache_utils import DynamicSlidingWindowLayer  # noqa: E402

import kvsieve.transformers as kt  # noqa: E402
from kvsieve.integrations.paged.recorder import NOT_CAUSAL  # noqa: E402
from tests.integrations.transformers.tiny import (  # noqa: E402
    END,
    IMAGE,
    START,
    gemma3,
    mistral,
    token_ids,
)


def generated(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(
        **inputs,
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def furthest(got: Any, expected: Any) -> float:
    assert torch.equal(got.sequences, expected.sequences)
    return max((a - b).abs().max().item() for a, b in zip(got.logits, expected.logits, strict=True))


def padded(num_tokens: int) -> dict[str, Any]:
    mask = torch.ones(2, num_tokens, dtype=torch.long)
    mask[1, :21] = 0
    return {"input_ids": token_ids(2, num_tokens), "attention_mask": mask}


@pytest.mark.parametrize("num_tokens", [30, 150], ids=["inside the window", "beyond it"])
def test_windows_are_read_exactly_whatever_the_budget(num_tokens: int) -> None:
    model = mistral(window=40)
    inputs = padded(num_tokens)
    expected = generated(model, inputs)
    with kt.sparse(model, k=1, dense_tail=0) as run:
        got = generated(model, inputs)
    assert furthest(got, expected) == 0.0
    report = run.report()
    assert report.attention.mode == "exact"
    assert report.attention.exact_because == "no layer of kvsieve has run"
    assert list(report.host_layers) == [0, 1, 2]
    assert "a window of 40 tokens" in report.host_layers[0]


def test_windows_and_full_layers_together() -> None:
    model, inputs = gemma3(window=40), padded(150)
    expected = generated(model, inputs)
    with kt.exact(model, cache_type="f32"):
        assert furthest(generated(model, inputs), expected) < 1e-4
    with kt.sparse(model, k=2, dense_tail=0, cache_type="f32", keep_masks=True) as run:
        generated(model, inputs)
    report = run.report()
    assert report.sparse_layers == (2,)
    assert list(report.host_layers) == [0, 1]
    assert {read.layer for read in run.masks} == {2}


def test_image_tokens_that_see_each_other_are_read_under_their_mask() -> None:
    """The prompt runs exactly under the model's mask, and says so; the reply is sparse."""
    model = gemma3(window=40)
    ids = torch.cat(
        [
            token_ids(1, 70)[0],
            torch.tensor([START]),
            torch.full((16,), IMAGE),
            torch.tensor([END]),
            token_ids(1, 60, seed=1)[0],
        ]
    )[None]
    torch.manual_seed(1)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }
    expected = generated(model, inputs)
    with kt.exact(model, cache_type="f32") as run:
        assert furthest(generated(model, inputs), expected) < 1e-4
    assert NOT_CAUSAL in run.report().notes
    causal = generated(model, inputs | {"token_type_ids": torch.zeros_like(ids)})
    assert (causal.logits[0] - expected.logits[0]).abs().max() > 1e-4, (
        "the mask makes no difference"
    )

    with kt.sparse(model, k=2, dense_tail=0, cache_type="f32") as run:
        got = generated(model, inputs)
    assert (got.logits[0] - expected.logits[0]).abs().max() < 1e-4
    report = run.report()
    assert report.attention.prefill.density == 1.0
    assert report.attention.decode.density is not None
    assert report.attention.decode.density < 1
    assert NOT_CAUSAL in report.notes


@pytest.mark.skipif(
    not hasattr(DynamicSlidingWindowLayer, "activate_past_recording"),
    reason="this release of Transformers cannot take a window back",
)
def test_assisted_decoding_takes_windows_back_too() -> None:
    model = gemma3(window=40)
    ids = token_ids(1, 60).repeat(1, 3)
    expected = generated(model, {"input_ids": ids}, prompt_lookup_num_tokens=4)
    with kt.exact(model, cache_type="f32"):
        got = generated(model, {"input_ids": ids}, prompt_lookup_num_tokens=4)
    assert torch.equal(got.sequences, expected.sequences)
