"""Each check can fail, and each break fails exactly its own."""

import numpy as np
import pytest

from kvsieve.kernels.backends import make_backend
from kvsieve.lab import checks
from kvsieve.lab.checks import check_future, check_gather, run_checks
from kvsieve.lab.experiment import BREAKS, Experiment, Tensors

REFERENCE = make_backend("reference")

PASSING = [
    "masked dense vs gather: PASS",
    "future perturbation: PASS",
    "window pairs n=8,w=3: 21",
    "3 targets / 12 loaded = 25.0%",
]
FAILS = {"diagonal": 1, "renormalise": 0, "topk-before-mask": 1, "duplicate": 0}
"""Which of the lines above a break makes fail."""


def experiment(seed: int = 7, broken=None) -> Experiment:
    return Experiment(tensors=Tensors.drawn(seed), backend=REFERENCE, broken=broken)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_whole_run_passes(seed: int) -> None:
    assert [check.line() for check in run_checks(experiment(seed))] == PASSING


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_break_fails_its_check_and_no_other(broken, seed: int) -> None:
    lines = [check.line() for check in run_checks(experiment(seed, broken))]
    failing = FAILS[broken]
    name = PASSING[failing].removesuffix("PASS")
    assert lines[failing].startswith(f"{name}FAIL (query ")
    assert lines[:failing] + lines[failing + 1 :] == PASSING[:failing] + PASSING[failing + 1 :]


def test_a_gathered_output_that_is_slightly_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Experiment.gathered

    def wrong(self, queries=range(24)):
        out = right(self, queries)
        out[3:4] += 2e-5
        return out

    monkeypatch.setattr(Experiment, "gathered", wrong)
    assert check_gather(experiment()).reason.startswith("query 3 differs by 2")
    assert check_future(experiment()).passed


def test_an_output_that_is_not_a_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experiment, "gathered", lambda self: np.full((24, 4), np.nan, np.float32))
    assert not check_gather(experiment()).passed


def test_one_bit_of_the_future_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Experiment.gathered

    def leaking(self, queries=range(24)):
        out = right(self, queries)
        if self.tensors.v[0, 23, 0] == 100:  # the last token was replaced
            out[0, 0] = np.nextafter(out[0, 0], np.float32(9))
        return out

    monkeypatch.setattr(Experiment, "gathered", leaking)
    assert "query 0 moves by" in check_future(experiment()).reason


def test_wrong_counts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "window_pairs", lambda n, width_tokens: n * width_tokens)
    monkeypatch.setattr(checks, "loaded_tokens", lambda *a, **b: 3)
    lines = [check.line() for check in run_checks(experiment())]
    assert lines[2] == "window pairs n=8,w=3: 24 (FAIL: the mask counts 21, by hand it is 21)"
    assert lines[3] == "3 targets / 3 loaded = 100.0% (FAIL: three different blocks of 4 are 12)"


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS)
def test_a_break_fails_for_every_seed(broken) -> None:
    for seed in range(60):
        passed = [check.passed for check in run_checks(experiment(seed, broken))]
        assert passed == [i != FAILS[broken] for i in range(4)], seed
