from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError, NumericalError, ShapeError
from kvsieve.integrations.paged.layer_rows import LayerRows
from tests.attention import naive
from tests.integrations.paged.oracle import attention, causal, host, states

SCALE = 32**-0.5


def layer_rows(num_rows: int = 1, **options: Any) -> LayerRows:
    return LayerRows(host(**options).settings, num_rows=num_rows, num_kv_heads=2, head_dim=32)


def attend(rows: LayerRows, row: int, q: np.ndarray, *, num_prompt: int) -> np.ndarray:
    held = rows.num_tokens(row)
    out, _ = rows.attend(
        row, q, start=held - len(q), num_prompt=num_prompt, prompt_len=held, scale=SCALE
    )
    return out


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 63, 65, 97])
def test_exact_attention_of_a_prompt_and_of_a_token(num_tokens: int) -> None:
    k, v, q = (states(seed, num_tokens, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 6)))
    rows = layer_rows()
    rows.append(0, k, v)
    expected = attention(q, k, v, causal(num_tokens, num_tokens))
    np.testing.assert_allclose(attend(rows, 0, q, num_prompt=num_tokens), expected, atol=2e-6)
    np.testing.assert_allclose(attend(rows, 0, q[-1:], num_prompt=0), expected[-1:], atol=2e-6)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0", "q4_0"])
def test_growing_changes_no_bit(cache_type: str, backend: str) -> None:
    """1,100 tokens outgrow the first room of 1,024: pages, index and importance move.

    The specification reads keys from pages, the core from the index.
    """
    sparse = SparseAttention(k=4, dense_tail=0)
    k, v, q = (states(seed, 1100, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 4)))
    step, whole = (
        layer_rows(sparse=sparse, cache_type=cache_type, backend=backend) for _ in range(2)
    )
    step.append(0, k[:1000], v[:1000])
    importance = attend(step, 0, q[968:1000], num_prompt=32)
    step.append(0, k[1000:], v[1000:])
    whole.append(0, k, v)
    whole.attend(0, q[968:1000], start=968, num_prompt=32, prompt_len=1000, scale=SCALE)
    assert importance.any()
    for rows in (step, whole):
        rows.lists = rows.attend(0, q[-1:], start=1099, num_prompt=0, prompt_len=1000, scale=SCALE)
    assert step.lists[1][0].lists is not None
    np.testing.assert_array_equal(step.lists[1][0].lists.indices, whole.lists[1][0].lists.indices)
    np.testing.assert_array_equal(step.lists[0], whole.lists[0])


def test_a_row_holds_what_it_was_given_and_no_other_row() -> None:
    rows = layer_rows(3)
    for row, num_tokens in enumerate((40, 0, 70)):
        rows.append(row, states(row, num_tokens, 2, 32), states(9 + row, num_tokens, 2, 32))
    assert [rows.num_tokens(row) for row in range(3)] == [40, 0, 70]
    assert rows.num_bytes == (2 + 0 + 3) * 2 * (2 * 32 * 32 * 4)
    q = states(5, 1, 6, 32)
    for row, num_tokens in ((0, 40), (2, 70)):
        k, v = states(row, num_tokens, 2, 32), states(9 + row, num_tokens, 2, 32)
        expected = attention(q, k, v, causal(1, num_tokens))
        np.testing.assert_allclose(attend(rows, row, q, num_prompt=0), expected, atol=2e-6)


def test_tokens_that_were_taken_back_leave_no_trace() -> None:
    sparse = SparseAttention(k=2, dense_tail=0)
    k, v, q = (states(seed, 100, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 4)))
    once, again = layer_rows(sparse=sparse), layer_rows(sparse=sparse)
    for rows in (once, again):
        rows.append(0, k[:80], v[:80])
        attend(rows, 0, q[:80], num_prompt=80)
    again.append(0, k[:15], v[:15])
    attend(again, 0, q[:15], num_prompt=15)
    again.truncate(0, 80)
    for rows in (once, again):
        rows.append(0, k[80:], v[80:])
    np.testing.assert_array_equal(
        attend(once, 0, q[80:], num_prompt=20), attend(again, 0, q[80:], num_prompt=20)
    )
    np.testing.assert_array_equal(
        attend(once, 0, q[99:], num_prompt=0), attend(again, 0, q[99:], num_prompt=0)
    )


def test_picked_rows_go_their_own_way() -> None:
    k, v = states(0, 3, 50, 2, 32), states(1, 3, 50, 2, 32)
    rows = layer_rows(3)
    for row in range(3):
        rows.append(row, k[row], v[row])
    rows.pick([2, 0, 2])
    rows.append(2, k[1], v[1])
    q = states(2, 1, 4, 32)
    expected = [(k[2], v[2]), (k[0], v[0])]
    expected.append((np.concatenate([k[2], k[1]]), np.concatenate([v[2], v[1]])))
    for row, (keys, values) in enumerate(expected):
        want = attention(q, keys, values, causal(1, len(keys)))
        np.testing.assert_allclose(attend(rows, row, q, num_prompt=0), want, atol=2e-6)


def test_a_deep_copy_is_independent() -> None:
    rows = layer_rows()
    rows.append(0, states(0, 40, 2, 32), states(1, 40, 2, 32))
    q = states(2, 1, 4, 32)
    before = attend(rows, 0, q, num_prompt=0)
    other = deepcopy(rows)
    other.append(0, states(3, 40, 2, 32), states(4, 40, 2, 32))
    assert (rows.num_tokens(0), other.num_tokens(0)) == (40, 80)
    np.testing.assert_array_equal(attend(rows, 0, q, num_prompt=0), before)
    assert other.settings is rows.settings


def test_several_decoded_tokens_are_decoded_one_by_one() -> None:
    """Each reads its own blocks, and no later token, though all were written before."""
    sparse = SparseAttention(k=2, selector="even", dense_tail=0)
    k, v, q = (states(seed, 105, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 4)))
    rows = layer_rows(sparse=sparse)
    rows.append(0, k, v)
    together, reads = rows.attend(0, q[100:], start=100, num_prompt=0, prompt_len=100, scale=SCALE)
    for t in range(5):
        lists = naive.decode(
            q[100 + t],
            k[: 101 + t].transpose(1, 0, 2),
            k=2,
            selector="even",
            share="head",
            scale=SCALE,
        )
        seen = np.zeros((4, 1, 101 + t), np.bool_)
        for head in range(4):
            for block in lists[head][0]:
                seen[head, 0, block * 32 : block * 32 + 32] = True
        expected = attention(q[100 + t : 101 + t], k[: 101 + t], v[: 101 + t], seen)
        np.testing.assert_allclose(together[t : t + 1], expected, atol=2e-6)
        assert reads[t].segment.start + reads[t].segment.q_len == 101 + t


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_a_token_mask_is_read_as_it_is(cache_type: str) -> None:
    k, v, q = (states(seed, 150, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 6)))
    rows = layer_rows(cache_type=cache_type)
    rows.append(0, k, v)
    seen = np.random.default_rng(3).random((140, 150)) < 0.3
    seen[:, 7] = True
    if cache_type == "q8_0":
        k, v = (eight_bits(array) for array in (k, v))
    expected = attention(q[10:], k, v, seen)
    np.testing.assert_allclose(
        rows.attend_tokens(0, q[10:], tokens=seen, scale=SCALE), expected, atol=1e-5
    )


def eight_bits(array: np.ndarray) -> np.ndarray:
    """docs/selection.md, section 1: one scale per token and head."""
    scale = np.abs(array).max(axis=-1, keepdims=True) / np.float32(127)
    return np.rint(array / scale) * scale


def test_a_token_mask_of_another_shape_is_refused() -> None:
    rows = layer_rows()
    rows.append(0, states(0, 5, 2, 32), states(1, 5, 2, 32))
    with pytest.raises(ShapeError, match=r"tokens: expected \(2, 5\), got \(2, 4\)"):
        rows.attend_tokens(0, states(2, 2, 4, 32), tokens=np.ones((2, 4), np.bool_), scale=1.0)


def test_bad_values_are_refused_and_nothing_is_held() -> None:
    rows = layer_rows()
    k = states(0, 5, 2, 32)
    k[3, 1, 4] = np.nan
    with pytest.raises(NumericalError):
        rows.append(0, k, states(1, 5, 2, 32))
    assert rows.num_tokens(0) == 0


def test_a_head_that_no_page_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim: expected a multiple of 16"):
        LayerRows(host().settings, num_rows=1, num_kv_heads=1, head_dim=40)


def test_the_kept_mass_of_a_decoded_token(backend: str) -> None:
    """Blocks of equal keys: their mass is what it is estimated by. 4 of 12 blocks are read."""
    n = 12 * 32
    k = np.repeat(states(0, 12, 2, 32), 32, axis=0)
    v, q = states(1, n, 2, 32), states(2, 1, 4, 32)
    sparse = SparseAttention(k=4, dense_tail=0, first_layer=1)
    rows = layer_rows(sparse=sparse, backend=backend)
    rows.append(0, k, v)
    _, (read,) = rows.attend(0, q, start=n - 1, num_prompt=0, prompt_len=n - 1, scale=SCALE)
    assert read.lists is not None
    assert read.kept_mass is not None
    for head in range(4):
        logits = SCALE * k[:, head // 2].astype(np.float64) @ q[0, head]
        weights = np.exp(logits - logits.max()).reshape(12, 32).sum(axis=1)
        blocks = read.lists.indices[read.lists.indptr[head] : read.lists.indptr[head + 1]]
        want = weights[blocks].sum() / weights.sum()
        assert 0.1 < want < 0.995
        assert read.kept_mass[head] == pytest.approx(want, abs=0.02)
    _, (prompt,) = rows.attend(
        0, states(3, 32, 4, 32), start=n - 32, num_prompt=32, prompt_len=n, scale=SCALE
    )
    assert prompt.kept_mass is None


def test_a_layer_has_its_own_budget() -> None:
    sparse = SparseAttention(k=2, dense_tail=0, selector="even", layer_k=((1, 4),))
    k, v, q = (states(seed, 300, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 4)))
    lengths = []
    for layer in (0, 1):
        rows = LayerRows(
            host(sparse).settings, num_rows=1, num_kv_heads=2, head_dim=32, layer=layer
        )
        rows.append(0, k, v)
        _, (read,) = rows.attend(0, q[-1:], start=299, num_prompt=0, prompt_len=200, scale=SCALE)
        assert read.lists is not None
        lengths.append(set(np.diff(read.lists.indptr).tolist()))
    assert lengths == [{2}, {4}]


def test_the_kept_mass_is_estimated_at_the_first_token_and_at_every_32nd() -> None:
    k, v, q = (states(seed, 400, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 4)))
    rows = layer_rows(sparse=SparseAttention(k=2, dense_tail=0, selector="anchors"))
    rows.append(0, k, v)
    _, reads = rows.attend(0, q[330:], start=330, num_prompt=0, prompt_len=330, scale=SCALE)
    assert all(read.lists is not None for read in reads)
    estimated = [read.segment.start for read in reads if read.kept_mass is not None]
    assert estimated == [330, 352, 384]


def test_a_layer_that_is_to_be_exact_reads_everything() -> None:
    sparse = SparseAttention(k=2, dense_tail=0, exact_layers=(0,))
    k, v, q = (states(seed, 300, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 4)))
    for layer, exact in ((0, True), (1, False)):
        rows = LayerRows(
            host(sparse).settings, num_rows=1, num_kv_heads=2, head_dim=32, layer=layer
        )
        rows.append(0, k, v)
        out, reads = rows.attend(0, q, start=0, num_prompt=300, prompt_len=300, scale=SCALE)
        assert (reads[0].lists is None) == exact
        want = attention(q, k, v, causal(300, 300))
        assert np.allclose(out, want, atol=1e-5) == exact
