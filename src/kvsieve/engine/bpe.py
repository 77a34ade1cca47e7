"""Byte-pair encoding at the speed of native code. The only module that imports `tokenizers`."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from kvsieve.engine.pretokenizers import PreTokenizer
from kvsieve.engine.vocabulary import Vocabulary
from kvsieve.errors import ModelFileError

_NO_TOKEN = "\0no token"
"""Stands in for bytes that have no token, so that their neighbours do not merge across them.
It holds a character that is not in the byte alphabet: no text can become it."""


_LONG_TEXT = 4096
"""Characters from which cutting takes long enough (some ms) to be missed by other threads."""


class Merger(Protocol):
    """Ids of a piece of plain text."""

    def merge(self, text: str, *, is_first: bool) -> Sequence[int]:
        """`is_first`: nothing stands before the text, or a special token does."""


class ByteLevelMerger:
    """Merges of bytes by rank, within the pieces that the model's own rule cuts."""

    def __init__(
        self, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], rule: PreTokenizer
    ) -> None:
        if _NO_TOKEN in vocabulary.ids:
            raise ModelFileError(f"[Tokenizer] tokenizer.ggml.tokens: unexpected {_NO_TOKEN!r}")
        self._missing = len(vocabulary.ids)
        self._tokenizer = tokenizers.Tokenizer(
            models.BPE(
                vocab={**vocabulary.ids, _NO_TOKEN: self._missing},
                merges=list(merges),
                unk_token=_NO_TOKEN,
                fuse_unk=False,
                ignore_merges=rule.ignore_merges,
            )
        )
        cuts = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in rule.patterns]
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])

    def merge(self, text: str, *, is_first: bool) -> Sequence[int]:
        """Ids of `text`; a byte without a token of its own is left out."""
        found = _ids(self._tokenizer, text)
        missing = self._missing
        return [one for one in found if one != missing] if missing in found else found


class JsonEncoder:
    """What a ``tokenizer.json`` says, done by the library that wrote it.

    Special tokens are always looked for before the text is normalised (some files say otherwise),
    so that a shield inside the text of one keeps it plain.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        added = definition.get("added_tokens") or []
        changed = [{**one, "normalized": False} if one.get("special") else one for one in added]
        text = json.dumps(
            {**definition, "added_tokens": changed, "truncation": None, "padding": None}
        )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as failure:  # the library raises Exception itself
            raise ModelFileError(
                f"[Tokenizer] tokenizer.json: expected a definition that `tokenizers` "
                f"{tokenizers.__version__} reads, got: {failure!s:.200}"
            ) from None
        self._normalizer = self._tokenizer.normalizer
        self._lock = threading.Lock()

    @property
    def ids(self) -> dict[str, int]:
        """Every token's id, by its text in the file."""
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    def begins_with(self, token_id: int) -> bool:
        """Whether the file's own template puts this token before a text."""
        found: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        return found[:1] == [token_id]

    def encode(self, text: str, *, parse_special: bool, shield: str) -> list[int]:
        """Ids of `text`, as `Tokenizer.encode`."""
        # Two settings of one object instead of several: a vocabulary takes up to 200 MB.
        with self._lock:
            self._tokenizer.encode_special_tokens = not parse_special
            if shield:
                steps = [normalizers.Replace(shield, "")]
                steps += [self._normalizer] if self._normalizer is not None else []
                self._tokenizer.normalizer = normalizers.Sequence(steps)
            try:
                found = _ids(self._tokenizer, text)
            finally:
                if shield:
                    self._tokenizer.normalizer = self._normalizer
        return found


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) < _LONG_TEXT:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found
    # The call for several texts lets other threads run meanwhile; that for one does not.
    (batch,) = tokenizer.encode_batch([text], add_special_tokens=False)
    found = batch.ids
    return found
