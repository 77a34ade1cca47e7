"""What counts as recalling a five-digit key."""

import re

from kvsieve.engine.llm import LLM
from kvsieve.errors import CapacityError

ANSWER_TOKENS = 12
"""Enough for a key of five digits, a token each, and a few words that show what came after."""


def first_number(reply: str) -> str | None:
    """The first run of digits."""
    number = re.search(r"[0-9]+", reply)
    return number.group() if number else None


def is_hit(reply: str, key: str) -> bool:
    """Whether the first number of the reply is the key, whole."""
    return first_number(reply) == key


def check_room(llm: LLM, *, task: str, length: int, reply_tokens: int) -> None:
    """Raise CapacityError, before anything runs, unless a prompt and its reply fit."""
    if length + reply_tokens > llm.ctx_size:
        raise CapacityError(
            f"[{task}] lengths: expected at most {llm.ctx_size - reply_tokens} tokens beside a "
            f"reply of {reply_tokens} in a context of {llm.ctx_size}, got {length}"
        )
