import re
from hashlib import sha256
from pydoc_data.topics import topics

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.corpus import filler_tokens, passage
from kvsieve.evals.passages import decode_passage, read_passage
from kvsieve.evals.settings import Trial, trials
from tests.evals.words import WordTokenizer


def exact() -> Trial:
    return trials(parse_arms(["exact"]), ["B"])[0]


def test_natural_text_names_the_hash_of_what_this_python_carries() -> None:
    tokenizer = WordTokenizer()
    one = passage(tokenizer, "natural", 400)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    assert one.source == f"natural:{sha256(text.encode()).hexdigest()[:12]}:0"
    assert len(one.token_ids) == 400
    words = re.findall(r"\w+", tokenizer.text(one.token_ids))
    assert words[:8] == re.findall(r"\w+", text)[:8]
    # Another seed starts with another topic of the same text.
    other = passage(tokenizer, "natural", 400, seed=3)
    assert other.source == one.source[:-1] + "3"
    assert other.token_ids != one.token_ids


def test_templated_text_is_the_filler() -> None:
    tokenizer = WordTokenizer()
    made = passage(tokenizer, "templated", 300, seed=5)
    assert made.token_ids == filler_tokens(tokenizer, 300, seed=5)
    assert made.source == "templated:5"


def test_kinds_and_lengths_that_are_not_there_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="templated, natural, got 'poem'"):
        passage(WordTokenizer(), "poem", 10)
    with pytest.raises(CapacityError, match=r"at most 544 tokens .* got 545"):
        read_passage(llm, "templated", 545)


def test_a_walk_that_cannot_read_its_prompt_gives_its_pages_back(llm: LLM) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    text = read_passage(llm, "templated", 300)
    with pytest.raises(KeyboardInterrupt):
        decode_passage(llm, text, trial=exact(), positions=5, on_progress=stop)
    assert llm._pool.num_free == 17
