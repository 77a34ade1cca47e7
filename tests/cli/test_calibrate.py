import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.evals.calibration import Profile, calibrate
from tests.cli.conftest import Run

UNIFORM = ["--sparse-share", "group", "--sparse-first-layer", "1"]
SPARSE = ["--sparse-attn", *UNIFORM, "--sparse-k", "3"]
SMALL = ["--length", "250", "--queries", "4", *SPARSE]


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
            assert (
                f"exact layers: {exact[0]}; layers with more blocks: {1 - exact[0]} (6)" in ran.out
            )
            assert ran.out.endswith(f"\n{path}\n")
    finally:
        beside.unlink(missing_ok=True)


def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    on_tiny: Run, tmp_path: Path
) -> None:
    ran = on_tiny("calibrate", *SMALL, "--out", str(tmp_path / "no" / "profile.json"))
    assert (ran.code, ran.out) == (2, "")
    assert "--out: expected a file that can be written" in ran.err


def test_bad_options_are_named(on_tiny: Run) -> None:
    for options in (
        ["--length", "0"],
        ["--min-mass", "2"],
        ["--max-exact", "-1"],
        ["--sparse-profile", "none", "--sparse-attn"],
    ):
        ran = on_tiny("calibrate", *options)
        assert (ran.code, ran.out) == (2, "")
        assert options[0] in ran.err


@pytest.fixture(scope="module")
def measured(model: Path) -> Profile:
    sparse = SparseAttention(k=3, share="group", first_layer=1)
    with LLM(model, backend="reference") as llm:
        return calibrate(llm, sparse, length=250, queries=4, min_mass=1.0, max_exact=0.5)


@pytest.fixture
def profile(measured: Profile, model: Path) -> Iterator[Path]:
    """What calibrate writes beside the model."""
    path = model.with_suffix(".sparse.json")
    measured.write(path)
    yield path
    path.unlink()


GENERATE = ["generate", "-p", "x" * 260, "-n", "2", "--json", *SPARSE]


def test_a_later_run_takes_the_profile_up_and_names_it(on_tiny: Run, profile: Path) -> None:
    exact = json.loads(profile.read_text())["exact_layers"]
    ran = on_tiny(*GENERATE)
    assert ran.code == 0, ran.err
    assert f"kvsieve: profile {profile}: exact layers: {exact[0]}; " in ran.err
    taken = json.loads(ran.out)["attention"]
    assert (taken["exact_layers"], taken["layer_k"]) == (exact, {str(1 - exact[0]): 6})
    assert taken["profile"] == profile.name
    plain = on_tiny(*GENERATE, "--sparse-profile", "none")
    assert "profile" not in plain.err
    left = json.loads(plain.out)["attention"]
    assert (left["exact_layers"], left["layer_k"], left["profile"]) == ([], {}, None)
    assert taken["blocks_read"] > left["blocks_read"]


def test_one_that_does_not_fit_is_named_and_refused_where_it_was_asked_for(
    on_tiny: Run, profile: Path, tmp_path: Path
) -> None:
    ran = on_tiny(*GENERATE[:-1], "4")
    assert ran.code == 0
    assert f"profile not used: --sparse-profile {profile}: expected one for k=4" in ran.err
    assert json.loads(ran.out)["attention"]["profile"] is None
    other = tmp_path / "other.json"
    about = json.loads(profile.read_text())
    for change, words in (
        ({"fingerprint": "0" * 16}, "expected a profile of this model"),
        ({"cache_type": "f16"}, "expected one for a q8_0 cache, got one for f16"),
        ({"sparse": {**about["sparse"], "selector": "window"}}, "selector=window"),
        ({"format": 1}, "expected format 2"),
    ):
        other.write_text(json.dumps({**about, **change}))
        ran = on_tiny(*GENERATE, "--sparse-profile", str(other))
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err
        assert str(other) in ran.err


def test_layers_that_are_named_go_before_a_profile(on_tiny: Run, profile: Path) -> None:
    ran = on_tiny(*GENERATE, "--sparse-layer-k", "0:5")
    assert "profile" not in ran.err
    assert json.loads(ran.out)["attention"]["layer_k"] == {"0": 5}
    ran = on_tiny(*GENERATE, "--sparse-layer-k", "0:5", "--sparse-profile", str(profile))
    assert ran.code == 2
    assert "expected no --sparse-exact-layers and no --sparse-layer-k" in ran.err
    ran = on_tiny(*GENERATE, "--sparse-layer-k", "0-5")
    assert (ran.code, "expected layers and blocks as in 3:64" in ran.err) == (2, True)


def test_bench_and_eval_take_it_and_spell_it_in_their_rows(on_tiny: Run, profile: Path) -> None:
    exact = json.loads(profile.read_text())["exact_layers"][0]
    selector = f"selector={SparseAttention().selector}"
    layers = f"exact={exact},layerk={1 - exact}:6,first=1"
    label = f"sparse:k=3,{selector},share=group,{layers}"
    sparse = [*SPARSE, "-o", "json"]
    for command in (
        ["bench", "-d", "250", "-n", "2", "-r", "1"],
        ["eval", "recall", "--lengths", "250", "--queries", "2", "--settings", "B"],
        ["eval", "divergence", "--lengths", "250", "--positions", "2", "--settings", "B"],
    ):
        ran = on_tiny(*command, *sparse)
        assert ran.code == 0, ran.err
        assert label in {row["attn"] for row in json.loads(ran.out)}
        assert "kvsieve: profile" in ran.err
    ran = on_tiny("bench", "-d", "250", "-n", "2", "-r", "1", "--attn", "sparse:k=3", "-o", "json")
    assert {row["attn"] for row in json.loads(ran.out)} == {"sparse:k=3"}
