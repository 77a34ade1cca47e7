from pathlib import Path

import pytest

from tests.cli.conftest import Run

PASSING = [
    "masked dense vs gather: PASS",
    "future perturbation: PASS",
    "window pairs n=8,w=3: 21",
    "3 targets / 12 loaded = 25.0%",
]
REFERENCE = ["--backend", "reference"]


def test_the_run_ends_with_its_checks(run: Run) -> None:
    ran = run("lab", "--seed", "7", *REFERENCE)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-4:] == PASSING


@pytest.mark.parametrize(
    ("broken", "failing", "why"),
    [
        ("diagonal", 1, "without the mask inside it"),
        ("renormalise", 0, "sums to less than 1"),
        ("topk-before-mask", 1, "ranked before causality"),
        ("duplicate", 0, "gathered twice"),
    ],
)
def test_what_is_broken_fails_alone_and_is_explained(
    run: Run, broken: str, failing: int, why: str
) -> None:
    ran = run("lab", "--break", broken, *REFERENCE)
    assert (ran.code, ran.err) == (1, "")
    lines = ran.out.splitlines()[-4:]
    assert [i for i, line in enumerate(lines) if line != PASSING[i]] == [failing]
    assert "FAIL (query" in lines[failing]
    assert why in " ".join(ran.out.split())


def test_plot(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "masks.svg"
    assert run("lab", "--plot", str(path), *REFERENCE).code == 0
    assert path.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--break", "everything"], "--break: expected one of diagonal, renormalise, topk-before"),
        (["--seed", "-1"], "[lab] seed: expected 0 or more, got -1"),
        (["--backend", "gpu"], "--backend: expected one of native, reference, got gpu"),
        (["--plot", "masks.jpg"], "[plot] "),
    ],
)
def test_mistakes_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    ran = run("lab", *REFERENCE, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsieve: error: {message}")
    assert ran.err.count("\n") == 1
