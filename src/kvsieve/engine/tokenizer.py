"""Text to token ids and back, from a model's own vocabulary.

Ids equal llama.cpp's for the same GGUF: special tokens first claim their text, longest first;
what is left is cut by the file's pre-tokenizer and merged by rank (byte-level BPE), or merged by
score (`sentencepiece`). A byte without a token of its own (SmolLM2 has none for a few control
characters) is left out, as llama.cpp does.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvsieve.engine.bpe import ByteLevelMerger, Merger
from kvsieve.engine.pretokenizers import pre_tokenizer_named
from kvsieve.engine.sentencepiece import ScoreMerger
from kvsieve.engine.vocabulary import Vocabulary, flag, string_list
from kvsieve.errors import ConfigError, ModelFileError

_PREFIX_LENGTH = 3

_SCORE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids of special tokens in vocabularies that merge by score, where a file does not say."""


class Encoder(Protocol):
    """Text, special tokens in it, to ids; arguments as `Tokenizer.encode`."""

    def encode(self, text: str, *, parse_special: bool, shield: str) -> list[int]: ...


class Tokenizer:
    """Encodes and decodes text for one model. Immutable; safe to share between threads."""

    def __init__(
        self,
        *,
        vocabulary: Vocabulary,
        encoder: Encoder,
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._add_bos = add_bos
        self._add_eos = add_eos

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build from a GGUF's keys ``tokenizer.ggml.*``; ModelFileError names what is wrong."""
        model = metadata.get("tokenizer.ggml.model")
        if model == "gpt2":
            return cls._merging_by_rank(metadata)
        if model == "llama":
            return cls._merging_by_score(metadata)
        came = "nothing" if model is None else repr(model)
        raise ModelFileError(
            "[Tokenizer] tokenizer.ggml.model: expected 'gpt2' (byte-level BPE) or 'llama' "
            f"(SentencePiece), the kinds supported, got {came}"
        )

    @classmethod
    def _merging_by_rank(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        rule = pre_tokenizer_named(metadata.get("tokenizer.ggml.pre"))
        vocabulary = Vocabulary.from_metadata(metadata)
        merges = _parse_merges(string_list(metadata, "merges"), vocabulary.ids)
        return cls(
            vocabulary=vocabulary,
            encoder=PartingEncoder(vocabulary, ByteLevelMerger(vocabulary, merges, rule)),
            add_bos=_adds(metadata, "bos", vocabulary.bos_id, default=rule.add_bos),
            add_eos=_adds(metadata, "eos", vocabulary.eos_id, default=False),
        )

    @classmethod
    def _merging_by_score(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        vocabulary = Vocabulary.from_metadata(
            metadata, byte_alphabet=False, defaults=_SCORE_DEFAULTS
        )
        merger = ScoreMerger(
            vocabulary,
            _scores(metadata, len(vocabulary.tokens)),
            add_space_prefix=flag(metadata, "add_space_prefix", default=True),
        )
        return cls(
            vocabulary=vocabulary,
            encoder=PartingEncoder(vocabulary, merger),
            add_bos=_adds(metadata, "bos", vocabulary.bos_id, default=True),
            add_eos=_adds(metadata, "eos", vocabulary.eos_id, default=False),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids go from 0 to one less."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The token a text begins with, if the model has one (it need not be added: `add_bos`)."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The end token the file names, if any."""
        return self._vocabulary.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation: end of text, of turn, of message, of a file."""
        return self._vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode` begins with `bos_id`."""
        return self._add_bos

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts of the control tokens, longest first: what untrusted text must not say."""
        return tuple(text for text, _ in self._vocabulary.control_texts)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, shield: str = ""
    ) -> list[int]:
        """Token ids of `text`.

        add_special    begin with BOS and end with EOS where the file says so
        parse_special  ``<|im_end|>`` in the text is that token; False: plain characters
        shield         a character to take out of plain text once special tokens have been
                       found; put inside the text of one, it keeps it plain

        ConfigError if `text` is not a str or holds lone surrogates.
        """
        _check_text(text)
        vocabulary = self._vocabulary
        ids: list[int] = []
        if add_special and self._add_bos and vocabulary.bos_id is not None:
            ids.append(vocabulary.bos_id)
        ids += self._encoder.encode(text, parse_special=parse_special, shield=shield)
        if add_special and self._add_eos and vocabulary.eos_id is not None:
            ids.append(vocabulary.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, control tokens nothing."""
        joined = b"".join(self.token_bytes(token_id, special=special) for token_id in ids)
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """Raw bytes a token adds to the text (maybe half a character); none for a control token,
        or its text if `special`. ConfigError if there is no such token.
        """
        return self._vocabulary.token_bytes(token_id, special=special)

    def token_text(self, token_id: int) -> str:
        """Text of a token as the file writes it (``Ġthe``, ``<|im_end|>``)."""
        return self._vocabulary.tokens[self._vocabulary.check_id(token_id)]


class PartingEncoder:
    """Parts a text at special tokens, and leaves what is between them to a `Merger`."""

    def __init__(self, vocabulary: Vocabulary, merger: Merger) -> None:
        self._vocabulary = vocabulary
        self._merger = merger

    def encode(self, text: str, *, parse_special: bool, shield: str) -> list[int]:
        """Ids of `text`; arguments as `Tokenizer.encode`."""
        vocabulary = self._vocabulary
        specials = vocabulary.matched_texts if parse_special else vocabulary.user_defined_texts
        ids: list[int] = []
        is_first = True
        for part in _partition(text, specials):
            if isinstance(part, int):
                ids.append(part)
            else:
                plain = part.replace(shield, "") if shield else part
                ids.extend(self._merger.merge(plain, is_first=is_first))
            is_first = isinstance(part, int)
        return ids


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"[encode] text: expected str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            "[encode] text: expected Unicode text, got a lone surrogate "
            f"U+{ord(text[error.start]):04X} at position {error.start}"
        ) from None


def _partition(text: str, specials: Sequence[tuple[str, int]]) -> list[str | int]:
    """Cut `text` at special tokens; each claims all its places before the next is looked for."""
    parts: list[str | int] = [text] if text else []
    # Vocabularies have thousands of special tokens, with few beginnings.
    occurs: dict[str, bool] = {}
    for special, token_id in specials:
        prefix = special[:_PREFIX_LENGTH]
        if prefix not in occurs:
            occurs[prefix] = prefix in text
        if not occurs[prefix] or special not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for place, piece in enumerate(part.split(special)):
                if place:
                    cut.append(token_id)
                if piece:
                    cut.append(piece)
        parts = cut
    return parts


def _parse_merges(lines: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs in order of rank. All three texts of a merge must be tokens; ModelFileError if not."""
    merges: list[tuple[str, str]] = []
    # A pair given twice keeps its first rank.
    for line in dict.fromkeys(lines):
        left, _, right = line.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            raise ModelFileError(
                "[Tokenizer] tokenizer.ggml.merges: expected two tokens that make a third, "
                f"got {line[:80]!r}"
            )
        merges.append((left, right))
    return merges


def _adds(metadata: Mapping[str, Any], name: str, token_id: int | None, *, default: bool) -> bool:
    """Whether `encode` adds the token; a file that asks for one it does not name is refused."""
    key = f"add_{name}_token"
    adds = flag(metadata, key, default=default and token_id is not None)
    if adds and token_id is None:
        raise ModelFileError(
            f"[Tokenizer] tokenizer.ggml.{key}: expected false, because the file names no "
            f"tokenizer.ggml.{name}_token_id, got true"
        )
    return adds


def _scores(metadata: Mapping[str, Any], vocab_size: int) -> list[float]:
    values = np.asarray(metadata.get("tokenizer.ggml.scores"))
    if values.dtype.kind != "f" or values.shape != (vocab_size,) or np.isnan(values).any():
        raise ModelFileError(
            f"[Tokenizer] tokenizer.ggml.scores: expected {vocab_size} numbers, one per token, "
            f"got {values.dtype} of shape {values.shape}"
        )
    scores: list[float] = values.tolist()
    return scores
