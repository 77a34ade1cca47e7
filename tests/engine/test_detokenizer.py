"""Case STR-03: UTF-8 split across tokens; generation cut inside a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.engine.detokenizer import Detokenizer
from kvsieve.engine.stop import StopMatcher
from tests.engine.vocabularies import smollm2_tokenizer, tiny_tokenizer
from tests.tiny_model import EOS_ID, FIRST_BYTE_ID

GRIN = "\U0001f600".encode()
GOOD = "\u597d".encode()
# Tokens of raw bytes, in the vocabulary's printable spelling: f0 9f, 98 80, ..., " f0 9f".
BYTE_CHARS = {b: tiny_tokenizer().token_text(FIRST_BYTE_ID + b) for b in range(256)}
PIECES = (b"\xf0\x9f", b"\x98\x80", b"\xf0\x9f\x98", b" \xf0\x9f", b"\xa5\xbd", b"\x98\x80!")
TOKENIZER = tiny_tokenizer(extra={"".join(BYTE_CHARS[b] for b in piece): 1 for piece in PIECES})
FIRST_PIECE = TOKENIZER.vocab_size - len(PIECES)


def token(piece: bytes) -> int:
    return FIRST_BYTE_ID + piece[0] if len(piece) == 1 else FIRST_PIECE + PIECES.index(piece)


def deltas(pieces: list[bytes]) -> list[str]:
    """What each token gives, and what is left at the end."""
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.push(token(piece)) for piece in pieces), detokenizer.flush()]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "😀", ""]),
        ([b"\xf0\x9f\x98", b"\x80"], ["", "😀", ""]),
        ([b" \xf0\x9f", b"\x98\x80!"], [" ", "😀!", ""]),
        ([b"\xe5", b"\xa5\xbd"], ["", "好", ""]),
        ([b"\xff", b"a"], ["\ufffd", "a", ""]),
        ([b"\xf0\x9f", b"a"], ["", "\ufffda", ""]),
        ([b"a", b"\xf0\x9f"], ["a", "", "\ufffd"]),
        ([b"\x80", b"\x80"], ["\ufffd", "\ufffd", ""]),
        ([], [""]),
    ],
)
def test_characters_come_whole_and_bad_bytes_once(pieces: list[bytes], expected: list[str]) -> None:
    assert deltas(pieces) == expected
    assert TOKENIZER.decode(map(token, pieces)) == "".join(expected)
    assert b"".join(TOKENIZER.token_bytes(token(piece)) for piece in pieces) == b"".join(pieces)


@given(data=st.binary(max_size=12) | st.text(max_size=5).map(str.encode))
def test_joined_deltas_equal_decoding_at_once(data: bytes) -> None:
    assert "".join(deltas([bytes([byte]) for byte in data])) == data.decode(errors="replace")


def test_control_tokens_add_nothing_and_break_nothing() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = [token(b"\xf0\x9f"), EOS_ID, token(b"\x98\x80")]
    assert [detokenizer.push(i) for i in ids] == ["", "", "😀"]


def test_a_stop_string_may_hold_a_character_split_over_tokens() -> None:
    detokenizer, matcher = Detokenizer(TOKENIZER), StopMatcher(["😀!"])
    out = [matcher.push(detokenizer.push(token(p))) for p in (b"a", b" \xf0\x9f", b"\x98\x80!")]
    assert out == [("a", False), (" ", False), ("", True)]


def test_real_tokens_of_emoji_and_chinese() -> None:
    tokenizer = smollm2_tokenizer()
    text = "a😀 好👨‍👩‍👧 世界!"
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push(i) for i in tokenizer.encode(text)]
    assert "" in parts
    assert "".join(parts) + detokenizer.flush() == text
