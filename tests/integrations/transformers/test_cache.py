"""`KVSieveCache` behind the interface that Transformers calls."""

from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
transformers = pytest.importorskip("transformers", reason="make test-transformers installs it")

from kvsieve import SparseAttention  # noqa: E402
from kvsieve.errors import ConfigError, ShapeError  # noqa: E402
from kvsieve.integrations.transformers.cache import (  # noqa: E402
    ClosedStates,
    KVSieveCache,
    PagedLayer,
    as_rows,
)
from tests.integrations.transformers.tiny import CACHE, gemma3, llama, token_ids  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(attn_implementation="kvsieve")


def states(q_len: int, *, num_rows: int = 1, head_dim: int = 32) -> Any:
    return torch.randn(num_rows, 2, q_len, head_dim)


def logits(model: Any, ids: Any, cache: Any) -> Any:
    with torch.no_grad():
        return model(ids, **{CACHE: cache}).logits


def test_layers_follow_the_config() -> None:
    cache = KVSieveCache(gemma3(window=40).config)
    assert [type(layer) is PagedLayer for layer in cache.layers] == [False, False, True]
    assert cache.is_sliding == [True, True, False]
    (paged,) = cache.paged
    assert paged.is_croppable
    assert not paged.is_compileable


def test_lengths(model: Any) -> None:
    cache = KVSieveCache(model.config)
    assert (cache.get_seq_length(), cache.num_bytes) == (0, 0)
    logits(model, token_ids(2, 40), cache)
    assert cache.get_seq_length() == 40
    assert cache.get_mask_sizes(3, 0) == (43, 0)
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == -1
    assert cache.layers[0].batch_size == 2
    assert cache.is_initialized
    cache.reset()
    assert (cache.get_seq_length(), cache.num_bytes) == (0, 0)
    logits(model, token_ids(1, 4), cache)
    assert cache.get_seq_length() == 4


def test_what_update_returns_has_a_shape_and_no_numbers(model: Any) -> None:
    layer = KVSieveCache(model.config).layers[0]
    keys, values = layer.update(states(5), states(5))
    for one in (keys, values):
        assert isinstance(one, ClosedStates)
        assert one.shape == (1, 2, 5, 32)
        assert one.size(2) == 5
        assert one.dtype == torch.float32
        for computed in (lambda x=one: x + 1, lambda x=one: x.contiguous(), lambda x=one: x[:, :1]):
            with pytest.raises(ConfigError, match="expected attn_implementation='kvsieve'"):
                computed()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_cannot_read_it(implementation: str) -> None:
    model = llama(attn_implementation=implementation)
    with pytest.raises(ConfigError, match="expected attn_implementation='kvsieve'"):
        logits(model, token_ids(1, 8), KVSieveCache(model.config))


def test_keys_that_were_never_read_are_an_error(model: Any) -> None:
    layer = KVSieveCache(model.config).layers[0]
    layer.update(states(5), states(5))
    with pytest.raises(ConfigError, match="never did"):
        layer.update(states(1), states(1))


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (states(3), states(3, head_dim=16), "of one shape"),
        (states(3), states(4), "of one shape"),
        (states(3)[0], states(3)[0], "of one shape"),
        (states(3, head_dim=40), states(3, head_dim=40), "multiple of 16"),
        (states(3).to("meta"), states(3).to("meta"), "expected keys on the CPU, got meta"),
    ],
)
def test_states_that_do_not_fit_are_refused(
    model: Any, keys: Any, values: Any, message: str
) -> None:
    with pytest.raises((ConfigError, ShapeError), match=message):
        KVSieveCache(model.config).layers[0].update(keys, values)


def test_the_batch_cannot_change(model: Any) -> None:
    cache = KVSieveCache(model.config)
    logits(model, token_ids(2, 4), cache)
    with pytest.raises(ShapeError, match=r"expected \(rows, KV heads, head_dim\) = \(2, 2, 32\)"):
        logits(model, token_ids(1, 4), cache)


def test_a_head_that_no_page_holds_is_refused_at_once() -> None:
    config = llama(hidden_size=160, head_dim=40).config
    with pytest.raises(ConfigError, match="head_dim: expected a multiple of 16 for a q8_0 cache"):
        KVSieveCache(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse": 32}, "sparse: expected SparseAttention"),
        ({"cache_type": "int8"}, "cache_type: expected one of"),
        ({"prompt_len": 0}, "prompt_len: expected at least 1"),
        ({"threads": -1}, "threads"),
    ],
)
def test_bad_options_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVSieveCache(model.config, **options)


def test_a_model_is_no_config(model: Any) -> None:
    with pytest.raises(ConfigError, match="a model's config, got LlamaForCausalLM"):
        KVSieveCache(model)


def test_cropping_forgets_tokens(model: Any) -> None:
    ids = token_ids(2, 50)
    cache, straight = (KVSieveCache(model.config, cache_type="f32") for _ in range(2))
    logits(model, ids, cache)
    cache.crop(-17)
    assert cache.get_seq_length() == 33
    logits(model, ids[:, :33], straight)
    more = token_ids(2, 5, seed=3)
    assert torch.equal(logits(model, more, cache), logits(model, more, straight))
    cache.crop(0)
    assert cache.get_seq_length() == 38
    cache.crop(30)  # as earlier releases call it: what to keep
    assert cache.get_seq_length() == 30
    cache.crop(-99)
    assert cache.get_seq_length() == 0


def test_rows_are_picked_repeated_and_reordered(model: Any) -> None:
    ids = token_ids(3, 40)
    more = token_ids(3, 1, seed=3)
    cache = KVSieveCache(model.config, cache_type="f32")
    logits(model, ids, cache)
    expected = logits(model, more, deepcopy(cache))
    for act, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        other = deepcopy(cache)
        act(other)
        assert (logits(model, more[rows], other) - expected[rows]).abs().max() < 1e-5
        assert other.layers[2].batch_size == len(rows)
    assert torch.equal(logits(model, more, cache), expected)


def test_a_copied_prompt_can_be_continued_twice(model: Any) -> None:
    """The way in which Transformers reuses a prefix: a deep copy of a filled cache."""
    ids = token_ids(1, 120)
    sparse = SparseAttention(k=2, dense_tail=0)
    prefix = KVSieveCache(model.config, sparse=sparse)
    logits(model, ids[:, :96], prefix)
    cold = KVSieveCache(model.config, sparse=sparse)
    logits(model, ids[:, :96], cold)
    for _ in range(2):
        warm = deepcopy(prefix)
        out = model.generate(ids, **{CACHE: warm}, max_new_tokens=4, do_sample=False)
        assert warm.get_seq_length() == 123
    assert torch.equal(out, model.generate(ids, **{CACHE: cold}, max_new_tokens=4, do_sample=False))
    assert prefix.get_seq_length() == 96


def test_masks_and_report(model: Any) -> None:
    cache = KVSieveCache(model.config, sparse=SparseAttention(k=2, dense_tail=0), keep_masks=True)
    model.generate(token_ids(1, 130), **{CACHE: cache}, max_new_tokens=3, do_sample=False)
    assert [read.phase for read in cache.masks] == ["prefill"] * 3 + ["decode"] * 6
    assert cache.report().attention.mode == "sparse"
    assert cache.report().to_json()["density"]["decode"] < 1


def test_layers_may_share_keys(model: Any) -> None:
    """Some models let several layers read one layer's keys, each with its own queries."""
    sparse = SparseAttention(k=2, dense_tail=0, selector="probe")  # which records importance
    cache = KVSieveCache(model.config, sparse=sparse, cache_type="f32")
    layer = cache.layers[0]
    keys, values = layer.update(states(100), states(100))
    queries = torch.randn(2, 1, 4, 100, 32)
    module = model.model.layers[0].self_attn
    attention = transformers.AttentionInterface()["kvsieve"]
    one, _ = attention(module, queries[0], keys, values, None)
    importance = layer._opened.rows._caches[0].importance.copy()
    other, _ = attention(module, queries[1], keys, values, None)
    assert importance.any()
    assert (layer._opened.rows._caches[0].importance == importance).all()
    assert layer._opened.rows.num_tokens(0) == 100
    again, _ = attention(module, queries[0], keys, values, None)
    assert torch.equal(again, one)
    assert not torch.equal(other, one)


def test_a_written_prompt_is_not_kept_twice(model: Any) -> None:
    cache = KVSieveCache(model.config)
    logits(model, token_ids(1, 40), cache)
    assert all(layer._pending.states is None for layer in cache.layers)


def test_rows_for_the_kernels() -> None:
    rows = as_rows(torch.arange(24, dtype=torch.bfloat16).reshape(1, 2, 3, 4))
    assert rows.shape == (1, 3, 2, 4)
    assert rows.dtype == "float32"
    assert rows.flags.c_contiguous
    assert rows[0, 2, 1].tolist() == [20, 21, 22, 23]
