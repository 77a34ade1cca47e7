"""Questions with a known answer, drawn from a seed: pass key, key-value pairs, variables, copying.

A task is a context, a question whose right continuation is ``expected``, and a judge. All say their
question as the start of the answer ("The pass key is"): small models continue where they would not
obey.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random

from kvsieve.errors import ConfigError
from kvsieve.evals.corpus import (
    Encoder,
    FittedText,
    PasskeyPrompt,
    filler_sentence,
    fit_filler,
    passkey_prompt,
)
from kvsieve.evals.passkey import ANSWER_TOKENS, first_number

# fmt: off
_COLOURS = (
    "amber", "black", "blue", "brown", "coral", "gold", "green", "grey", "indigo", "ivory", "lime",
    "orange", "pink", "purple", "red", "silver", "teal", "violet", "white", "yellow",
)
_ANIMALS = (
    "badger", "bear", "cat", "crow", "deer", "dog", "duck", "eagle", "fox", "frog", "goat", "hawk",
    "horse", "lion", "mole", "mouse", "otter", "owl", "rabbit", "seal", "shark", "sheep", "snake",
    "swan", "tiger", "toad", "trout", "wasp", "wolf", "wren",
)
_WORDS = (
    "anchor", "basket", "candle", "desert", "engine", "feather", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "marble", "needle", "orchard", "pepper", "quarry", "ribbon",
    "saddle", "timber", "umbrella", "velvet", "window", "yarn", "bridge", "copper", "dragon",
    "flour", "glove", "harbor", "iron", "jungle", "lemon", "mirror", "north", "paper", "river",
    "stone", "tower", "valley",
)
# fmt: on

SPAN_WORDS = 16
CUE_WORDS = 4
"""Copying: words of the list, and how many of them the question repeats."""

HOPS = 2
"""Variables: assignments from the number to the variable asked for, the first included."""


@dataclass(frozen=True, kw_only=True)
class TaskPrompt:
    """A question and its answer.

    context_tokens  tokens before the question
    score           share of the answer that a reply has right, 0 to 1
    reply_tokens    enough for the answer and a few words that show what came after
    """

    task: str
    token_ids: list[int]
    context_tokens: int
    depth: float
    expected: str
    score: Callable[[str], float]
    reply_tokens: int


def passkey(tokenizer: Encoder, *, length: int, depth: float, seed: int = 0) -> TaskPrompt:
    """A five-digit key hidden in filler."""
    prompt = passkey_prompt(tokenizer, length=length, depth=depth, seed=seed)
    return _numeric("passkey", prompt, depth=depth, number=prompt.key)


def key_value(tokenizer: Encoder, *, length: int, depth: float, seed: int = 0) -> TaskPrompt:
    """The number of one animal among many that share its colour or its kind.

    Every sentence of the context is such a pair, all of them different, so nothing but the whole
    key finds the right one. 600 pairs fill about 8,000 tokens; after them filler follows.
    """
    random = Random(f"kv {seed} {length} {depth}")
    keys = [f"{colour} {animal}" for colour, animal in product(_COLOURS, _ANIMALS)]
    random.shuffle(keys)
    asked, number = keys.pop(), str(random.randint(10_000, 99_999))

    def pair() -> str:
        if not keys:
            return filler_sentence(random)
        return f"The code of the {keys.pop()} is {random.randint(10_000, 99_999)}."

    fitted = fit_filler(
        tokenizer,
        pair,
        inserts=[(_checked("key_value", depth), f"The code of the {asked} is {number}.")],
        question=f" What is the code of the {asked}? The code of the {asked} is",
        length=length,
        function="key_value",
    )
    return _numeric("kv", fitted, depth=depth, number=number)


def variable_tracking(
    tokenizer: Encoder, *, length: int, depth: float, seed: int = 0
) -> TaskPrompt:
    """The number behind a variable that was assigned another variable.

    The chain starts at `depth`, its later assignments follow evenly up to the end of the filler.
    """
    random = Random(f"vartrack {seed} {length} {depth}")
    names = random.sample([word.upper() for word in _WORDS if len(word) <= 6], HOPS)
    number = str(random.randint(10_000, 99_999))
    values = [number, *(f"the value of {name}" for name in names)]
    _checked("variable_tracking", depth)
    inserts = [
        (depth + (1 - depth) * hop / HOPS, f"The value of {name} is {value}.")
        for hop, (name, value) in enumerate(zip(names, values, strict=False))
    ]
    fitted = fit_filler(
        tokenizer,
        lambda: filler_sentence(random),
        inserts=inserts,
        question=f" What number is the value of {names[-1]}? The number is",
        length=length,
        function="variable_tracking",
    )
    return _numeric("vartrack", fitted, depth=depth, number=number)


def copying(tokenizer: Encoder, *, length: int, depth: float, seed: int = 0) -> TaskPrompt:
    """The rest of a list of words, of which the question repeats the first few."""
    random = Random(f"copy {seed} {length} {depth}")
    words = random.sample(_WORDS, SPAN_WORDS)
    cue, rest = words[:CUE_WORDS], words[CUE_WORDS:]
    fitted = fit_filler(
        tokenizer,
        lambda: filler_sentence(random),
        inserts=[(_checked("copying", depth), f"The words are: {' '.join(words)}.")],
        question=f" Once more, the words are: {' '.join(cue)}",
        length=length,
        function="copying",
    )

    def score(reply: str) -> float:
        said = re.findall(r"[a-z]+", reply.lower())[: len(rest)]
        right: list[bool] = [a == b for a, b in zip(said, rest, strict=False)]
        return sum(right) / len(rest)

    return TaskPrompt(
        task="copy",
        token_ids=fitted.token_ids,
        context_tokens=fitted.context_tokens,
        depth=depth,
        expected=" ".join(rest),
        score=score,
        reply_tokens=2 * len(rest),
    )


MAKERS: dict[str, Callable[..., TaskPrompt]] = {
    "passkey": passkey,
    "kv": key_value,
    "vartrack": variable_tracking,
    "copy": copying,
}
"""Task by the name it has on the command line."""


def _numeric(
    task: str, prompt: FittedText | PasskeyPrompt, *, depth: float, number: str
) -> TaskPrompt:
    return TaskPrompt(
        task=task,
        token_ids=prompt.token_ids,
        context_tokens=prompt.context_tokens,
        depth=depth,
        expected=number,
        score=lambda reply: float(first_number(reply) == number),
        reply_tokens=ANSWER_TOKENS,
    )


def _checked(function: str, depth: float) -> float:
    if not 0.0 <= depth <= 1.0:
        raise ConfigError(f"[{function}] depth: expected 0 to 1, got {depth}")
    return depth
