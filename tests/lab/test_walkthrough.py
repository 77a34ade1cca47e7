import numpy as np

from kvsieve.kernels.backends import make_backend
from kvsieve.lab.checks import Check
from kvsieve.lab.experiment import Experiment, Tensors
from kvsieve.lab.walkthrough import walkthrough

CHECKS = [Check(name="first: ", result="PASS"), Check(name="", result="2", reason="FAIL: 3")]


def text(broken=None) -> tuple[Experiment, str]:
    run = Experiment(tensors=Tensors.drawn(7), backend=make_backend("reference"), broken=broken)
    return run, walkthrough(run, CHECKS, seed=7)


def test_what_is_printed_is_what_was_computed() -> None:
    run, printed = text()
    lines = printed.splitlines()
    tensors = [line for line in lines if line.count(" | ") == 3][1:]
    read = np.array([[float(x) for part in line.split("|")[1:] for x in part.split()]
                     for line in tensors])  # fmt: skip
    expected = np.concatenate([run.tensors.q[0], run.tensors.k[0], run.tensors.v[0]], axis=1)
    np.testing.assert_allclose(read, expected, atol=1e-6)
    marks = ["".join(line.split("|")[1:-1]) for line in lines if line.startswith("  query ")]
    assert [[c == "#" for c in row] for row in marks] == run.mask.tolist()
    assert [[c != "." for c in row] for row in marks] == run.loaded.tolist()
    assert lines[-3:] == ["", "first: PASS", "2 (FAIL: 3)"]
    assert max(map(len, lines)) <= 100


def test_a_break_says_why_before_the_checks() -> None:
    _, printed = text("diagonal")
    why = printed.index("Broken on purpose: diagonal")
    assert "its future" in printed[why:]
    assert printed.index("first: PASS") > why
    assert "Broken" not in text()[1]
