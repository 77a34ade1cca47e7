"""Exact masses in place of estimates, with values worked out by hand."""

import numpy as np

from kvsieve.kernels.reference.refinement import candidates, correct, num_refined


def test_the_number_refined_leaves_a_margin() -> None:
    assert [num_refined(k) for k in (1, 32, 48, 49, 100)] == [64, 64, 64, 65, 116]


def test_candidates_are_guards_and_the_largest_shares() -> None:
    merged = np.linspace(1, 0, 80, dtype=np.float32)
    chosen, margin = candidates(merged, 32)
    assert chosen.tolist() == [*range(62), 78, 79]
    assert margin.tolist() == list(range(46, 62))
    few, _ = candidates(merged[:20], 4)
    assert few.tolist() == list(range(20))


def test_masses_are_replaced_and_the_others_scaled() -> None:
    tops = np.zeros(1, np.float32)
    masses = np.array([[8, 4, 2, 1, 5, 6]], np.float32)  # the last two are exact
    logits = np.full((1, 2, 32), -np.inf, np.float32)
    logits[0, 0, 3] = np.log(7)  # block 0 holds 7, not 8
    logits[0, 1, :2] = np.log(0.5), np.log(1.5)  # block 2 holds 2
    pages = np.array([0, 2], np.int32)
    got, units = correct(masses, tops, logits, pages=pages, is_margin=np.array([0, 1], np.float32))
    in_units_of_one = got * np.exp(units)[:, None]
    np.testing.assert_allclose(in_units_of_one, [[7, 4, 2, 1, 5, 6]], rtol=1e-5)

    got, units = correct(masses, tops, logits, pages=pages, is_margin=np.array([1, 1], np.float32))
    scale = (7 + 2) / (8 + 2)
    np.testing.assert_allclose(
        got * np.exp(units)[:, None], [[7, 4 * scale, 2, scale, 5, 6]], rtol=1e-5
    )


def test_a_logit_above_all_estimates_becomes_the_unit() -> None:
    """Where the estimate is off by e^200, nothing overflows and the needle has it all."""
    masses = np.array([[1, 1, 1, 1]], np.float32)
    logits = np.zeros((1, 1, 32), np.float32)
    logits[0, 0, 0] = 200
    got, units = correct(
        masses,
        np.zeros(1, np.float32),
        logits,
        pages=np.array([1], np.int32),
        is_margin=np.ones(1, np.float32),
    )
    assert units.tolist() == [200]
    np.testing.assert_allclose(got, [[0, 1, 0, 0]], atol=1e-30)


def test_the_scale_is_bounded_and_is_one_where_nothing_was_estimated() -> None:
    tops = np.zeros(2, np.float32)
    masses = np.array([[1e-3, 1, 1, 1], [0, 1, 1, 1]], np.float32)
    logits = np.zeros((2, 1, 32), np.float32)
    got, _ = correct(
        masses,
        tops,
        logits,
        pages=np.array([0], np.int32),
        is_margin=np.ones(1, np.float32),
    )
    np.testing.assert_allclose(got, [[32, 16, 1, 1], [32, 1, 1, 1]], rtol=1e-6)
