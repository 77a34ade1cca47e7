"""Merging by score, as the vocabularies of Llama 2 and Gemma want it ("SentencePiece").

Characters are merged pair by pair: always the pair whose token has the highest score, the leftmost
among equals. What is left without a token is spelled in bytes. Spaces are written as U+2581.
"""

import heapq
import re
from collections.abc import Sequence
from functools import lru_cache

from kvsieve.engine.vocabulary import SPACE, Vocabulary

_CACHED_WORDS = 1 << 15


class ScoreMerger:
    """Pieces of text to ids; immutable, and safe to share between threads.

    scores            one per token
    add_space_prefix  a text that begins, or follows a special token, gets a space in front
    """

    def __init__(
        self, vocabulary: Vocabulary, scores: Sequence[float], *, add_space_prefix: bool
    ) -> None:
        # What a control token says is plain text here, even where its pieces would merge into it.
        control = {token_id for _, token_id in vocabulary.control_texts}
        self._ids = {text: one for text, one in vocabulary.ids.items() if one not in control}
        self._scores = scores
        self._prefix = " " if add_space_prefix else ""
        self._bytes = [_byte_id(vocabulary, byte) for byte in range(256)]
        # No token goes on behind a space after any other character than these, so a text may be cut
        # before other spaces: each word gives the same ids alone, and common ones are remembered.
        inside = re.findall(f"([^{SPACE}\0]){SPACE}", "\0".join(vocabulary.tokens))
        self._joints = re.compile(f"(?<=[^{SPACE}{re.escape(''.join({*inside}))}])(?={SPACE})")
        self._merged = lru_cache(maxsize=_CACHED_WORDS)(self._merge)

    def merge(self, text: str, *, is_first: bool) -> Sequence[int]:
        """Ids of `text`."""
        if is_first:
            text = self._prefix + text
        words = self._joints.split(text.replace(" ", SPACE))
        return [token_id for word in words for token_id in self._merged(word)]

    def _merge(self, text: str) -> tuple[int, ...]:
        ids, scores = self._ids, self._scores
        parts = list(text)  # a merged part leaves "" in the place of its right half
        following = [*range(1, len(parts)), -1]
        previous = [*range(-1, len(parts) - 1)]
        # (score negated, left, right, length): smallest first is best first, then leftmost.
        candidates: list[tuple[float, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            both = parts[left] + parts[right]
            token_id = ids.get(both)
            if token_id is not None:
                heapq.heappush(candidates, (-scores[token_id], left, right, len(both)))

        for right in range(1, len(parts)):
            consider(right - 1, right)
        while candidates:
            _, left, right, length = heapq.heappop(candidates)
            # Out of date where either half has been merged since.
            if (
                not parts[left]
                or not parts[right]
                or len(parts[left]) + len(parts[right]) != length
            ):
                continue
            parts[left] += parts[right]
            parts[right] = ""
            after = following[left] = following[right]
            if after >= 0:
                previous[after] = left
                consider(left, after)
            if previous[left] >= 0:
                consider(previous[left], left)
        found: list[int] = []
        for part in filter(None, parts):
            token_id = ids.get(part)
            if token_id is not None:
                found.append(token_id)
            else:
                found += [one for byte in part.encode() if (one := self._bytes[byte]) is not None]
        return tuple(found)


def _byte_id(vocabulary: Vocabulary, byte: int) -> int | None:
    """The token of a byte; where there is none, of the character of that number, or the unknown."""
    ids = vocabulary.ids
    return ids.get(f"<0x{byte:02X}>", ids.get(chr(byte), vocabulary.unknown_id))
