"""The function and the masks that Transformers calls by name."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
transformers = pytest.importorskip("transformers", reason="make test-transformers installs it")

from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, StaticCache  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    causal_mask_function,
    sliding_window_causal_mask_function,
)

import kvsieve.transformers as kt  # noqa: E402
from kvsieve.errors import ConfigError, KvsieveError, ShapeError  # noqa: E402
from kvsieve.integrations.transformers.attention import kvsieve_mask  # noqa: E402
from tests.integrations.transformers.tiny import CACHE, SHAPE, llama, token_ids  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(attn_implementation="kvsieve")


@pytest.fixture(scope="module")
def exactly(model: Any) -> Any:
    other = llama()
    other.load_state_dict(model.state_dict())
    return other


# -- masks ----------------------------------------------------------------------------------


def test_a_causal_mask_is_which_tokens_are_real() -> None:
    sizes = {"batch_size": 2, "q_length": 2, "kv_length": 4, "q_offset": 2}
    assert kvsieve_mask(**sizes) is None
    ones = torch.ones(2, 4, dtype=torch.bool)
    assert kvsieve_mask(**sizes, attention_mask=ones) is None
    real = torch.tensor([[True] * 4, [False, True, True, True]])
    assert torch.equal(kvsieve_mask(**sizes, attention_mask=real), real)
    longer = torch.cat([real, torch.zeros(2, 3, dtype=torch.bool)], dim=1)
    assert torch.equal(kvsieve_mask(**sizes, attention_mask=longer), real)


def test_a_mask_without_the_earlier_tokens_is_refused() -> None:
    with pytest.raises(ShapeError, match="attention_mask: expected 4 columns"):
        kvsieve_mask(
            batch_size=1,
            q_length=2,
            kv_length=4,
            q_offset=2,
            attention_mask=torch.ones(1, 2, dtype=torch.bool),
        )


def test_a_window_is_written_out_even_where_it_hides_nothing() -> None:
    mask = kvsieve_mask(
        batch_size=1,
        q_length=3,
        kv_length=3,
        mask_function=sliding_window_causal_mask_function(8),
        local_size=8,
    )
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [True, True, True]]]]


def test_room_to_spare_is_written_out() -> None:
    """A static cache has keys behind the last query, which nobody may read."""
    mask = kvsieve_mask(
        batch_size=1, q_length=1, kv_length=4, q_offset=1, mask_function=causal_mask_function
    )
    assert mask.tolist() == [[[[True, True, False, False]]]]


# -- keys of no cache, or of another ---------------------------------------------------------


def test_without_a_cache(model: Any, exactly: Any) -> None:
    ids = token_ids(2, 70)
    real = torch.ones_like(ids)
    real[1, :20] = 0
    with torch.no_grad():
        got = model(ids, attention_mask=real, use_cache=False).logits
        expected = exactly(ids, attention_mask=real, use_cache=False).logits
        with kt.exact(model):
            same = model(ids, attention_mask=real).logits
    seen = real.bool()
    error = (got - expected)[seen].norm() / expected[seen].norm()
    assert 1e-6 < error < 0.1  # its pages are q8_0
    assert torch.equal(got[seen], same[seen])


def test_another_cache_is_correct_and_says_that_it_is_slow(model: Any, exactly: Any) -> None:
    ids = token_ids(1, 70)
    with torch.no_grad(), kt.sparse(model, k=2, dense_tail=0, cache_type="f32") as run:
        cache = DynamicCache(config=model.config)
        model(ids[:, :69], **{CACHE: cache})
        with pytest.warns(UserWarning, match="pages were built anew for every call"):
            got = model(ids[:, 69:], **{CACHE: cache}).logits
        ours = run.new_cache(prompt_len=69)
        model(ids[:, :69], **{CACHE: ours})
    assert got.shape == (1, 1, SHAPE["vocab_size"])
    report = run.report()
    assert any("without importance" in note for note in report.notes)
    assert report.attention.mode == "sparse"
    with torch.no_grad(), kt.exact(model, cache_type="f32"):
        cache = DynamicCache(config=model.config)
        model(ids[:, :69], **{CACHE: cache})
        with pytest.warns(UserWarning, match="built anew"):
            got = model(ids[:, 69:], **{CACHE: cache}).logits
        expected = exactly(ids).logits[:, -1:]
    assert (got - expected).abs().max() < 1e-4


def test_a_static_cache_is_left_to_transformers(model: Any, exactly: Any) -> None:
    ids = token_ids(1, 40)
    with torch.no_grad():
        with kt.sparse(model, k=1, dense_tail=0) as run:
            cache = StaticCache(config=model.config, max_cache_len=64)
            got = model(ids, **{CACHE: cache}).logits
        expected = exactly(ids).logits
    assert (got - expected).abs().max() < 1e-5
    assert "another cache" in run.report().host_layers[0]
    assert run.report().attention.exact_because == "no layer of kvsieve has run"


def test_a_mask_of_the_users_own(model: Any, exactly: Any) -> None:
    """Bool and additive; a causal one goes to the kernels, another is read as it is."""
    ids = token_ids(1, 40)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    local = causal & torch.ones(40, 40, dtype=torch.bool).triu(-5)
    with torch.no_grad():
        for mask in (causal, local):
            expected = exactly(ids, attention_mask=mask).logits
            lowest = torch.finfo(torch.float32).min
            for form in (mask, torch.where(mask, 0.0, lowest)):
                with kt.exact(model, cache_type="f32") as run:
                    got = model(ids, attention_mask=form).logits
                assert (got - expected).abs().max() < 1e-4
                assert bool(run.report().notes) == (mask is local)


# -- refused ---------------------------------------------------------------------------------


def test_training_is_refused(model: Any) -> None:
    model.train()
    try:
        with pytest.raises(ConfigError, match="got training"):
            model(token_ids(1, 8))
    finally:
        model.eval()


def test_a_gradient_is_an_error_and_not_a_wrong_one(model: Any) -> None:
    logits = model(token_ids(1, 8), use_cache=False).logits
    assert logits.requires_grad
    with pytest.raises(KvsieveError, match="backward: expected no gradient"):
        logits.sum().backward()


def test_dropout_is_refused() -> None:
    model = llama(attn_implementation="kvsieve")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with torch.no_grad(), pytest.raises(ConfigError, match="dropout 0"):
        model(token_ids(1, 8))


def test_attention_weights_are_refused(model: Any) -> None:
    with torch.no_grad(), pytest.raises(ConfigError, match="output_attentions=False"):
        model(token_ids(1, 8), output_attentions=True)


def test_a_soft_cap_is_refused() -> None:
    model = Gemma2ForCausalLM._from_config(
        Gemma2Config(**SHAPE, sliding_window=40), attn_implementation="kvsieve"
    ).eval()
    with torch.no_grad(), pytest.raises(ConfigError, match="softcap"):
        model(token_ids(1, 8))


@pytest.mark.parametrize("name", ["s_aux", "position_bias"])
def test_what_no_kernel_computes_is_refused(model: Any, name: str) -> None:
    attention = transformers.AttentionInterface()["kvsieve"]
    q = torch.zeros(1, 4, 2, 32)
    k = torch.zeros(1, 2, 2, 32)
    with pytest.raises(ConfigError, match=f"got {name}"):
        attention(model.model.layers[0].self_attn, q, k, k, None, **{name: torch.zeros(4)})


def test_padding_that_moves_is_refused(model: Any) -> None:
    cache = kt.KVSieveCache(model.config)
    with torch.no_grad():
        model(token_ids(1, 4), attention_mask=torch.tensor([[0, 1, 1, 1]]), **{CACHE: cache})
        with pytest.raises(ConfigError, match="the same padding among earlier tokens"):
            model(token_ids(1, 1), **{CACHE: cache})
