"""Evaluations over texts, sweeps and their page, through the program."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.tiny_model import write_tiny_gguf

ARM = ["--attn", "sparse:k=4,tail=0"]


@pytest.mark.parametrize(
    ("command", "options", "figures"),
    [
        ("recall", ["--queries", "3"], {"kept_mass", "oracle_mass", "output_error"}),
        ("divergence", ["--positions", "3"], {"kl", "top1", "logprob", "logprob_exact"}),
        ("perplexity", ["--start", "200"], {"perplexity", "change"}),
    ],
)
def test_measures_of_a_text(
    on_tiny: Run, command: str, options: list[str], figures: set[str]
) -> None:
    settings = ["C"] if command == "perplexity" else ["B", "C"]
    ran = on_tiny("eval", command, "--lengths", "250", *options, *ARM, "-o", "json")
    assert ran.code == 0, ran.err
    rows = [row for row in json.loads(ran.out) if row["attn"] != "exact"]
    assert [row["setting"] for row in rows] == settings
    for row in rows:
        assert figures < set(row)
        assert row["text"].startswith("natural:")
        assert row["density"] < 1
    ran = on_tiny("eval", command, "--lengths", "250", *options, "-o", "json")
    assert (ran.code, json.loads(ran.out or "[]")) == (2, [])
    assert "fit the budget of 32" in ran.err


def test_a_sweep_goes_on_refuses_another_model_and_becomes_a_page(
    on_tiny: Run, run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    db = str(tmp_path / "results.db")
    grid = ["eval", "sweep", "--db", db, "--tasks", "passkey", "--settings", "B"]
    grid += ["--budgets", "3", "--selectors", "even"]
    ran = on_tiny(*grid, "--lengths", "200", "--depths", "0.5")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("passkey, 200 tokens, depth 0.5, exact: answer")
    assert "2 rows added, 0 of 2 were there" in ran.err
    ran = on_tiny(*grid, "--lengths", "200", "--depths", "0.5,0.9")
    assert "2 rows added, 2 of 4 were there" in ran.err

    other = write_tiny_gguf(tmp_path / "other.gguf", seed=7, context=544)
    ran = run(*grid, "--lengths", "200", "-m", str(other), "--backend", "reference")
    assert ran.code == 2
    assert "results never mix" in ran.err

    page = tmp_path / "page"
    ran = run("eval", "report", db, "--out", str(page))
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in page.iterdir()) == ["index.html", "passkey.png"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["sweep", "--tasks", "riddle"], "--tasks"),
        (["sweep", "--text", "poem"], "--text"),
        (["sweep", "--sparse-attn", "--sparse-k", "3"], "--sparse-k: expected --budgets"),
        (["sweep", "--selectors", "best"], "selector"),
        (["sweep", "--queries", "0"], "--queries"),
        (["recall", "--by", "token"], "--by"),
        (["perplexity", "--settings", "B"], "--settings"),
        (["divergence", "--positions", "1"], "--positions"),
        (["report", "missing.db"], "missing.db"),
    ],
)
def test_bad_options_are_named(run: Run, options: list[str], named: str) -> None:
    ran = run("eval", *options)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err
    assert ran.err.count("\n") == 1
