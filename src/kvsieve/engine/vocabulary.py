"""What a GGUF says about its tokens: texts, kinds, end tokens; checked before anything is built."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from kvsieve.errors import ConfigError, ModelFileError
from kvsieve.types import AnyArray

_PREFIX = "tokenizer.ggml."

_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<|return|>", "<|call|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "<｜end▁of▁sentence｜>"),
    }
)
"""Texts that end a generation in whatever file they stand, as llama.cpp has it."""

_FILE_END_TEXTS = frozenset(
    {
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    }
)
"""Where code models go on to another file: llama.cpp ends there too."""

_INFILL_TEXTS = frozenset(
    {
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>"),
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>"),
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>"),
    }
)

_CONTROL_TEXTS = _END_TEXTS | _FILE_END_TEXTS | _INFILL_TEXTS
"""Texts that are control tokens even where the file calls them ordinary."""

SPACE = "\u2581"
"""How a vocabulary that merges by score writes a space."""

_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenKind(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_alphabet() -> Mapping[int, str]:
    """GPT-2's printable stand-in for each byte: itself where visible, else U+0100 onwards."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    shifted = {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
    return MappingProxyType({byte: shifted.get(byte, chr(byte)) for byte in range(256)})


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE: Mapping[str, int] = MappingProxyType({c: b for b, c in BYTE_TO_CHAR.items()})


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id, and what their kinds mean for text.

    ``kinds`` holds one `TokenKind` value per token; ``eos_ids`` every token that ends a
    generation. ``byte_alphabet``: texts are bytes in GPT-2's printable spelling; else they are
    text, with U+2581 for a space.
    """

    tokens: Sequence[str]
    kinds: bytes
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    unknown_id: int | None = None
    byte_alphabet: bool = True

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        *,
        byte_alphabet: bool = True,
        defaults: Mapping[str, int] = MappingProxyType({}),
    ) -> "Vocabulary":
        """Read and check the keys ``tokenizer.ggml.*``; ModelFileError names the one at fault.

        `defaults`: ids of special tokens, by name, where the file gives none.
        """
        tokens = _named_tokens(string_list(metadata, "tokens"))
        ids = {text: place for place, text in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(text for place, text in enumerate(tokens) if ids[text] != place)
            raise ModelFileError(
                f"[Tokenizer] {_PREFIX}tokens: expected each token once, got {twice!r} twice"
            )
        kinds = _kinds(metadata, tokens, ids)
        names = ("bos", "unknown", *_END_KEYS)
        special = {name: _special_id(metadata, name, len(tokens)) for name in names}
        for name, default in defaults.items():
            if special[name] is None and default < len(tokens):
                special[name] = default
        ends = {special[name] for name in _END_KEYS} | end_ids(ids)
        return cls(
            tokens=tokens,
            kinds=kinds,
            ids=ids,
            bos_id=special["bos"],
            eos_id=special["eos"],
            eos_ids=frozenset(end for end in ends if end is not None),
            unknown_id=special["unknown"],
            byte_alphabet=byte_alphabet,
        )

    def check_id(self, token_id: int) -> int:
        """Return `token_id` if it names a token, else raise ConfigError."""
        if not 0 <= token_id < len(self.tokens):
            raise ConfigError(
                f"[Tokenizer] token id: expected 0 to {len(self.tokens) - 1}, got {token_id}"
            )
        return token_id

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """Bytes a token adds to the text; control and unknown tokens add none unless `special`."""
        kind = self.kinds[self.check_id(token_id)]
        text = self.tokens[token_id]
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN):
            return text.encode() if special else b""
        if kind == TokenKind.USER_DEFINED:
            return text.encode()
        if kind == TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != TokenKind.NORMAL:
            return b""
        if not self.byte_alphabet:
            return text.replace(SPACE, " ").encode()
        try:
            return bytes([CHAR_TO_BYTE[char] for char in text])
        except KeyError:
            # Not written in the byte alphabet: the text stands for itself.
            return text.encode()

    @cached_property
    def control_texts(self) -> tuple[tuple[str, int], ...]:
        """(text, id) of tokens that only trusted text may name, longest first."""
        return self._texts_of(TokenKind.CONTROL, TokenKind.UNKNOWN)

    @cached_property
    def user_defined_texts(self) -> tuple[tuple[str, int], ...]:
        """(text, id) of tokens that any text may name, longest first."""
        return self._texts_of(TokenKind.USER_DEFINED)

    @cached_property
    def matched_texts(self) -> tuple[tuple[str, int], ...]:
        """Both of them, longest (in bytes) first: the order in which they claim their place."""
        return self._texts_of(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)

    def _texts_of(self, *kinds: TokenKind) -> tuple[tuple[str, int], ...]:
        found = [(self.tokens[i], i) for i, kind in enumerate(self.kinds) if kind in kinds]
        return tuple(sorted(found, key=lambda entry: -len(entry[0].encode())))


def end_ids(ids: Mapping[str, int]) -> set[int]:
    """Tokens that end a generation in whatever file they stand."""
    return {ids[text] for text in _END_TEXTS | _FILE_END_TEXTS if text in ids}


def has_vocabulary(metadata: Mapping[str, Any]) -> bool:
    """Whether a GGUF brings its tokens' texts; ``no_vocab`` is how one says that it does not."""
    return bool(metadata.get(_PREFIX + "model") != "no_vocab")


def string_list(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return the non-empty list of strings ``tokenizer.ggml.<name>``, else ModelFileError."""
    value = metadata.get(_PREFIX + name)
    if isinstance(value, list | tuple) and value and all(map(str.__instancecheck__, value)):
        return value
    raise ModelFileError(
        f"[Tokenizer] {_PREFIX}{name}: expected a list of strings, got {_describe(value)}"
    )


def flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return the true or false ``tokenizer.ggml.<name>``, or `default` where it is absent."""
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool | np.bool_):
        raise ModelFileError(
            f"[Tokenizer] {_PREFIX}{name}: expected true or false, got {_describe(value)}"
        )
    return bool(value)


def _special_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    """Return the id ``tokenizer.ggml.<name>_token_id``, or None where it is absent."""
    key = f"{_PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 0 <= value < vocab_size:
        raise ModelFileError(
            f"[Tokenizer] {key}: expected an id from 0 to {vocab_size - 1}, got {_describe(value)}"
        )
    return int(value)


def _named_tokens(tokens: Sequence[str]) -> Sequence[str]:
    """Give empty tokens, which some converters leave as padding, a text of their own."""
    if "" not in tokens:
        return tokens
    return [text or f"[EMPTY_{place}]" for place, text in enumerate(tokens)]


def _kinds(metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int]) -> bytes:
    key = _PREFIX + "token_type"
    value = metadata.get(key)
    values: AnyArray
    if value is None:
        values = np.full(len(tokens), TokenKind.NORMAL)
    else:
        values = np.asarray(value)
        if values.dtype.kind not in "iu" or values.shape != (len(tokens),):
            raise ModelFileError(
                f"[Tokenizer] {key}: expected {len(tokens)} integers, one per token, "
                f"got {_describe(value)}"
            )
        if values.min() < min(TokenKind) or values.max() > max(TokenKind):
            raise ModelFileError(
                f"[Tokenizer] {key}: expected values from 0 to {max(TokenKind):d}, "
                f"got {values.min()} to {values.max()}"
            )
    kinds = bytearray(values.astype(np.uint8).tobytes())
    for text in _CONTROL_TEXTS:
        if text in ids:
            kinds[ids[text]] = TokenKind.CONTROL
    for place in np.flatnonzero(values == TokenKind.BYTE).tolist():
        if not BYTE_TOKEN.fullmatch(tokens[place]):
            raise ModelFileError(
                f"[Tokenizer] {_PREFIX}tokens: expected byte token {place} to be <0x00> to <0xFF>, "
                f"got {tokens[place]!r}"
            )
    return bytes(kinds)


def _describe(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return repr(value)[:80]
