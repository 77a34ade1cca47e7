"""The real model against predictions of llama.cpp, frozen by benchmarks/golden."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvsieve.engine.llm import LLM

GOLDEN = Path(__file__).parents[1] / "data" / "llama_cpp_english.json"


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def log_probs(golden):
    """Log-probabilities f64 ``[1000, vocab]``, f16 cache as llama.cpp ran it."""
    with LLM("smollm2", cache_type="f16", threads=2) as llm:
        logits = llm.logits(golden["ids"]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_the_tokens_are_the_texts(golden):
    with LLM("smollm2", threads=1) as llm:
        ids = llm.tokenizer.encode((GOLDEN.parent / "english.txt").read_text())
    assert ids[:1000] == golden["ids"]
    assert len(golden["ids"]) == 1000


def test_the_most_likely_token_agrees_on_95_percent_of_positions(golden, log_probs):
    agree = np.mean(log_probs.argmax(axis=1) == np.array(golden["top1"]))
    assert agree >= 0.95


def test_perplexity_is_within_one_percent(golden, log_probs):
    ids = np.array(golden["ids"])
    following = log_probs[np.arange(len(ids) - 1), ids[1:]]
    ours = np.exp(-following.mean())
    theirs = np.exp(-np.mean(golden["log_prob_of_next"]))
    assert ours == pytest.approx(theirs, rel=0.01)
    # Not merely equal on average: position by position.
    assert np.corrcoef(following, golden["log_prob_of_next"])[0, 1] > 0.99
