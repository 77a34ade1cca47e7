"""What stands for a block, and the mass that follows, against plain float64."""

import numpy as np

from kvsieve.kernels.layout import AnchorLayout
from kvsieve.kernels.reference.anchors import (
    block_masses,
    choose_anchors,
    merge_shares,
    received,
    record_logits,
    shares,
    summarize,
)
from kvsieve.kernels.reference.quantize import quantize_q8
from kvsieve.kernels.reference.selection import pick_mass, pick_window


def test_the_index_is_small() -> None:
    """6.9 bytes per token and KV head at head_dim 64, 12.9 at 128."""
    assert AnchorLayout(head_dim=64).record_bytes / (16 * 32) == 6.875
    assert AnchorLayout(head_dim=128).record_bytes / (16 * 32) == 12.875


def test_received_attention_is_a_softmax_over_two_blocks() -> None:
    logits = np.zeros((2, 64), np.float32)
    logits[0, 5], logits[0, 40] = np.log(97), np.log(3)  # sum 97 + 3 + 62
    got = received(logits)
    assert got.shape == (32,)
    np.testing.assert_allclose(got[5], 97 / 162 + 1 / 64, rtol=1e-5)
    np.testing.assert_allclose(got[0], 1 / 162 + 1 / 64, rtol=1e-5)


def test_anchors_are_the_most_attended_and_the_earlier_of_equals() -> None:
    attention = np.zeros(32, np.float32)
    attention[[20, 7, 9]] = 3, 2, 2
    assert choose_anchors(attention).tolist() == [20, 7]
    assert choose_anchors(np.zeros(32, np.float32)).tolist() == [0, 1]


def test_a_record_is_two_keys_a_mean_and_its_spread() -> None:
    random = np.random.default_rng(1)
    keys = random.standard_normal((2, 32, 16)).astype(np.float32)
    summary = summarize(keys, np.array([30, 4], np.int32))
    values = summary.codes * summary.scales[..., None].astype(np.float64)
    rest = np.delete(keys.astype(np.float64), [4, 30], axis=1)
    step = summary.scales.max() / 2
    np.testing.assert_allclose(values[:, 0], keys[:, 30], atol=step)
    np.testing.assert_allclose(values[:, 1], keys[:, 4], atol=step)
    np.testing.assert_allclose(values[:, 2], rest.mean(axis=1), atol=step)
    variance = rest.var(axis=1).reshape(2, 4, 4).mean(axis=2)
    np.testing.assert_allclose(summary.spreads, variance, rtol=1e-5)


def test_masses_are_exponentials_of_what_stands_for_a_block() -> None:
    random = np.random.default_rng(2)
    keys = (0.7 * random.standard_normal((5, 32, 16))).astype(np.float32)
    q = quantize_q8(random.standard_normal((3, 16)).astype(np.float32))
    chosen = np.array([3, 8], np.int32)
    summary = summarize(keys, chosen)
    recent = random.standard_normal((3, 2, 32)).astype(np.float32)
    recent[:, 1, 20:] = -np.inf
    masses, top = block_masses(record_logits(q, summary), recent)

    query = q.floats().astype(np.float64)
    vectors = summary.codes * summary.scales[..., None].astype(np.float64)
    logits = np.einsum("rd,bvd->rbv", query, vectors)
    energy = (query**2).reshape(3, 4, 4).sum(axis=2)
    logits[:, :, 2] += 0.2 * energy @ summary.spreads.T
    expected = np.exp(logits) @ [1, 1, 30]
    newest = np.exp(recent.astype(np.float64)).sum(axis=2)
    got = masses * np.exp(top.astype(np.float64))[:, None]
    np.testing.assert_allclose(got, np.concatenate([expected, newest], axis=1), rtol=1e-4)


def test_the_estimate_is_near_the_true_mass_of_keys_that_differ_little() -> None:
    """The anchors' share of the truth is exact and the others' spread small: within 2 %."""
    random = np.random.default_rng(3)
    keys = (0.04 * random.standard_normal((400, 32, 16)) + 1).astype(np.float32)
    q = quantize_q8(random.standard_normal((4, 16)).astype(np.float32))
    summary = summarize(keys, np.array([0, 1], np.int32))
    masses, top = block_masses(record_logits(q, summary), np.full((4, 2, 32), -5, np.float32))
    true = np.exp(np.einsum("rd,btd->rbt", q.floats(), keys)).sum(axis=(1, 2))
    got = (masses[:, :-2] * np.exp(top)[:, None]).sum(axis=1)
    np.testing.assert_allclose(got, true, rtol=0.02)


def test_shares_sum_to_one_and_add_up_over_larger_blocks() -> None:
    masses = np.array([[1, 2, 3, 4, 6]], np.float32)
    np.testing.assert_allclose(shares(masses, 32), masses / 16)
    np.testing.assert_allclose(shares(masses, 64), [[3 / 16, 7 / 16, 6 / 16]])


def test_rows_merge_by_the_largest_share_or_the_mean() -> None:
    rows = np.array([[0.5, 0.25, 0.25], [0.125, 0.25, 0.625]], np.float32)
    assert merge_shares(rows, is_mean=False).tolist() == [0.5, 0.25, 0.625]
    assert merge_shares(rows, is_mean=True).tolist() == [0.3125, 0.25, 0.4375]


def test_mass_is_reached_block_by_block() -> None:
    share = np.array([0.1, 0.3, 0.05, 0.3, 0.05, 0.2], np.float32)
    guards = (5, 0, 4)  # hold .35 of the attention

    def pick(mass: float, k_min: int = 1, k: int = 6) -> list[int]:
        return pick_mass(share, mass=mass, k_min=k_min, k=k, guards=guards).tolist()

    assert pick(0.3) == [0, 4, 5]
    assert pick(0.6) == [0, 1, 4, 5]  # of equal shares the lower block
    assert pick(0.9) == [0, 1, 3, 4, 5]
    assert pick(1.0) == [0, 1, 2, 3, 4, 5]
    assert pick(0.9, k=4) == [0, 1, 4, 5]
    assert pick(0.1, k_min=5) == [0, 1, 3, 4, 5]
    assert pick(0.9, k=2) == [0, 5]


def test_a_window_keeps_the_first_block() -> None:
    assert pick_window(10, 1).tolist() == [9]
    assert pick_window(10, 3).tolist() == [0, 8, 9]
    assert pick_window(3, 5).tolist() == [0, 1, 2]
