"""One completion of a request while it grows: its text, its tokens, how it ended."""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from kvsieve.engine.detokenizer import Detokenizer
from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.engine.outputs import Completion, TokenLogprobs
from kvsieve.engine.requests import Finished, TokenEvent

StopType = Literal["none", "eos", "limit", "word"]


@dataclass(frozen=True, kw_only=True)
class LoggedToken:
    """A generated token, the bytes it stands for, and its log probabilities if asked for.

    `offset` is the place in the text at which it begins, in characters.
    """

    token_id: int
    raw: bytes
    logprobs: TokenLogprobs | None
    offset: int

    @property
    def text(self) -> str:
        """The token as text; bytes that are no character on their own become U+FFFD."""
        return self.raw.decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text that became certain, and the tokens it is made of.

    `is_last` comes with the completion's end.
    """

    text: str
    tokens: tuple[LoggedToken, ...] = ()
    is_last: bool = False


@dataclass(kw_only=True)
class Choice:
    """What became of one sequence so far.

    A token is given out with the piece of text that it begins in. Those of a stop string, which is
    not in the text, are not given out, nor is an end token unless `lists_end`.
    """

    index: int
    tokenizer: AnyTokenizer
    stops: tuple[str, ...] = ()
    lists_end: bool = False
    text: str = ""
    tokens: list[LoggedToken] = field(default_factory=list)
    completion: Completion | None = None
    _detokenizer: Detokenizer = field(init=False)
    _decoded: int = 0
    _decode_ms: float = 0.0
    _steps: int = 0
    _waiting: deque[LoggedToken] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)

    def take(self, event: TokenEvent | Finished) -> Piece:
        """Add an event; returns what is new."""
        if isinstance(event, TokenEvent):
            self._wait(event)
            if event.timing is not None:
                self._decode_ms += event.timing.total_ms
                self._steps += 1
        self.text += event.text
        if isinstance(event, Finished):
            self.completion = event.completion
        is_last = self.completion is not None
        tokens = self._released(everything=is_last and self.stop_type != "word")
        self.tokens += tokens
        return Piece(text=event.text, tokens=tuple(tokens), is_last=is_last)

    @property
    def speed_so_far(self) -> dict[str, float]:
        """`timings` of what was generated so far."""
        steps, total = self._steps, self._decode_ms
        return {
            "predicted_n": steps + 1,
            "predicted_ms": round(total, 3),
            "predicted_per_token_ms": round(total / steps, 3) if steps else 0.0,
            "predicted_per_second": round(1e3 * steps / total, 3) if total else 0.0,
        }

    @property
    def ended(self) -> Completion:
        """The completion of a sequence that has ended."""
        if self.completion is None:
            raise RuntimeError("a completion was asked for before its end")
        return self.completion

    @property
    def stop_type(self) -> StopType:
        """Why it ended, in llama.cpp's words."""
        completion = self.completion
        if completion is None or completion.finish_reason == "cancelled":
            return "none"
        if completion.finish_reason == "length":
            return "limit"
        last = completion.token_ids[-1] if completion.token_ids else None
        return "eos" if last in self.tokenizer.eos_ids else "word"

    @property
    def stopping_word(self) -> str:
        """The stop string that ended it, or nothing."""
        if self.stop_type != "word":
            return ""
        whole = self.tokenizer.decode(self.ended.token_ids)
        rest = whole[len(self.text) :]
        return max((stop for stop in self.stops if rest.startswith(stop)), key=len, default="")

    def _wait(self, event: TokenEvent) -> None:
        token_id = event.token_id
        is_end = token_id in self.tokenizer.eos_ids
        if self.lists_end or not is_end:
            token = LoggedToken(
                token_id=token_id,
                raw=self.tokenizer.token_bytes(token_id, special=is_end),
                logprobs=event.logprobs,
                offset=self._decoded,
            )
            self._waiting.append(token)
        self._decoded += len(self._detokenizer.push(token_id))

    def _released(self, *, everything: bool) -> list[LoggedToken]:
        released = []
        while self._waiting and (everything or self._waiting[0].offset < len(self.text)):
            released.append(self._waiting.popleft())
        return released


def prompt_tokens(
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    tokenizer: AnyTokenizer,
    text: str,
) -> list[LoggedToken]:
    """The tokens of a prompt that reads `text`, control tokens by their names.

    What stands before the text in tokens and is not in it (BOS, a space that the vocabulary begins
    words with) is at its beginning.
    """
    pieces = [tokenizer.token_bytes(one, special=True) for one in ids]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    ends = list(accumulate(len(decoder.decode(piece)) for piece in pieces))
    ahead = ends[-1] + len(decoder.decode(b"", final=True)) - len(text)
    return [
        LoggedToken(token_id=one, raw=piece, logprobs=scores, offset=max(0, begin - ahead))
        for one, piece, scores, begin in zip(ids, pieces, logprobs, [0, *ends], strict=False)
    ]


def timings(completion: Completion) -> dict[str, float]:
    """llama.cpp's `timings`: `prompt_n` leaves out what came from the cache, `cache_n`."""
    given = completion.timings.to_json()
    for phase in ("prompt", "predicted"):
        count, total = given[f"{phase}_n"], given[f"{phase}_ms"]
        given[f"{phase}_per_token_ms"] = round(total / count, 3) if count else 0.0
    return given
