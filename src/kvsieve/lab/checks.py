"""The four checks of the lab, each of which can fail."""

from dataclasses import dataclass, replace

import numpy as np

from kvsieve.attention.masks import sliding_window
from kvsieve.lab.arithmetic import loaded_tokens, window_pairs
from kvsieve.lab.experiment import N_TOKENS, Experiment

TOLERANCE = 1e-5
"""Between f32 kernels and the float64 oracle, outputs being of the order of 1."""

TARGETS = (1, 6, 14)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A line of the result: what was checked, what came out, and why not if it failed."""

    name: str
    result: str
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is nothing to explain."""
        return not self.reason

    def line(self) -> str:
        """``name: PASS``, or the number itself; a failure says FAIL and why."""
        return f"{self.name}{self.result}" + (f" ({self.reason})" if self.reason else "")


def run_checks(experiment: Experiment) -> list[Check]:
    """All four, in the order in which they are printed."""
    return [
        check_gather(experiment),
        check_future(experiment),
        check_window_pairs(),
        check_loaded_tokens(),
    ]


def check_gather(experiment: Experiment) -> Check:
    """Gathered attention equals dense attention under the mask that the run itself defines."""
    difference = np.abs(experiment.gathered() - experiment.masked_dense()).max(axis=1)
    worst = int(difference.argmax())
    reason = ""
    if not difference[worst] <= TOLERANCE:
        reason = f"query {worst} differs by {difference[worst]:.3g}"
    return _passed("masked dense vs gather", reason)


def check_future(experiment: Experiment) -> Check:
    """No output changes by a bit when all that comes after its query is replaced."""
    before = experiment.gathered()
    worst, reason = 0.0, ""
    for after in range(N_TOKENS - 1):
        for sign in (1.0, -1.0):
            tensors = experiment.tensors.with_future(after, sign=sign)
            changed = replace(experiment, tensors=tensors).gathered(range(after + 1))
            difference = np.abs(changed - before[: after + 1]).max(axis=1)
            if difference.max() > worst:
                worst, query = float(difference.max()), int(difference.argmax())
                reason = f"query {query} moves by {worst:.3g} when tokens after {after} change"
    return _passed("future perturbation", reason)


def check_window_pairs() -> Check:
    """The formula against the mask, counted: 8 queries, a window of 3."""
    pairs, counted = window_pairs(8, width_tokens=3), int(sliding_window(3).tokens(8).sum())
    reason = "" if pairs == counted == 21 else f"FAIL: the mask counts {counted}, by hand it is 21"
    return Check(name="window pairs n=8,w=3: ", result=str(pairs), reason=reason)


def check_loaded_tokens() -> Check:
    """Reading 3 targets by blocks of 4 loads 12 tokens."""
    loaded = loaded_tokens(TARGETS, n_tokens=16, block_tokens=4)
    reason = "" if loaded == 12 else "FAIL: three different blocks of 4 are 12"
    result = f"{len(TARGETS)} targets / {loaded} loaded = {len(TARGETS) / loaded:.1%}"
    return Check(name="", result=result, reason=reason)


def _passed(name: str, reason: str) -> Check:
    return Check(name=f"{name}: ", result="FAIL" if reason else "PASS", reason=reason)
