"""Text to measure with: templated filler with something hidden in it, and natural prose.

Everything is drawn from a seed, so the same arguments give the same text on every machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pydoc_data.topics import topics
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

_SEAM = 8
"""Tokens at the end of a piece of text that would differ if the text went on."""

TEXT_KINDS = ("templated", "natural")

QUESTION = " What is the pass key? The pass key is"
"""Asked as a completion: small chat models answer this form from far longer prompts."""


class Encoder(Protocol):
    """What a prompt maker needs of a tokenizer."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, kw_only=True)
class PasskeyPrompt:
    """A prompt whose right continuation is `key`; `context_tokens` come before the question."""

    text: str
    token_ids: list[int]
    context_tokens: int
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
    fitted = fit_filler(
        tokenizer,
        lambda: filler_sentence(random),
        inserts=[(depth, needle)],
        question=QUESTION,
        length=length,
        function="passkey_prompt",
    )
    return PasskeyPrompt(
        text=fitted.text,
        token_ids=fitted.token_ids,
        context_tokens=fitted.context_tokens,
        key=key,
        depth=depth,
    )


@dataclass(frozen=True, kw_only=True)
class FittedText:
    """Filler with something hidden in it, and a question at the end.

    ``context_tokens``: how many of the tokens come before the question.
    """

    text: str
    token_ids: list[int]
    context_tokens: int


def fit_filler(
    tokenizer: Encoder,
    sentence: Callable[[], str],
    *,
    inserts: Sequence[tuple[float, str]],
    question: str,
    length: int,
    function: str,
) -> FittedText:
    """As many sentences as `length` tokens allow, each insert at its depth, the question last.

    Parameters
    ----------
    sentence
        Gives the next sentence of filler.
    inserts
        Pairs (depth, text), by rising depth: 0 is before all filler, 1 after it.
    function
        Whose error it is if `length` has no room for inserts and question (ConfigError).
    """
    needle = " ".join(text for _, text in inserts)
    sentences: list[str] = []
    budget = length - len(tokenizer.encode(needle + question))
    while budget > 0:
        sentences.append(sentence())
        budget -= len(tokenizer.encode(" " + sentences[-1], add_special=False))
    # Sentences counted one by one may differ from the whole by a merge at a seam: count again.
    while True:
        context = _with_inserts(sentences, inserts)
        token_ids = tokenizer.encode(context + question)
        if len(token_ids) <= length:
            before = _common_prefix(token_ids, tokenizer.encode(context))
            return FittedText(text=context + question, token_ids=token_ids, context_tokens=before)
        if not sentences:
            raise ConfigError(
                f"[{function}] length: expected at least {len(token_ids)} tokens "
                f"(the key and the question), got {length}"
            )
        sentences.pop()


def filler_tokens(tokenizer: Encoder, count: int, *, seed: int = 0) -> list[int]:
    """Exactly `count` token ids of filler text, cut wherever that falls."""
    random = Random(f"filler {seed}")
    token_ids = tokenizer.encode(filler_sentence(random))
    while len(token_ids) < count:
        token_ids += tokenizer.encode(" " + filler_sentence(random), add_special=False)
    return token_ids[:count]


def random_tokens(vocab_size: int, count: int, *, seed: int = 0) -> list[int]:
    """`count` token ids below `vocab_size`, for a model without a vocabulary."""
    return Random(f"tokens {seed}").choices(range(vocab_size), k=count)


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Exactly `length` tokens of one kind of text; ``source`` names the text and its version."""

    token_ids: list[int]
    source: str


def passage(tokenizer: Encoder, kind: str, length: int, *, seed: int = 0) -> Passage:
    """`length` tokens of text to read: ``natural`` prose, or ``templated`` filler.

    Natural text is the standard library's `pydoc_data.topics`, about 110,000 tokens that differ
    between versions of Python: ``source`` holds the first 12 digits of its SHA-256. `seed`
    chooses the topic it starts with, and draws the filler.
    """
    if kind == "templated":
        return Passage(
            token_ids=filler_tokens(tokenizer, length, seed=seed), source=f"templated:{seed}"
        )
    if kind != "natural":
        raise ConfigError(f"[passage] kind: expected one of {', '.join(TEXT_KINDS)}, got {kind!r}")
    texts = [topics[name] for name in sorted(topics)]
    digest = sha256("\n\n".join(texts).encode()).hexdigest()[:12]
    first = Random(f"passage {seed}").randrange(len(texts)) if seed else 0
    whole = "\n\n".join(texts[first:] + texts[:first])
    # Only the beginning goes through the tokenizer, and the seam at its end is left out.
    token_ids: list[int] = []
    characters = 6 * length
    while len(token_ids) < length and characters < 2 * len(whole):
        token_ids = tokenizer.encode(whole[:characters])[:-_SEAM]
        characters *= 2
    token_ids = token_ids[:length]
    if len(token_ids) < length:
        raise ConfigError(
            f"[passage] length: expected at most {len(token_ids)} tokens (all of the natural "
            f"text), got {length}"
        )
    return Passage(token_ids=token_ids, source=f"natural:{digest}:{seed}")


def filler_sentence(random: Random) -> str:
    """The next sentence of filler; there are 2,000 different ones."""
    name, city = random.choice(_NAMES), random.choice(_CITIES)
    return f"{name} works in {city} and enjoys {random.choice(_PASTIMES)}."


def _with_inserts(sentences: list[str], inserts: Sequence[tuple[float, str]]) -> str:
    parts: list[str] = []
    done = 0
    for depth, text in inserts:
        at = round(depth * len(sentences))
        parts += [*sentences[done:at], text]
        done = at
    return " ".join([*parts, *sentences[done:]])


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading items two lists share."""
    same = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))
