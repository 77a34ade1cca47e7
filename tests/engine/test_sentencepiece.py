"""Vocabularies that merge by score, and 2,000 hard lines, against llama.cpp's ids.

Frozen by benchmarks/golden/make_stress_golden.py, as a checksum per line.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import ModelFileError
from kvsieve.models.gguf import GgufFile
from tests.engine.stress import LINES, checksum, score_vocabulary, stress_lines
from tests.engine.vocabularies import smollm2_tokenizer
from tests.gemma3 import gemma3_path

DATA = Path(__file__).parents[1] / "data"


def metadata(**changes: Any) -> Mapping[str, Any]:
    vocabulary = score_vocabulary()
    keys = {
        "model": "llama",
        "tokens": vocabulary["tokens"],
        "scores": np.asarray(vocabulary["scores"], np.float32),
        "token_type": np.asarray(vocabulary["token_type"], np.int32),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


@cache
def scored() -> Tokenizer:
    return Tokenizer.from_metadata(metadata())


def check_lines(tokenizer: Tokenizer, name: str) -> None:
    golden = json.loads((DATA / f"tokenizer_stress_{name}.json").read_text())
    lines = stress_lines()
    assert len(lines) == LINES == len(golden["special"]) // 8
    for kind, special in (("special", True), ("plain", False)):
        ids = [tokenizer.encode(line, parse_special=special) for line in lines]
        assert ids[:20] == golden[f"first_{kind}"]
        wrong = [
            line
            for place, (line, found) in enumerate(zip(lines, ids, strict=True))
            if checksum(found) != golden[kind][8 * place : 8 * place + 8]
        ]
        assert not wrong, f"{kind}: {len(wrong)} lines differ, the first: {wrong[0]!r}"


def test_2000_lines_of_a_scored_vocabulary_equal_llama_cpp() -> None:
    check_lines(scored(), "scored")


def test_2000_lines_of_smollm2_equal_llama_cpp() -> None:
    check_lines(smollm2_tokenizer(), "smollm2")


@pytest.mark.slow
def test_2000_lines_of_gemma_3_equal_llama_cpp(tmp_path: Path) -> None:
    with GgufFile.open(gemma3_path(tmp_path)) as file:
        check_lines(Tokenizer.from_metadata(file.metadata), "gemma3")


# -- merging by hand -----------------------------------------------------------------------------


def tiny(pieces: Mapping[str, float], **changes: Any) -> Tokenizer:
    """Specials 0 to 2, bytes 3 to 258, then the pieces in order."""
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    settings = {
        "tokens": [*head, *pieces],
        "scores": np.asarray([0.0] * len(head) + list(pieces.values()), np.float32),
        "token_type": np.asarray([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    return Tokenizer.from_metadata(metadata(**(settings | changes)))


ABC = {"a": -9, "b": -9, "c": -9, "ab": -2, "bc": -1, "abc": -3}


def test_the_best_pair_is_merged_first_and_the_leftmost_among_equals() -> None:
    pieces = tiny(ABC)
    # bc before ab although ab comes first; then a with bc.
    assert [pieces.token_text(i) for i in pieces.encode("abcab")] == ["abc", "ab"]
    without = tiny({**ABC, "abc": -3, "aa": -1})
    assert [without.token_text(i) for i in without.encode("aaa")] == ["aa", "a"]


def test_what_has_no_token_is_spelled_in_bytes() -> None:
    assert tiny(ABC).encode("aéb") == [259, 3 + 0xC3, 3 + 0xA9, 260]
    assert tiny(ABC).decode([259, 3 + 0xC3, 3 + 0xA9, 260]) == "aéb"


def test_pieces_never_merge_into_a_control_token() -> None:
    pieces = tiny({"<": -1, "/": -1, "s": -1, ">": -1, "</": -1, "s>": -1})
    assert pieces.encode("</s>", parse_special=False) == [263, 264]
    assert pieces.encode("</s>") == [2]


def test_spaces() -> None:
    pieces = {**ABC, "\u2581": -5, "\u2581a": -1}
    plain = tiny(pieces)
    assert [plain.token_text(i) for i in plain.encode("a a")] == ["a", "\u2581a"]
    prefixed = tiny(pieces, add_space_prefix=True)
    ids = prefixed.encode("a</s>a")
    assert [prefixed.token_text(i) for i in ids] == ["\u2581a", "</s>", "\u2581a"]
    assert prefixed.decode(ids) == " a a"


@pytest.mark.parametrize("joint", ["a\u2581b", "\u2581\u2581a"])
def test_a_token_that_goes_on_behind_a_space_is_found(joint: str) -> None:
    pieces = {"a": -9, "b": -9, "c": -9, "\u2581": -5, "\u2581b": -6, "\u2581a": -6, joint: -7}
    pieces |= {"\u2581\u2581": -8} if joint.startswith("\u2581\u2581") else {"a\u2581": -4}
    tokenizer = tiny(pieces)
    text = f"c{joint}c".replace("\u2581", " ")
    assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == ["c", joint, "c"]


def test_defaults_where_the_file_says_nothing() -> None:
    tokenizer = scored()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.encode("") == [1]
    other = Tokenizer.from_metadata(metadata(bos_token_id=0, add_bos_token=False))
    assert (other.bos_id, other.encode("")) == (0, [])


def test_pieces_and_whole_texts_decode_alike() -> None:
    for line in stress_lines(200):
        if "[INST]" in line:  # a special token, behind which a space is put
            continue
        ids = scored().encode(line, add_special=False, parse_special=False)
        spelled = f" {line}".replace("\u2581", " ")
        assert scored().decode(ids) == spelled


@pytest.mark.parametrize(
    "scores", [None, np.zeros(3, np.float32), np.zeros(4000, np.int32), [1.0], "x"]
)
def test_scores_must_be_there(scores: Any) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores: expected \d+ numbers"):
        Tokenizer.from_metadata(metadata(scores=scores))


def test_nan_is_no_score() -> None:
    scores = np.asarray(score_vocabulary()["scores"], np.float32)
    scores[5] = np.nan
    with pytest.raises(ModelFileError, match="scores"):
        Tokenizer.from_metadata(metadata(scores=scores))
