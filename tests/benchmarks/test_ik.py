from pathlib import Path

import pytest

from peers.arms import ArmError, Prompt, Speed
from peers.ik import IkArm, parse_llama_bench

# In the form that llama-bench prints with -o json, figures made up.
OUTPUT = (Path(__file__).parent / "llama_bench.txt").read_text()


def test_prefill_and_decode_are_read():
    speed, build = parse_llama_bench(OUTPUT, depth=2048)
    assert speed == Speed(prompt_tokens=2048, prefill_s=1.6, decode_ms=20.0)
    assert build == "build 4321 (deadbeef)"


@pytest.mark.parametrize(
    "output",
    ["", "error: failed to load model", "[\n", "[\n]\n", OUTPUT.split('"tg32@')[0], "[\n {}\n]"],
)
def test_anything_else_is_one_line(output):
    with pytest.raises(ArmError, match="llama-bench printed"):
        parse_llama_bench(output, depth=2048)


def test_figures_of_another_depth_are_not_taken():
    with pytest.raises(ArmError, match="512 tokens"):
        parse_llama_bench(OUTPUT, depth=512)


def test_a_missing_binary_is_said(tmp_path):
    with pytest.raises(ArmError, match="is no file"):
        IkArm(tmp_path / "none", tmp_path / "model.gguf", cache_type="q8_0", threads=2)


def test_both_tests_are_one_run_of_the_binary(tmp_path):
    """A script stands in for llama-bench: it keeps its arguments and prints the frozen output."""
    frozen = Path(__file__).parent / "llama_bench.txt"
    kept, binary = tmp_path / "arguments", tmp_path / "llama-bench"
    binary.write_text(f'#!/bin/sh\necho "$@" >{kept}\ncat {frozen}\n')
    binary.chmod(0o755)
    arm = IkArm(binary, tmp_path / "model.gguf", cache_type="q8_0", threads=2)
    speed = arm.measure(Prompt(token_ids=[0] * 2048, text=None), 32)
    assert (speed.prefill_s, speed.decode_ms) == (1.6, 20.0)
    assert arm.version == "build 4321 (deadbeef)"
    given = kept.read_text()
    assert "-ctk q8_0 -ctv q8_0" in given
    assert "-p 2048 -n 0 -gp 2048,32" in given


def test_a_run_that_fails_says_what_the_binary_said(tmp_path):
    binary = tmp_path / "llama-bench"
    binary.write_text("#!/bin/sh\necho 'error: no such model' >&2\nexit 1\n")
    binary.chmod(0o755)
    arm = IkArm(binary, tmp_path / "model.gguf", cache_type="q8_0", threads=2)
    with pytest.raises(ArmError, match="code 1: error: no such model"):
        arm.measure(Prompt(token_ids=[0] * 8, text=None), 32)
