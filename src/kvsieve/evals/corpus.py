"""Prompts made to measure: templated filler, and a pass key hidden in it.

Everything is drawn from a seed, so the same arguments give the same text on every machine.
"""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvsieve.errors import ConfigError

# The words matter: with other cities and pastimes (Athens, Seville; chess, singing) the same
# sentences made SmolLM2-135M define a pass key at 6,000 tokens instead of recalling it.
# fmt: off
_NAMES = (
    "Anna", "Boris", "Clara", "David", "Emma", "Felix", "Gina", "Henry", "Irene", "Jack",
    "Karin", "Lucas", "Maria", "Nora", "Oscar", "Paula", "Rita", "Simon", "Tomas", "Vera",
)
_CITIES = (
    "Boston", "Delhi", "Dublin", "Kyoto", "Lyon", "Madrid", "Prague", "Rome", "Tunis", "Vienna",
)
_PASTIMES = (
    "baking", "boxing", "climbing", "drawing", "gardening", "knitting", "skating", "surfing",
    "tennis", "writing",
)
# fmt: on

QUESTION = " What is the pass key? The pass key is"
"""Asked as a completion: small chat models answer this form from far longer prompts."""


class Encoder(Protocol):
    """What a prompt maker needs of a tokenizer."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, kw_only=True)
class PasskeyPrompt:
    """A prompt whose right continuation is `key`."""

    text: str
    token_ids: list[int]
    key: str
    depth: float


def passkey_prompt(
    tokenizer: Encoder, *, length: int, depth: float, seed: int = 0
) -> PasskeyPrompt:
    """Hide a five-digit key in filler and ask for it at the end.

    Parameters
    ----------
    length
        Most tokens that the prompt may have, special tokens included; it falls short of it by
        less than one sentence of filler.
    depth
        Share of the filler that comes before the key: 0 (start) to 1 (just before the question).
    seed
        With `length` and `depth`, decides the key and the filler.

    Raises
    ------
    ConfigError
        `depth` is outside 0..1, or `length` is too small for the key and the question.
    """
    if not 0.0 <= depth <= 1.0:
        raise ConfigError(f"[passkey_prompt] depth: expected 0 to 1, got {depth}")
    random = Random(f"passkey {seed} {length} {depth}")
    key = str(random.randint(10_000, 99_999))
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    sentences: list[str] = []
    budget = length - len(tokenizer.encode(needle + QUESTION))
    while budget > 0:
        sentences.append(_sentence(random))
        budget -= len(tokenizer.encode(" " + sentences[-1], add_special=False))
    # Sentences counted one by one may differ from the whole by a merge at a seam: count again.
    while True:
        text = _with_needle(sentences, needle, depth) + QUESTION
        token_ids = tokenizer.encode(text)
        if len(token_ids) <= length:
            return PasskeyPrompt(text=text, token_ids=token_ids, key=key, depth=depth)
        if not sentences:
            raise ConfigError(
                f"[passkey_prompt] length: expected at least {len(token_ids)} tokens "
                f"(the key and the question), got {length}"
            )
        sentences.pop()


def filler_tokens(tokenizer: Encoder, count: int, *, seed: int = 0) -> list[int]:
    """Exactly `count` token ids of filler text, cut wherever that falls."""
    random = Random(f"filler {seed}")
    token_ids = tokenizer.encode(_sentence(random))
    while len(token_ids) < count:
        token_ids += tokenizer.encode(" " + _sentence(random), add_special=False)
    return token_ids[:count]


def random_tokens(vocab_size: int, count: int, *, seed: int = 0) -> list[int]:
    """`count` token ids below `vocab_size`, for a model without a vocabulary."""
    return Random(f"tokens {seed}").choices(range(vocab_size), k=count)


def _sentence(random: Random) -> str:
    name, city = random.choice(_NAMES), random.choice(_CITIES)
    return f"{name} works in {city} and enjoys {random.choice(_PASTIMES)}."


def _with_needle(sentences: list[str], needle: str, depth: float) -> str:
    at = round(depth * len(sentences))
    return " ".join([*sentences[:at], needle, *sentences[at:]])
