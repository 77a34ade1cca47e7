"""The run itself: what it reads, and what the four breaks change."""

import numpy as np
import pytest

from kvsieve.errors import ConfigError
from kvsieve.kernels.backends import make_backend
from kvsieve.lab.experiment import BREAKS, N_TOKENS, WHY, Experiment, Tensors

REFERENCE = make_backend("reference")


def experiment(seed: int = 7, broken=None) -> Experiment:
    return Experiment(tensors=Tensors.drawn(seed), backend=REFERENCE, broken=broken)


def test_tensors_follow_from_the_seed_and_print_as_they_are() -> None:
    first, again, other = (Tensors.drawn(seed) for seed in (7, 7, 8))
    for name in "qkv":
        array = getattr(first, name)
        assert array.shape == (1, N_TOKENS, 4)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, getattr(again, name))
        np.testing.assert_array_equal(array, np.round(array.astype(float), 1).astype(np.float32))
        assert not np.signbit(array[array == 0]).any()
    assert not np.array_equal(first.q, other.q)
    with pytest.raises(ConfigError, match=r"\[lab\] seed: expected 0 or more, got -1"):
        Tensors.drawn(-1)


@pytest.mark.parametrize("seed", range(5))
def test_a_query_reads_two_blocks_its_window_and_token_0_once_each(seed: int) -> None:
    run = experiment(seed)
    for row in run.rows:
        own = row.query // 4
        assert own in row.blocks
        assert len(row.blocks) == min(2, own + 1)
        # The other one is the block whose first or third key has the largest logit: its probes.
        q, k = run.tensors.q[0, row.query], run.tensors.k[0, : row.query + 1]
        logits = (k @ q) / 2
        probes = [logits[4 * b : 4 * b + 4 : 2].max() for b in range(own)]
        if own:
            assert set(row.blocks) == {own, int(np.argmax(probes))}
        in_blocks = {t for t in range(row.query + 1) if t // 4 in row.blocks}
        window = set(range(max(0, row.query - 2), row.query + 1))
        assert list(row.tokens) == sorted(in_blocks | window | {0})


def test_masks_are_what_the_rows_say() -> None:
    run = experiment()
    assert [np.flatnonzero(line).tolist() for line in run.mask] == [
        list(row.tokens) for row in run.rows
    ]
    for query in range(N_TOKENS):
        blocks = {token // 4 for token in run.rows[query].tokens}
        assert {t // 4 for t in np.flatnonzero(run.loaded[query])} == blocks
        assert run.loaded[query].sum() == 4 * len(blocks)
    for tile in range(N_TOKENS // 4):
        touched = {t // 4 for row in run.rows[4 * tile : 4 * tile + 4] for t in row.tokens}
        assert run.block_mask.blocks(0, tile).tolist() == sorted(touched)


def test_both_ways_equal_attention_written_out_by_hand() -> None:
    run = experiment()
    tensors = run.tensors
    for row in run.rows:
        tokens = list(row.tokens)
        logits = (tensors.k[0, tokens].astype(float) @ tensors.q[0, row.query].astype(float)) / 2
        weights = np.exp(logits) / np.exp(logits).sum()
        by_hand = weights @ tensors.v[0, tokens].astype(float)
        np.testing.assert_allclose(run.masked_dense()[row.query], by_hand, atol=1e-12)
        np.testing.assert_allclose(run.gathered()[row.query], by_hand, atol=1e-6)


def test_a_slice_of_queries_has_the_same_bits() -> None:
    run = experiment()
    np.testing.assert_array_equal(run.gathered(range(3, 9)), run.gathered()[3:9])


def test_the_future_that_is_put_in_ranks_first_or_last() -> None:
    tensors = Tensors.drawn(7)
    for sign in (1.0, -1.0):
        changed = tensors.with_future(9, sign=sign)
        for name in "qkv":
            before, after = getattr(tensors, name), getattr(changed, name)
            np.testing.assert_array_equal(before[:, :10], after[:, :10])
            assert (before[:, 10:] != after[:, 10:]).any()
        logits = changed.k[0] @ changed.q[0, 9] * sign
        assert logits[10:].min() > logits[:10].max()


def test_every_break_is_explained() -> None:
    assert set(WHY) == set(BREAKS)


def test_the_diagonal_break_reads_the_rest_of_its_block() -> None:
    run = experiment(broken="diagonal")
    assert all(set(range(row.query // 4 * 4, row.query // 4 * 4 + 4)) <= {*row.tokens}
               for row in run.rows)  # fmt: skip


def test_the_duplicate_break_gathers_the_window_twice() -> None:
    run = experiment(broken="duplicate")
    assert sorted(run.rows[9].tokens) != sorted(set(run.rows[9].tokens))
    np.testing.assert_array_equal(run.mask, experiment().mask)
