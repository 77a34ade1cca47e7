import pytest

from peers.figures import Spread, best, ratio, ratios, tokens_per_second
from tests.benchmarks.comparisons import answer, comparison, speed


def test_speed_is_the_median_with_its_extremes():
    rounds = [speed(1.0, 10.0), speed(2.0, 40.0), speed(4.0, 20.0)]
    assert tokens_per_second(rounds, "prefill") == Spread(median=500, low=250, high=1000)
    assert tokens_per_second(rounds, "decode") == Spread(median=50, low=25, high=100)


def test_a_ratio_is_taken_within_rounds():
    """A machine at half its speed in round 2 changes no ratio; medians apart would differ."""
    ours = [speed(1.0, 10.0), speed(3.0, 30.0), speed(1.0, 10.0)]
    theirs = [speed(2.0, 15.0), speed(6.0, 45.0), speed(4.0, 20.0)]
    assert ratio(ours, theirs, "prefill") == Spread(median=2.0, low=2.0, high=4.0)
    assert ratio(ours, theirs, "decode") == Spread(median=1.5, low=1.5, high=2.0)


def test_prompts_of_other_lengths_compare_by_token():
    ours, theirs = [speed(1.0, 10.0)], [speed(1.0, 10.0, prompt_tokens=500)]
    assert ratio(ours, theirs, "prefill").median == pytest.approx(2.0)


def test_sides_of_a_ratio_have_equal_rounds():
    with pytest.raises(ValueError, match="shorter"):
        ratio([speed(1.0, 1.0)] * 2, [speed(1.0, 1.0)], "decode")


def test_the_best_peer_is_the_fastest_of_each_phase():
    speeds = comparison().speeds[1000]
    names = ["quick", "slow", "timed only"]
    assert best(speeds, names, "prefill") == "quick"
    # Medians 30, 40 and 60 ms: one fast round of `slow` does not make it the best.
    assert best(speeds, names, "decode") == "quick"


def test_a_peer_that_loses_the_answer_is_no_base():
    rows = {(row.depth, row.phase): row for row in ratios(comparison())}
    prefill, decode = rows[1000, "prefill"], rows[1000, "decode"]
    assert (prefill.base, prefill.spread) == ("slow", Spread(median=3.0, low=2.0, high=4.0))
    assert (decode.base, decode.spread) == ("slow", Spread(median=2.5, low=1.5, high=4.0))


def test_a_base_that_was_asked_for_is_kept():
    rows = ratios(comparison(), base="quick")
    assert [row.base for row in rows] == ["quick", "quick", None, None]
    assert rows[0].spread == Spread(median=0.5, low=0.25, high=0.5)


def test_one_miss_of_three_does_not_disqualify():
    answers = [answer("quick", hit) for hit in (True, True, False)]
    some = comparison(answers=answers)
    assert some.found("quick") == (2, 3)
    assert not some.loses_the_answer("quick")
    assert comparison(answers=answers[1:] + answers[2:]).loses_the_answer("quick")


def test_an_engine_that_was_not_asked_counts():
    assert not comparison().loses_the_answer("timed only")
