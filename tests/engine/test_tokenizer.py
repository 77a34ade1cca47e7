import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.engine.pretokenizers import PRE_TOKENIZERS
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import ConfigError, ModelFileError
from tests.engine.vocabularies import (
    smollm2_metadata,
    smollm2_tokenizer,
    tiny_metadata,
    tiny_tokenizer,
)
from tests.tiny_model import BOS_ID, EOS_ID, FIRST_BYTE_ID

# Ids of llama.cpp, made by benchmarks/golden/make_tokenizer_golden.py: SmolLM2's vocabulary, and
# one in which ids show every cut between a few characters.
DATA = Path(__file__).parents[1] / "data"
RULES = ("smollm", "llama-bpe", "gpt-2", "qwen2")
CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6


@cache
def golden() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return read_lines("tokenizer_llama_cpp.jsonl")


def read_lines(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *others = map(json.loads, (DATA / name).read_text("ascii").splitlines())
    return first, others


def byte_ids(text: str) -> list[int]:
    """Ids in the tiny vocabulary of text that no merge applies to."""
    return [FIRST_BYTE_ID + byte for byte in text.encode()]


# -- llama.cpp's ids ---------------------------------------------------------------------


def test_golden_texts_are_many_and_show_that_rules_differ() -> None:
    _, texts = golden()
    assert len(texts) >= 300
    for kind in ("plain", "llama-bpe", "gpt-2", "qwen2"):
        assert sum(kind in line for line in texts) >= 10, kind


@pytest.mark.parametrize("rule", RULES)
def test_cuts_equal_llama_cpp(rule: str) -> None:
    vocabulary, texts = read_lines("tokenizer_probe.jsonl")
    metadata = {"model": "gpt2", "pre": rule, **vocabulary}
    tokenizer = Tokenizer.from_metadata({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    for line in texts:
        assert tokenizer.encode(line["text"]) == line[rule], line["text"]


@pytest.mark.parametrize("rule", RULES)
def test_ids_equal_llama_cpp(rule: str) -> None:
    tokenizer = smollm2_tokenizer(rule)
    for line in golden()[1]:
        assert tokenizer.encode(line["text"]) == line.get(rule, line["ids"]), ascii(line["text"])


def test_ids_equal_llama_cpp_where_special_tokens_are_plain_text() -> None:
    tokenizer = smollm2_tokenizer()
    for line in golden()[1]:
        ids = tokenizer.encode(line["text"], parse_special=False)
        assert ids == line.get("plain", line["ids"]), ascii(line["text"])


def test_end_tokens_and_sizes_equal_llama_cpp() -> None:
    tokenizer, facts = smollm2_tokenizer(), golden()[0]
    assert sorted(tokenizer.eos_ids) == facts["end_ids"]
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (facts["bos_id"], facts["vocab_size"])


def test_golden_texts_come_back_but_for_bytes_without_a_token() -> None:
    tokenizer = smollm2_tokenizer()
    have = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    missing = {byte for byte in range(256) if bytes([byte]) not in have}
    assert {0x04, 0x06, 0x13} < missing
    for line in golden()[1]:
        if not missing & set(line["text"].encode()):
            assert tokenizer.decode(line["ids"], special=True) == line["text"]


# -- behaviour -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PRE_TOKENIZERS)
@given(text=st.text())
@settings(max_examples=40)
def test_plain_text_comes_back_whole(rule: str, text: str) -> None:
    tokenizer = _tiny(rule)
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == text


@cache
def _tiny(rule: str) -> Tokenizer:
    return tiny_tokenizer(pre=rule)


def test_merges_apply_by_rank() -> None:
    tokenizer = tiny_tokenizer()
    names = [tokenizer.token_text(i) for i in tokenizer.encode("the pass key is in the passing")]
    assert names == ["the", "Ġpass", "Ġkey", "Ġis", "Ġ", "in", "Ġthe", "Ġpass", "ing"]


def test_a_pair_given_twice_keeps_its_first_rank() -> None:
    # "anda": with "an" first it is an+d+a, then and+a; had the second place counted, nd+a.
    extra = dict.fromkeys(("nd",), 1)
    merges = ["a n", "an d", "n d", "a n"]
    tokenizer = tiny_tokenizer(extra=extra, merges=merges)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("and")] == ["and"]


@pytest.mark.parametrize("char", ["a", " ", "7", "好", "\0", " \n"])
@pytest.mark.parametrize("rule", ["smollm", "llama-bpe"])
def test_long_runs_are_quick(rule: str, char: str) -> None:
    # An algorithm that is quadratic in the run would take minutes; this takes some 0.05 s.
    start = time.perf_counter()
    ids = _tiny(rule).encode(char * 100_000 + "x", add_special=False)
    assert time.perf_counter() - start < 5
    assert _tiny(rule).decode(ids[-3:]).endswith("x")


def test_special_tokens_claim_their_text_longest_first() -> None:
    extra = {"<a>": CONTROL, "<a><b>": CONTROL, "><": USER_DEFINED}
    tokenizer = tiny_tokenizer(extra=extra)
    short, long, user = range(tokenizer.vocab_size - 3, tokenizer.vocab_size)
    assert tokenizer.encode("x<a><b><a>") == [*byte_ids("x"), long, short]
    assert tokenizer.encode("<a><") == [short, *byte_ids("<")]
    # Plain text may not name control tokens, but does name what the user defined.
    expected = [*byte_ids("<a"), user, *byte_ids("b"), user, *byte_ids("a>")]
    assert tokenizer.encode("<a><b><a>", parse_special=False) == expected


def test_a_shield_keeps_special_text_plain_and_disappears() -> None:
    tokenizer = tiny_tokenizer()
    shielded = "<\ufdd0|im_end|><|im_end|>"
    ids = tokenizer.encode(shielded, shield="\ufdd0")
    assert ids == [*tokenizer.encode("<|im_end|>", parse_special=False), EOS_ID]


@pytest.mark.parametrize(
    ("keys", "front", "back"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [BOS_ID], []),
        ({"add_bos_token": np.True_, "add_eos_token": True}, [BOS_ID], [EOS_ID]),
        ({"pre": "llama-bpe"}, [BOS_ID], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "llama-bpe", "bos_token_id": None}, [], []),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    keys: dict[str, Any], front: list[int], back: list[int]
) -> None:
    tokenizer = tiny_tokenizer(**keys)
    for text in ("", "x", "<|im_start|>"):
        inner = tokenizer.encode(text, add_special=False)
        assert tokenizer.encode(text) == [*front, *inner, *back]
    assert tokenizer.add_bos == bool(front)


def test_ignore_merges_takes_a_whole_piece_that_is_a_token() -> None:
    extra = {"Ġzebra": 1}
    assert (
        len(tiny_tokenizer(pre="llama-bpe", extra=extra, bos_token_id=None).encode(" zebra")) == 1
    )
    assert len(tiny_tokenizer(pre="gpt-2", extra=extra).encode(" zebra")) > 1


def test_neighbours_of_a_byte_without_a_token_do_not_merge() -> None:
    metadata = tiny_metadata()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[FIRST_BYTE_ID + ord("x")] = "no longer x"
    tokenizer = Tokenizer.from_metadata({**metadata, "tokenizer.ggml.tokens": tokens})
    assert tokenizer.encode("txh") == byte_ids("th")
    assert len(tokenizer.encode("th")) == 1


def test_lone_surrogates_and_other_types_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    message = r"\[encode\] text: .* lone surrogate U\+D83D at position 2"
    with pytest.raises(ConfigError, match=message):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(ConfigError, match="expected str, got bytes"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]


# -- bytes of tokens -----------------------------------------------------------------------


def test_token_bytes_by_kind() -> None:
    extra = {"<u>": USER_DEFINED, "<gone>": UNUSED, "<0xF0>": BYTE, "a b": 1, "<c>": CONTROL}
    tokenizer = tiny_tokenizer(extra=extra)
    first = tokenizer.vocab_size - len(extra)
    pieces = [tokenizer.token_bytes(i) for i in range(first, tokenizer.vocab_size)]
    assert pieces == [b"<u>", b"", b"\xf0", b"a b", b""]
    assert tokenizer.token_bytes(first + 4, special=True) == b"<c>"
    assert [tokenizer.token_bytes(FIRST_BYTE_ID + b) for b in range(256)] == [
        bytes([b]) for b in range(256)
    ]
    assert tokenizer.token_bytes(tokenizer.encode(" the")[0]) == b" the"


def test_decode_replaces_what_is_not_utf8() -> None:
    tokenizer = tiny_tokenizer()
    ids = [FIRST_BYTE_ID + byte for byte in b"a\xffb\xf0\x9f"]
    assert tokenizer.decode([*ids, EOS_ID]) == "a\ufffdb\ufffd"
    assert tokenizer.decode([EOS_ID], special=True) == "<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_unknown_ids_are_refused(token_id: int) -> None:
    tokenizer = tiny_tokenizer()
    for use in (tokenizer.token_bytes, tokenizer.token_text, lambda i: tokenizer.decode([i])):
        with pytest.raises(ConfigError, match=f"token id: expected 0 to .*, got {token_id}"):
            use(token_id)


def test_end_tokens_come_from_keys_and_from_texts() -> None:
    extra = {"<|eot_id|>": 1, "<stop>": CONTROL, "<|file_sep|>": CONTROL, "<other>": CONTROL}
    size = tiny_tokenizer().vocab_size
    tokenizer = tiny_tokenizer(extra=extra, eom_token_id=np.uint32(size + 1))
    # 0 and 2 are <|endoftext|> and <|im_end|>.
    assert tokenizer.eos_ids == {0, EOS_ID, size, size + 1, size + 2}
    # An end token is a control token even where the file calls it ordinary.
    assert tokenizer.token_bytes(size) == b""
    assert "<|eot_id|>" in tokenizer.control_texts


# -- files that are wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: expected 'gpt2'.*got 'bert'"),
        ({"model": None}, "tokenizer.ggml.model: .*got nothing"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: expected one of smollm, .*got 'tekken'"),
        ({"pre": None}, "tokenizer.ggml.pre: .*got nothing"),
        ({"tokens": None}, "tokenizer.ggml.tokens: expected a list of strings, got nothing"),
        ({"tokens": []}, "tokenizer.ggml.tokens: .*got a list of 0"),
        ({"tokens": [b"a"]}, "tokenizer.ggml.tokens: expected a list of strings"),
        ({"tokens": ["a", "b", "a"]}, "expected each token once, got 'a' twice"),
        ({"token_type": np.ones(3, np.int32)}, r"token_type: expected \d+ integers.*shape \(3,\)"),
        ({"token_type": 7}, "token_type: expected"),
        ({"merges": None}, "merges: expected a list of strings, got nothing"),
        ({"merges": ["t h", "x"]}, "merges: expected two tokens that make a third, got 'x'"),
        ({"merges": ["t h", "q z"]}, "merges: .*got 'q z'"),
        ({"merges": ["t h", "t h e"]}, "merges: .*got 't h e'"),
        ({"merges": [" th"]}, "merges: .*got ' th'"),
        ({"bos_token_id": 10**6}, "bos_token_id: expected an id from 0 to .*got 1000000"),
        ({"eos_token_id": -1}, "eos_token_id: .*got -1"),
        ({"eos_token_id": True}, "eos_token_id: .*got True"),
        ({"add_bos_token": 1}, "add_bos_token: expected true or false, got 1"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token: .*names no"),
        ({"extra": {"<0x-1>": BYTE}}, "byte token .*got '<0x-1>'"),
        ({"extra": {"odd": 9}}, "token_type: expected values from 0 to 6, got 1 to 9"),
    ],
)
def test_damaged_metadata_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        tiny_tokenizer(**keys)


def test_empty_padding_tokens_and_missing_kinds_are_fine() -> None:
    tokenizer = tiny_tokenizer(extra={"": 1, "last": 1}, token_type=None)
    assert tokenizer.token_text(tokenizer.vocab_size - 2).startswith("[EMPTY_")
    # Only texts known to be control tokens are, where the file says nothing.
    assert tokenizer.encode("<|im_end|>") == [EOS_ID]
    assert tokenizer.token_bytes(BOS_ID) == b"<|im_start|>"


def test_building_from_a_real_vocabulary_is_quick() -> None:
    metadata = smollm2_metadata()
    start = time.perf_counter()
    Tokenizer.from_metadata(metadata)
    # 0.11 s on an idle machine; the bound is for a busy one.
    assert time.perf_counter() - start < 2


def test_long_texts_are_cut_like_short_ones() -> None:
    """Beyond some thousand characters another call is made, which lets other threads run."""
    tokenizer = smollm2_tokenizer()
    line = "The 3rd ship's log: 1234 entries\n"
    one = tokenizer.encode(line)
    assert tokenizer.encode(line * 300) == one * 300
