"""`sparse` and `exact`: what they take over, what they give back, and `generate` inside them."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
transformers = pytest.importorskip("transformers", reason="make test-transformers installs it")

from transformers import DynamicCache, T5Config, T5ForConditionalGeneration  # noqa: E402

import kvsieve.transformers as kt  # noqa: E402
from kvsieve import SparseAttention  # noqa: E402
from kvsieve.errors import ConfigError  # noqa: E402
from tests.integrations.transformers.tiny import CACHE, llama, qwen3_vl, token_ids  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def repeated(num_rows: int = 1) -> Any:
    """A prompt with repeats in it, so that a lookup finds candidates."""
    return token_ids(num_rows, 50).repeat(1, 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"use_cache": False},
        {"prefill_chunk_size": 64},
        {"do_sample": True, "top_k": 5},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_every_way_to_generate(model: Any, options: dict[str, Any]) -> None:
    ids = repeated(2)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0

    def generated() -> Any:
        torch.manual_seed(7)
        arguments = {"do_sample": False, "max_new_tokens": 8} | options
        return model.generate(ids, attention_mask=mask, **arguments)

    expected = generated()
    with kt.exact(model, cache_type="f32") as run:
        assert torch.equal(generated(), expected)
    assert run.report().attention.blocks_read > 0


def test_layers_that_are_to_be_exact_are_and_the_kept_mass_is_reported(model: Any) -> None:
    settings = SparseAttention(
        k=2, dense_tail=0, selector="anchors", exact_layers=(1,), layer_k=((0, 3),)
    )
    with kt.sparse(model, settings) as run:
        model.generate(repeated(), do_sample=False, max_new_tokens=8)
    report = run.report()
    assert (report.sparse_layers, report.exact_layers) == ((0, 2), (1,))
    assert report.attention.exact_layers == (1,)
    kept = report.attention.kept_mass
    assert kept is not None
    assert kept.worst_layer in report.sparse_layers
    assert 0 < kept.worst_layer_mean <= kept.mean < 1
    assert report.to_json()["kept_mass"] == kept.to_json()


def test_assisted_decoding_is_decoding(model: Any) -> None:
    """Candidates that are checked together read what each would read alone."""
    ids = repeated()
    settings = SparseAttention(k=2, dense_tail=0, selector="probe")
    # An assistant that proposes what the model itself would say: candidates are accepted, too.
    assistant = llama()
    results = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        with kt.sparse(model, settings, keep_masks=True) as run:
            results.append(model.generate(ids, max_new_tokens=12, do_sample=False, **options))
        decoded = [read for read in run.masks if read.phase == "decode"]
        assert all(read.mask.q_len == 1 for read in decoded)
        assert max(read.mask.kv_len for read in decoded) >= 150 + 11
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_chunked_prompt_reads_the_same_blocks(model: Any) -> None:
    ids = repeated()
    densities = []
    for options in ({}, {"prefill_chunk_size": 32}, {"prefill_chunk_size": 96}):
        with kt.sparse(model, k=2, dense_tail=32) as run:
            out = model.generate(ids, max_new_tokens=5, do_sample=False, **options)
        densities.append((run.report().to_json()["density"], out.tolist()))
    assert densities[0] == densities[1] == densities[2]
    assert densities[0][0]["prefill"] < 1


def test_a_conversation_goes_on_in_one_cache(model: Any) -> None:
    ids = token_ids(1, 100)
    with kt.sparse(model, k=2, dense_tail=0, keep_masks=True) as run:
        first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        assert isinstance(first[CACHE], kt.KVSieveCache)
        longer = torch.cat([first.sequences, token_ids(1, 40, seed=5)], dim=1)
        before = len(run.masks)
        model.generate(longer, **{CACHE: first[CACHE]}, max_new_tokens=3, do_sample=False)
    new = [(read.phase, read.mask.q_len, read.mask.kv_len) for read in run.masks[before::3]]
    assert new == [("prefill", 41, 144), ("decode", 1, 145), ("decode", 1, 146)]


def fail_inside(run: kt.Run, model: Any) -> None:
    with run:
        assert model.config._attn_implementation == "kvsieve"
        assert "generate" in model.__dict__
        raise ZeroDivisionError


def test_everything_is_given_back(model: Any) -> None:
    ids = token_ids(1, 20)
    before = dict(model.__dict__)
    modules = {name: set(module.__dict__) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(ZeroDivisionError):
            fail_inside(kt.sparse(model, k=1), model)
        assert torch.equal(model(ids).logits, expected)
        assert isinstance(model(ids)[CACHE], DynamicCache)
    assert model.config._attn_implementation == "sdpa"
    assert model.__dict__ == before
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == modules


def test_runs_may_be_nested_and_repeated(model: Any) -> None:
    ids = repeated()
    with torch.no_grad(), kt.exact(model) as outer:
        with kt.sparse(model, k=2, dense_tail=0) as inner:
            model(ids)
        once = inner.report().attention.blocks_read
        model(ids)
        with pytest.raises(ConfigError, match="expected one that has ended"):
            outer.__enter__()
        with inner:
            model(ids)
    assert inner.report().attention.blocks_read == 2 * once
    assert outer.report().attention.mode == "exact"
    assert outer.report().attention.prefill.queries == 150 * 3 * 2
    assert outer.report().attention.prefill.density == 1.0


def test_a_cache_of_the_users_own_counts_for_itself(model: Any) -> None:
    with torch.no_grad(), kt.sparse(model, k=2) as run:
        cache = kt.KVSieveCache(model.config)
        model.generate(token_ids(1, 40), **{CACHE: cache}, max_new_tokens=2)
    assert run.report().attention.blocks_read == 0
    assert cache.report().attention.blocks_read > 0
    assert cache.prompt_len == 40


def test_a_model_without_a_head(model: Any) -> None:
    """It has no `generate`; a call of it is served all the same."""
    ids = token_ids(1, 100)
    with torch.no_grad(), kt.exact(model.model, cache_type="f32") as run:
        got = model.model(ids).last_hidden_state
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
    assert (got - expected).abs().max() < 1e-4
    assert run.report().attention.prefill.queries == 100 * 3 * 2


def test_only_the_decoder_is_taken_over() -> None:
    model = qwen3_vl()
    with kt.exact(model):
        assert model.config.text_config._attn_implementation == "kvsieve"
        assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: kt.sparse(model, top_k=3), "top_k: expected one of k"),
        (lambda model: kt.sparse(model, SparseAttention(), k=3), "got both"),
        (lambda model: kt.sparse(model, k=0), "k: expected an integer of at least 1"),
        (lambda model: kt.sparse(model, cache_type="q2"), "cache_type: expected one of"),
        (lambda model: kt.exact("smollm2"), "model: expected a Transformers model, got str"),
        (lambda model: kt.exact(llama(hidden_size=160, head_dim=40)), "head_dim: expected"),
    ],
)
def test_bad_requests_are_refused(model: Any, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(model)


def test_an_encoder_is_refused() -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    )
    with pytest.raises(ConfigError, match="expected a decoder, got T5ForConditionalGeneration"):
        kt.exact(model)
