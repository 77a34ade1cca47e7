"""Tokenizer metadata for tests: a tiny byte-level vocabulary, and SmolLM2's own."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.models.gguf import GgufFile
from tests.models.test_gguf import smollm2
from tests.tiny_model import MERGES, MIN_VOCAB, vocabulary


def tiny_metadata(
    *, pre: str = "smollm", extra: Mapping[str, int] | None = None, **keys: Any
) -> dict[str, Any]:
    """The keys of a tiny model; `extra` appends tokens with their kinds; None leaves a key out."""
    tokens, kinds, merges = vocabulary(MIN_VOCAB + len(MERGES))
    extra = extra or {}
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *extra],
        "token_type": np.array([*kinds, *extra.values()], np.int32),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **keys,
    }
    return {f"tokenizer.ggml.{name}": v for name, v in metadata.items() if v is not None}


def tiny_tokenizer(**keys: Any) -> Tokenizer:
    return Tokenizer.from_metadata(tiny_metadata(**keys))


@cache
def smollm2_metadata() -> Mapping[str, Any]:
    return dict(GgufFile.open(smollm2()).metadata)


@cache
def smollm2_tokenizer(pre: str = "smollm") -> Tokenizer:
    """SmolLM2's vocabulary, its text cut by the rule `pre`."""
    return Tokenizer.from_metadata({**smollm2_metadata(), "tokenizer.ggml.pre": pre})
