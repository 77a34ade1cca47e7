"""What makes tokens more or less likely because they were asked for, or were said before."""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from kvsieve.types import F32, I32, I64


class LogitBias:
    """Numbers added to the logits of given tokens; -inf bans one."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids: I64 = np.fromiter(bias.keys(), np.int64, len(bias))
        self._values: F32 = np.fromiter(bias.values(), np.float32, len(bias))

    def apply(self, logits: F32) -> None:
        """Change f32 ``[vocab]`` in place."""
        logits[self._ids] += self._values


class Penalties:
    """Repeat, frequency and presence penalties over the last tokens, as llama.cpp has them.

    last_n     tokens looked back on, prompt included; -1: all of them, 0: none
    repeat     divides positive logits of tokens seen, and multiplies negative ones
    frequency  subtracted once for each time a token was seen
    presence   subtracted once from every token seen
    """

    def __init__(
        self,
        *,
        last_n: int,
        repeat: float,
        frequency: float,
        presence: float,
        seen: Iterable[int] = (),
    ) -> None:
        self._repeat = np.float32(repeat)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        self._window: deque[int] = deque(maxlen=None if last_n < 0 else last_n)
        self._counts: I32 = np.zeros(0, np.int32)
        for token in seen:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Note a token that was said; the oldest leaves a full window."""
        window = self._window
        if window.maxlen == 0:
            return
        if len(window) == window.maxlen:
            self._counts[window[0]] -= 1
        window.append(token)
        if token >= self._counts.size:
            self._counts = np.concatenate(
                [self._counts, np.zeros(max(token + 1, 2 * self._counts.size), np.int32)]
            )
        self._counts[token] += 1

    def apply(self, logits: F32) -> None:
        """Change f32 ``[vocab]`` in place."""
        seen = np.flatnonzero(self._counts)
        if not seen.size:
            return
        values = logits[seen]
        values = np.where(values > 0, values / self._repeat, values * self._repeat)
        counts = self._counts[seen].astype(np.float32)
        logits[seen] = values - (counts * self._frequency + self._presence)
