import json
from pathlib import Path

from tests.cli.conftest import Run

SMALL = ["--length", "250", "--queries", "4", "--sparse-attn", "--sparse-k", "3"]


def test_the_profile_lies_beside_the_model_or_where_it_is_asked_to(
    on_tiny: Run, model: Path, tmp_path: Path
) -> None:
    beside = model.with_suffix(".sparse.json")
    asked = tmp_path / "profile.json"
    try:
        for options, path in (([], beside), (["--out", str(asked)], asked)):
            ran = on_tiny("calibrate", *SMALL, "--min-mass", "1", "--max-exact", "0.5", *options)
            assert ran.code == 0, ran.err
            assert ran.out.count("\n| ") == 3  # the rule and two layers
            exact = json.loads(path.read_text())["exact_layers"]
            assert len(exact) == 1
            assert f"exact layers: {exact[0]}\n{path}\n" in ran.out
    finally:
        beside.unlink(missing_ok=True)


def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    on_tiny: Run, tmp_path: Path
) -> None:
    ran = on_tiny("calibrate", *SMALL, "--out", str(tmp_path / "no" / "profile.json"))
    assert (ran.code, ran.out) == (2, "")
    assert "--out: expected a file that can be written" in ran.err


def test_bad_options_are_named(on_tiny: Run) -> None:
    for options in (["--length", "0"], ["--min-mass", "2"], ["--max-exact", "-1"]):
        ran = on_tiny("calibrate", *options)
        assert (ran.code, ran.out) == (2, "")
        assert options[0] in ran.err
