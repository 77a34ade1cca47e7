"""Case STR-01: a stop string across token boundaries, with no part of it given out."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.engine.stop import StopMatcher, stop_strings
from kvsieve.errors import ConfigError


def run(stops: Any, pieces: Sequence[str]) -> tuple[list[str], bool]:
    """Deltas up to a stop, or all of them with what is left at the end."""
    matcher, out = StopMatcher(stops), []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
        if stopped:
            assert matcher.push("more") == ("", True)
            assert matcher.flush() == ""
            return out, True
    return [*out, matcher.flush()], False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "stopped"),
    [
        (["DEFGHIJ"], ["DEF", "G", "HI", "J"], ["", "", "", ""], True),
        (["own fox"], ["The quick br", "own", " fox"], ["The quick br", "", ""], True),
        (["own fox"], ["The quick brown", " dog"], ["The quick br", "own dog", ""], False),
        # The shorter ends first: it is complete before the longer could be.
        (["bcde", "cd"], ["ab", "c", "de"], ["a", "", "b"], True),
        # Both end at once: the longer, so that no part of it stays in the text.
        (["cd", "abcd"], ["xab", "cd"], ["x", ""], True),
        (["END", "ENDING"], ["the ENDING"], ["the "], True),
        ("stop", ["do s", "top"], ["do ", ""], True),
        (None, ["abc"], ["abc", ""], False),
        ([], ["abc"], ["abc", ""], False),
        (["a", "b", "c", "d", "e"], ["xyz", "e"], ["xyz", ""], True),
        # Inside one token, and in its middle.
        (["\n\n"], ["one\n\ntwo"], ["one"], True),
        # A beginning that fails may hold a later beginning.
        (["aab"], ["aaa", "a", "b"], ["a", "a", ""], True),
        (["abab!"], ["ababab", "!"], ["ab", ""], True),
        (["ab"], ["", "a", "", "b"], ["", "", "", ""], True),
        (["xyz"], ["ax", "y"], ["a", "", "xy"], False),
        (["."], ["a.", "b"], ["a"], True),
    ],
)
def test_text_ends_just_before_the_stop(
    stops: Any, pieces: list[str], expected: list[str], stopped: bool
) -> None:
    assert run(stops, pieces) == (expected, stopped)


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The rule in one line: the earliest end, then the earliest beginning."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_the_cut_depends_on_the_text_alone(pieces: list[str], stops: list[str]) -> None:
    out, stopped = run(stops, pieces)
    assert ("".join(out), stopped) == first_stop("".join(pieces), stops)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1), max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out, stopped = matcher.push(text)
    if not stopped:
        held = text.removeprefix(given_out)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_long_stop_strings_stay_cheap() -> None:
    # Every character of the text is a near miss: comparing anew each time would be 10**9 steps.
    stop = "a" * 30_000 + "b"
    text, stopped = run([stop], ["a" * 40_000])
    assert (sum(map(len, text)), stopped) == (40_000, False)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], 1, [None], b"a", [b"a"], {"a": 1}])
def test_stops_that_are_not_text_are_refused(stop: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[stop\] stop: expected"):
        stop_strings(stop)


def test_stop_strings_takes_what_clients_send() -> None:
    assert stop_strings(None) == stop_strings([]) == ()
    assert stop_strings("x") == ("x",)
    assert stop_strings(["x", "yz"]) == ("x", "yz")
