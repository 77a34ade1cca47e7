"""The commands that print rows and facts: bench, eval passkey, info, demo."""

import csv
import io
import json
from pathlib import Path

import pytest

from kvsieve.attention.config import SparseAttention
from tests.cli.conftest import Run
from tests.tiny_model import write_tiny_gguf

ANSWER_COLUMNS = [
    "task", "attn", "setting", "length", "prompt_tokens", "depth", "seed", "expected", "answer",
    "hit", "score", "logprob", "top1", "mode", "density", "blocks_read",
]  # fmt: skip
BENCH_COLUMNS = [
    "test", "attn", "cache_type", "threads", "ms", "ms_stddev", "tokens_per_second",
    "attention_ms", "select_ms", "dense_ms", "density",
]  # fmt: skip
SELECTOR = f"selector={SparseAttention().selector}"
ARMS = ["--attn", "exact", "--attn", "sparse:k=4,tail=0"]


@pytest.mark.parametrize("task", ["passkey", "kv", "vartrack", "copy"])
def test_questions_json(on_tiny: Run, task: str) -> None:
    ran = on_tiny("eval", task, "--lengths", "440", "--depths", "0.5", *ARMS, "-o", "json")
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)
    assert [list(row) for row in rows] == [ANSWER_COLUMNS] * 3
    assert [(row["setting"], row["mode"]) for row in rows] == [
        ("any", "exact"), ("B", "sparse"), ("C", "sparse"),
    ]  # fmt: skip
    assert "kvsieve: sparse:k=4,tail=0 (B): 0 of 1 found" in ran.err


def test_passkey_without_settings_compares_exact_and_the_sparse_options(on_tiny: Run) -> None:
    common = ["eval", "passkey", "--lengths", "300", "--depths", "0.5", "-o", "csv"]
    for options, labels in (
        (["--skip-exact"], ["exact"]),
        (
            ["--sparse-attn", "--sparse-k", "5"],
            ["exact", f"sparse:k=5,{SELECTOR}", f"sparse:k=5,{SELECTOR}"],
        ),
    ):
        rows = list(csv.DictReader(io.StringIO(on_tiny(*common, *options).out)))
        assert [row["attn"] for row in rows] == labels
    ran = on_tiny(*common)
    assert (ran.code, ran.out) == (2, "")
    assert "all 10 blocks fit the budget of 32" in ran.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--settings", "B,D"], "--settings: expected different ones of A, B, C, got 'D'"),
        (["--settings", "B,B"], "got 'B,B'"),
        (["--lengths", "0"], "--lengths"),
        (["--depths", "2"], "--depths"),
        (["--samples", "0"], "--samples"),
        (["-o", "xml"], "-o/--output"),
        (["--sparse-attn", "--sparse-phase", "decode"], "no phase beside a setting"),
    ],
)
def test_bad_options_of_an_evaluation_are_named(
    on_tiny: Run, options: list[str], named: str
) -> None:
    ran = on_tiny("eval", "passkey", *options)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err


def test_bench_json_and_csv_have_the_agreed_columns(on_tiny: Run) -> None:
    common = ["bench", "-d", "200", "-n", "2", "-r", "1", *ARMS, "-ctv", "f16"]
    rows = json.loads(on_tiny(*common, "-o", "json").out)
    assert [list(row) for row in rows] == [BENCH_COLUMNS] * 4
    assert [row["test"] for row in rows] == ["pp200", "tg2 @ d200"] * 2
    assert {row["cache_type"] for row in rows} == {"q8_0/f16"}
    table = list(csv.reader(io.StringIO(on_tiny(*common, "-o", "csv").out)))
    assert table[0] == BENCH_COLUMNS
    assert len(table) == 5


def test_bench_markdown_ends_with_the_two_tables(on_tiny: Run) -> None:
    ran = on_tiny("bench", "-d", "200", "-n", "2", "-r", "1", *ARMS)
    assert ran.out.count("| --- |") >= 3
    assert "| n | sparse | exact total | sparse total |" in ran.out
    assert "| n | sparse | exact attention ms/token |" in ran.out


def test_rows_that_need_more_than_the_context_stop_before_the_first_run(on_tiny: Run) -> None:
    for command in (["bench", "-d", "40,600"], ["eval", "passkey", "--lengths", "100,600"]):
        ran = on_tiny(*command, "-o", "json")
        assert ran.code == 2
        assert "context of 544" in ran.err
        assert json.loads(ran.out or "[]") == []


def test_info_counts_bytes_per_token(on_tiny: Run) -> None:
    facts = json.loads(on_tiny("info", "--json", "-ctk", "f16", "-ctv", "q4_0").out)
    assert facts["model"]["layers"] == 2
    assert facts["model"]["tensors"] == {"F32": 20}
    # 2 layers x 1 head x 32 values: f16 keys, values of 4 bits with an f32 scale. Never q8_0
    # keys, so no index; importance is one 64-bit number per layer.
    assert facts["cache"]["bytes_per_token"] == 2 * (2 * 32 + 32 // 2 + 4)
    assert facts["cache"]["even_index_bytes_per_token"] == 0
    # Of each block 2 keys and a mean with their scales, and 4 spreads, whatever the keys' type.
    assert facts["cache"]["anchors_index_bytes_per_token"] == 2 * (3 * (32 + 4) + 16) // 32
    vectors = {"minmax": 2, "mean": 1, "meanstd": 2}
    for name, count in vectors.items():
        assert facts["cache"][f"{name}_index_bytes_per_token"] == 2 * count * (32 + 4) // 32
    assert facts["cache"]["importance_bytes_per_token"] == 16
    q8 = json.loads(on_tiny("info", "--json").out)["cache"]
    assert q8["bytes_per_token"] == 2 * 2 * (32 + 4)
    # 8 of 32 keys, with their scales.
    assert q8["even_index_bytes_per_token"] == 2 * (32 + 4) * 8 // 32


def test_info_says_what_would_run_and_why(on_tiny: Run, model: Path) -> None:
    ran = on_tiny("info")
    assert ran.code == 0
    assert str(model) in ran.out
    assert "NumPy, whatever the machine has" in ran.out
    assert on_tiny("info", "-c", "9999").code == 2
    assert json.loads(on_tiny("info", "--json").out)["model"]["tokenizer"] == "gpt2 smollm"


def test_a_model_without_a_vocabulary_is_timed_and_shown_but_takes_no_text(
    run: Run, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen3", no_vocab=True)
    model = ["-m", str(path), "--backend", "reference"]
    ran = run("bench", "-d", "40", "-n", "2", "-r", "1", "-o", "json", "--attn", "exact", *model)
    assert [row["test"] for row in json.loads(ran.out)] == ["pp40", "tg2 @ d40"]
    lines = run("info", *model).out.splitlines()
    assert "  architecture           qwen3" in lines
    assert "  tokenizer              none (no_vocab): prompts are token ids" in lines
    for command in (
        ["generate", "-p", "hello"],
        ["generate", "-p", "hello", "--stop", "x"],
        ["eval", "passkey", "--lengths", "100"],
        ["demo", "--length", "300"],
    ):
        ran = run(*command, *model)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("kvsieve: error: [LLM] ")
        assert ran.err.endswith("tiny has no vocabulary, got text\n") or "--stop" in command
        assert ran.err.count("\n") == 1


@pytest.mark.parametrize("length", ["300"])
def test_demo_shows_five_rows_and_says_what_it_reads(on_tiny: Run, length: str) -> None:
    ran = on_tiny("demo", "--length", length)
    assert ran.code == 0, ran.err
    rows = [line.split() for line in ran.out.splitlines() if line.startswith(("exact", "sparse"))]
    assert [row[0] for row in rows] == [
        "exact", "sparse:k=32", "sparse:k=16", "sparse:k=8", "sparse:k=1",
    ]  # fmt: skip
    assert len(ran.err.splitlines()) == 5
    assert "sparse:k=16: reading" in ran.err
    stayed = [line.split()[2] for line in ran.out.splitlines() if line.startswith("Stayed exact:")]
    assert stayed == ["sparse:k=32", "sparse:k=16"]
    assert max(map(len, ran.out.splitlines())) <= 90
