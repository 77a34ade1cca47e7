"""Log probabilities in the three shapes that clients read."""

from collections.abc import Sequence
from typing import Any

from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.server.choices import LoggedToken

_NEVER = -9999.0
"""OpenAI's number for a token that cannot come: JSON has no minus infinity."""


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(float(logprob), _NEVER)


def chat_logprobs(tokens: Sequence[LoggedToken], tokenizer: AnyTokenizer) -> list[dict[str, Any]]:
    """OpenAI's ``logprobs.content``, also of llama.cpp's `completion_probabilities`."""
    entries = []
    for token in tokens:
        if token.logprobs is None:
            continue
        entry = _entry(token.token_id, token.raw, token.logprobs.logprob)
        entry["top_logprobs"] = [
            _entry(one.token_id, tokenizer.token_bytes(one.token_id, special=True), one.logprob)
            for one in token.logprobs.top
        ]
        entries.append(entry)
    return entries


def legacy_logprobs(
    tokens: Sequence[LoggedToken], tokenizer: AnyTokenizer, *, offset: int = 0
) -> dict[str, list[Any]]:
    """The `logprobs` of ``/v1/completions``; the text of the reply begins at `offset`."""
    shown: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        shown["tokens"].append(token.text)
        shown["text_offset"].append(offset + token.offset)
        if token.logprobs is None:  # the first token of a prompt
            shown["token_logprobs"].append(None)
            shown["top_logprobs"].append(None)
            continue
        logprob = finite(token.logprobs.logprob)
        top = {
            _text(tokenizer.token_bytes(one.token_id, special=True)): finite(one.logprob)
            for one in reversed(token.logprobs.top)
        }
        shown["token_logprobs"].append(logprob)
        shown["top_logprobs"].append({**dict(reversed(top.items())), token.text: logprob})
    return shown


def _entry(token_id: int, raw: bytes, logprob: float) -> dict[str, Any]:
    return {
        "id": token_id,
        "token": _text(raw),
        "bytes": list(raw),
        "logprob": finite(logprob),
    }


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
