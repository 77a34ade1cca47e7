import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsieve import __version__
from kvsieve.cli import app
from kvsieve.cli.progress import StatusBar
from tests.cli.conftest import Ran, Run
from tests.tiny_model import write_tiny_gguf

PROGRAM = [sys.executable, "-c", "import sys; from kvsieve.cli.app import main; sys.exit(main())"]


def assert_one_line_of_error(ran: Ran, *named: str) -> None:
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("kvsieve: error: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    for text in named:
        assert text in ran.err


def test_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"kvsieve {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["eval"], ["eval", "passkey", "-h"]])
def test_help_is_shown_and_is_no_error(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == 0
    assert "Usage: kvsieve" in ran.out
    assert ran.err == ""


@pytest.mark.parametrize(
    "command", [["generate"], ["bench"], ["eval", "passkey"], ["info"], ["demo"]]
)
def test_help_teaches_with_examples(run: Run, command: list[str]) -> None:
    ran = run(*command, "--help")
    assert f"  kvsieve {' '.join(command)}" in ran.out.partition("Examples:")[2]
    assert "--model" in ran.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["frobnicate"], ["frobnicate"]),
        (["generate", "-p", "x", "--sparse-kk", "3"], ["--sparse-kk"]),
        (["generate", "-p", "x", "extra"], ["extra"]),
        (["generate", "-p"], ["-p"]),
        (["generate", "-p", "x", "-n", "many"], ["--predict", "expected an integer", "'many'"]),
        (["generate", "-p", "x", "-n", "-2"], ["--predict", "-2"]),
        (["generate", "-p", "x", "--temp", "warm"], ["--temp", "expected a number", "'warm'"]),
        (["generate", "-p", "x", "--temp", "nan"], ["temperature", "nan"]),
        (["generate", "-p", "x", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["generate", "-p", "x", "-s", "-2"], ["--seed", "-2"]),
        (["generate", "-p", "x", "--stop", ""], ["stop"]),
        (["generate", "-p", "x", "-t", "0"], ["--threads", "got 0"]),
        (["generate", "-p", "x", "-c", "-1"], ["--ctx-size", "-1"]),
        (["generate", "-p", "x", "-ctk", "q5_1"], ["-ctk", "q8_0", "'q5_1'"]),
        (["generate", "-p", "x", "-ctv", "f16", "--kv-q4"], ["--kv-q4", "-ctv", "f16"]),
        (["generate", "-p", "x", "--backend", "gpu"], ["--backend", "'gpu'"]),
        (["generate", "-p", "x", "--sparse-k", "3"], ["--sparse-k", "--sparse-attn"]),
        (["generate", "-p", "x", "--sparse-attn", "--sparse-k", "0"], ["k:", "got 0"]),
        (["generate", "-p", "x", "--sparse-attn", "--sparse-block", "33"], ["block_size", "33"]),
        (["generate", "-p", "x", "--sparse-attn", "--sparse-selector", "best"], ["'best'"]),
        (["generate"], ["-p", "-f", "got none"]),
        (["generate", "-p", "x", "-f", "y"], ["got both"]),
        (["generate", "-f", "no/such/file"], ["no/such/file"]),
        (["generate", "-p", "x", "-m", "no/such.gguf"], ["no/such.gguf"]),
        (["bench", "-d", "512,x"], ["--depths", "'x'"]),
        (["bench", "-d", "0"], ["--depths", "0"]),
        (["bench", "-n", "0"], ["--predict", "0"]),
        (["bench", "-o", "xml"], ["--output", "'xml'"]),
        (["bench", "--attn", "dense"], ["--attn", "'dense'"]),
        (["bench", "--attn", "exact", "--sparse-attn"], ["--attn", "--sparse-attn"]),
        (["eval", "passkey", "--lengths", "-5"], ["--lengths", "-5"]),
        (["eval", "passkey", "--depths", "1.5"], ["--depths", "1.5"]),
        (["eval", "no-such-test"], ["no-such-test"]),
    ],
)
def test_bad_use_is_one_line_and_code_2(run: Run, arguments: list[str], named: list[str]) -> None:
    assert_one_line_of_error(run(*arguments), *named)


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"<html>not a model</html>", b"GGUF" + b"\xff" * 60]
)
def test_a_bad_model_file_is_one_line(run: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert_one_line_of_error(
        run("generate", "-p", "x", "-m", str(path), "--backend", "reference"), "expected"
    )


def test_a_truncated_model_is_one_line(run: Run, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(model.read_bytes()[:-5000])
    assert_one_line_of_error(
        run("generate", "-p", "x", "-m", str(path), "--backend", "reference"), "expected"
    )


def test_nan_weights_are_one_line(run: Run, tmp_path: Path) -> None:
    import numpy as np

    name = "blk.1.ffn_norm.weight"
    path = write_tiny_gguf(tmp_path / "nan.gguf", tensors={name: np.full(64, np.nan, np.float32)})
    ran = run("generate", "-p", "x", "-m", str(path), "--backend", "reference")
    assert_one_line_of_error(ran, name)


def test_a_prompt_beyond_the_context_names_both_numbers(on_tiny: Run) -> None:
    assert_one_line_of_error(on_tiny("generate", "-p", "x" * 700), "544", "700")


def test_an_error_of_ours_is_one_line_too_and_another_code(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(app, "app", broken)
    ran = run("info")
    assert ran.code == 70
    assert ran.err.count("\n") == 1
    assert "RuntimeError: two lines" in ran.err


def test_debug_shows_where_an_error_came_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIEVE_DEBUG", "1")
    assert "Traceback" in run("generate", "-p", "x", "-n", "-5").err


def test_nobody_reading_is_no_traceback(model: Path) -> None:
    command = [*PROGRAM, "generate", "-p", "x", "-n", "200", "--ignore-eos"]
    command += ["-m", str(model), "--backend", "reference"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 1


@pytest.fixture
def ctrl_c_counts() -> Iterator[None]:
    """A shell that runs tests in the background has told its children to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_while_decoding_keeps_what_was_printed_and_exits_130(model: Path) -> None:
    command = [*PROGRAM, "generate", "-p", "x", "-n", "-1", "--ignore-eos"]
    command += ["-m", str(model), "--backend", "reference"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert err == b""
    assert (first + out).endswith(b"\n")


@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_while_the_prompt_is_read_exits_130(
    on_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def press(_bar: StatusBar, done: int, total: int) -> None:
        if total != 540:  # the model's tensors are loaded
            return
        read.append(done)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(StatusBar, "advance", press)
    ran = on_tiny("generate", "-p", "x" * 540)
    assert (ran.code, ran.out) == (130, "")
    # Pressed after the first chunk of the prompt: the second one was not read.
    assert read == [512]
