from pathlib import Path

import pytest

from peers.arms import ArmError, Speed
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
