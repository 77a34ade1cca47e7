import re

import pytest

from kvsieve.errors import ConfigError
from kvsieve.evals.tasks import MAKERS, copying, key_value, variable_tracking
from tests.evals.words import WordTokenizer


@pytest.mark.parametrize("task", sorted(MAKERS))
def test_a_prompt_fits_its_length_repeats_for_a_seed_and_splits_at_its_question(task: str) -> None:
    tokenizer = WordTokenizer()
    one, two, other = (
        MAKERS[task](tokenizer, length=500, depth=0.4, seed=seed) for seed in (1, 1, 2)
    )
    assert one.token_ids == two.token_ids
    assert one.expected != other.expected
    assert 480 < len(one.token_ids) <= 500
    text = tokenizer.text(one.token_ids)
    context = tokenizer.text(one.token_ids[: one.context_tokens])
    question = text.removeprefix(context)
    assert question.startswith((" What ", " Once "))
    assert one.expected not in question
    assert one.expected in context
    assert one.score(f" {one.expected}. And so on.") == 1
    assert one.score(f" {other.expected}.") < 0.5


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_right_pair_lies_at_its_depth_among_pairs_that_all_differ(depth: float) -> None:
    tokenizer = WordTokenizer()
    prompt = key_value(tokenizer, length=900, depth=depth)
    text = tokenizer.text(prompt.token_ids)
    pairs = re.findall(r"The code of the (\w+ \w+) is (\d{5})\.", text)
    asked = re.findall(r"The code of the (\w+ \w+) is$", text)
    keys = [key for key, _ in pairs]
    assert len(pairs) > 50
    assert len(set(keys)) == len(keys)
    (at,) = [i for i, (key, number) in enumerate(pairs) if [key] == asked]
    assert pairs[at][1] == prompt.expected
    assert at / (len(pairs) - 1) == pytest.approx(depth, abs=0.02)
    # Some share the colour, some the animal: half a key is not enough.
    colour, animal = asked[0].split()
    assert sum(key.startswith(colour) for key in keys) > 1
    assert sum(key.endswith(animal) for key in keys) > 1


def test_the_chain_of_variables_ends_at_the_one_asked_for() -> None:
    tokenizer = WordTokenizer()
    prompt = variable_tracking(tokenizer, length=400, depth=0.2)
    text = tokenizer.text(prompt.token_ids)
    values = dict(re.findall(r"The value of ([A-Z]+) is (?:the value of )?(\w+)\.", text))
    asked = re.findall(r"What number is the value of ([A-Z]+)", text)[0]
    assert values[values[asked]] == prompt.expected
    first, second = (text.index(f"The value of {name} is") / len(text) for name in values)
    assert first == pytest.approx(0.2, abs=0.05)
    assert second == pytest.approx(0.6, abs=0.07)


def test_copying_scores_words_in_their_place() -> None:
    prompt = copying(WordTokenizer(), length=300, depth=0.5)
    words = prompt.expected.split()
    assert len(words) == 12
    assert prompt.score(" " + " ".join(words[:6])) == 0.5
    assert prompt.score(" x " + " ".join(words)) < 0.2
    assert prompt.score("") == 0


@pytest.mark.parametrize("task", sorted(MAKERS))
def test_depths_and_lengths_that_cannot_be_are_refused(task: str) -> None:
    with pytest.raises(ConfigError, match="depth: expected 0 to 1"):
        MAKERS[task](WordTokenizer(), length=100, depth=1.2)
    with pytest.raises(ConfigError, match=r"length: expected at least \d+ tokens"):
        MAKERS[task](WordTokenizer(), length=12, depth=0.5)
