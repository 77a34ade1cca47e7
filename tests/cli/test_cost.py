import importlib.util
import json
from pathlib import Path

import pytest

from kvsieve.engine import model_loader
from kvsieve.lab import kernel_times
from tests.checkpoints import write_folder
from tests.cli.conftest import Run

ONE_HEAD = ["--head-dim", "128", "--cache-type", "bf16"]


def test_one_head_at_32768_tokens(run: Run) -> None:
    ran = run("cost", "--context", "32768", *ONE_HEAD, "--selector", "scan", "--json")
    assert (ran.code, ran.err) == (0, "")
    facts = json.loads(ran.out)
    exact, sparse = facts["exact_token"], facts["rule_token"]
    assert (exact["attention_flop"], exact["cache_bytes"]) == (16_777_216, 16 << 20)
    assert (sparse["attention_flop"], sparse["cache_bytes"]) == (524_288, 512 << 10)
    assert sparse["index_bytes"] == 1 << 20
    assert facts["rule"]["scan_dims"] == 16
    assert facts["break_even"]["token_bytes_at_tokens"] > 1024


def test_a_window(run: Run) -> None:
    out = run("cost", "--context", "4096", "--window", "256", *ONE_HEAD).out
    line = next(line for line in out.splitlines() if "8,390,656" in line)
    assert line.split()[-3:] == ["8,390,656", "1,015,936", "8.26x"]
    both = run("cost", "--context", "4096", "--window", "256", "--k", "2", *ONE_HEAD).out
    assert "2 of 128 blocks of 32" in both
    assert "a window of 256 tokens" in both


def test_a_model_file_gives_the_shape(run: Run, model: Path) -> None:
    out = run("cost", "-m", str(model), "--context", "300,500", "--k", "4", "--explain").out
    assert out.count("model    2 layers, 2 query heads, 1 KV heads of 32") == 2
    assert "One token that sees 300" in out
    assert "One token that sees 500" in out
    assert out.count("Formulas: ") == 2
    assert out.count("Sparse costs less from this context on") == 1


def test_a_folder_gives_the_shape_and_layers_with_a_window_are_not_counted(
    run: Run, tmp_path: Path
) -> None:
    """Seven layers, of which one reads all tokens."""
    shape = "4 query heads, 1 KV heads of 32"
    lines = run("cost", "-m", str(write_folder(tmp_path / "g", "gemma3"))).out.splitlines()
    assert lines[0] == f"model    1 layers (6 more with a window are not counted), {shape}"
    folder = write_folder(tmp_path / "g", "gemma3", changes={"sliding_window": 512})
    ran = run("cost", "-m", str(folder), "--json")
    assert json.loads(ran.out)["shape"]["num_layers"] == 7  # no context outgrows that window
    ran = run("cost", "-m", str(write_folder(tmp_path / "m", "mistral")))
    assert (ran.code, ran.out) == (2, "")
    assert "m: expected a layer that reads all tokens, got 2 that read a window of 50" in ran.err


def test_a_repository_gives_the_shape(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def resolve(name: str, *, offline: bool) -> Path:
        asked.append((name, offline))
        return model

    monkeypatch.setattr(model_loader, "resolve_model", resolve)
    assert "2 layers, 2 query heads" in run("cost", "-hf", "user/repo:Q8_0", "--offline").out
    assert asked == [("hf:user/repo:Q8_0", True)]


def test_sizes_have_defaults_of_one(run: Run) -> None:
    def head(*sizes: str) -> str:
        return run("cost", "--head-dim", "64", *sizes).out.splitlines()[0]

    assert head() == "model    1 layers, 1 query heads, 1 KV heads of 64"
    assert head("--num-q-heads", "6", "--num-kv-heads", "2", "--layers", "3") == (
        "model    3 layers, 6 query heads, 2 KV heads of 64"
    )
    assert head("--num-q-heads", "6") == "model    1 layers, 6 query heads, 6 KV heads of 64"
    assert head("--num-kv-heads", "4") == "model    1 layers, 4 query heads, 4 KV heads of 64"


def test_settings_of_the_rule_arrive(run: Run) -> None:
    options = ["--k", "5", "--block-size", "64", "--selector", "even", "--share", "group",
               "--probe", "4", "--dense-tail", "0"]  # fmt: skip
    facts = json.loads(run("cost", *ONE_HEAD, *options, "--json").out)
    assert facts["rule"]["sparse"] == {
        "k": 5, "block_size": 64, "num_probes": 4, "selector": "even", "share": "group",
        "phase": "both", "dense_tail": 0, "mass": None, "k_min": 8, "k_max": 128,
        "exact_layers": [], "layer_k": [], "first_layer": 1, "profile": "", "warn_mass": 0.0,
        "seed": 0, "rule": None,
    }  # fmt: skip
    mixed = run("cost", "--head-dim", "64", "--cache-type", "q8_0/q4_0", "--json")
    assert json.loads(mixed.out)["shape"]["v_type"] == "q4_0"


def test_measured_times(run: Run) -> None:
    faster = ["--attention-ms", "2.0", "--select-ms", ".35", "--gather-ms", ".25",
              "--sparse-ms", ".5", "--other-ms", "6"]  # fmt: skip
    out = run("cost", *faster).out
    assert "1.82x, faster" in out
    assert "1.13x" in out
    slower = [
        "--attention-ms",
        "1.4",
        "--select-ms",
        ".7",
        "--gather-ms",
        ".6",
        "--sparse-ms",
        ".4",
    ]
    out = run("cost", *slower).out
    assert "slower" in out
    assert "selection first" in out


def test_whole_tokens(run: Run) -> None:
    out = run("cost", "--total-ms", "52.5,92.3,155.2", "--attention-ms", "9.7,48.9,110.7").out
    assert "42.8, 43.4, 44.5 ms" in out
    assert "constant, so only attention grows" in out


@pytest.mark.skipif(
    importlib.util.find_spec("kvsieve._native") is None, reason="needs the C++ core"
)
def test_measured_beside_predicted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "EVICT_BYTES", 1)
    monkeypatch.setattr("kvsieve.lab.prediction.CALIBRATION_TOKENS", (160, 320, 640))
    ran = run("cost", "--measure", "--head-dim", "32", "--k", "4", "--context", "200", "-r", "2",
              "-t", "1")  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].endswith(", 1 threads")
    row = next(line.split() for line in lines if line.startswith("  ") and "200 " in line)
    assert row[0] == "200"
    assert row[-1].endswith("%")
    assert lines[-1].startswith("Sparse takes less time from ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "x.gguf", "--head-dim", "64"], "--head-dim: expected no -m/--model beside it"),
        (["-hf", "u/r", "--head-dim", "64"], "--head-dim: expected no -hf/--hf-repo beside it"),
        (["--offline", "--head-dim", "64"], "--offline: expected -hf beside it"),
        (["--layers", "2"], "--layers: expected --head-dim beside it"),
        (["--head-dim", "64", "--cache-type", "q6"], "[ModelShape] k_type: expected one of"),
        (["--head-dim", "0"], "[ModelShape] head_dim: expected 1 or more"),
        (["--context", "0"], "--context: expected 1 token or more"),
        (["--context", "99999999"], "[ledger] context: expected 1 to 1,048,576"),
        (["--context", "1,x"], "--context: expected numbers separated by commas"),
        (["--selector", "best"], "--selector: expected one of probe, even, anchors, minmax,"),
        (["--selector", "none"], "--selector: expected none only with a --window"),
        (["--selector", "none", "--window", "5", "--k", "3"], "--selector: expected none only"),
        (["--index-dims", "8"], "--index-dims: expected --selector scan beside it"),
        (["--k", "0"], "[SparseAttention] k: expected an integer of at least 1"),
        (["--window", "0"], "[Rule] window_tokens: expected 1 or more"),
        (["--attention-ms", "2"], "--select-ms: expected a time, got none"),
        (["--select-ms", "2"], "--select-ms: expected --attention-ms beside it"),
        (["--total-ms", "2"], "--total-ms: expected --attention-ms beside it"),
        (["--total-ms", "2,3", "--attention-ms", "1"], "[Rest] totals_ms: expected as many"),
        (["--total-ms", "2", "--attention-ms", "1", "--other-ms", "1"], "--other-ms: expected no"),
        (["--attention-ms", "1,2", "--select-ms", "1", "--sparse-ms", "1"], "--attention-ms: exp"),
        (["--attention-ms", "0", "--select-ms", "1", "--sparse-ms", "1"], "[PartTimes] "),
        (["-r", "3"], "-r/--repetitions: expected --measure beside it"),
        (["--measure", "-t", "0"], "-t/--threads: expected at least 1"),
        (["--measure", "--json"], "--measure: expected no --explain or --json"),
        (["--measure", "--window", "8"], "--measure: expected a selector of the kernels"),
        (["--measure", "--cache-type", "bf16", "--head-dim", "64"], "[measure] cache type"),
    ],
)
def test_mistakes_are_one_line(run: Run, model: Path, arguments: list[str], message: str) -> None:
    if "--head-dim" not in arguments and "--layers" not in arguments:
        arguments = ["-m", str(model), *arguments]
    ran = run("cost", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsieve: error: {message}"), ran.err
    assert ran.err.count("\n") == 1
