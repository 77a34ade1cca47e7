import pytest

from kvsieve.errors import ConfigError
from kvsieve.evals.corpus import QUESTION, filler_tokens, passkey_prompt, random_tokens
from tests.evals.words import WordTokenizer


@pytest.mark.parametrize("length", [60, 61, 100, 777])
def test_length_is_never_passed_and_missed_by_less_than_a_sentence(length: int) -> None:
    prompt = passkey_prompt(WordTokenizer(), length=length, depth=0.5)
    # A sentence of filler is 7 words and a full stop.
    assert length - 8 < len(prompt.token_ids) <= length


def test_key_stands_in_the_prompt_at_its_depth_and_the_question_ends_it() -> None:
    for depth in (0.0, 0.25, 1.0):
        prompt = passkey_prompt(WordTokenizer(), length=1000, depth=depth)
        assert len(prompt.key) == 5
        assert prompt.key.isdigit()
        assert prompt.text.count(prompt.key) == 2
        assert prompt.text.endswith(QUESTION)
        before, _, after = prompt.text.removesuffix(QUESTION).partition("The pass key is")
        filler_after = after.partition(f"{prompt.key} is the pass key.")[2]
        share = len(before) / (len(before) + len(filler_after))
        assert share == pytest.approx(depth, abs=0.02)


def test_same_arguments_same_prompt_and_other_seed_other_key() -> None:
    one, two, other = (
        passkey_prompt(WordTokenizer(), length=200, depth=0.5, seed=seed) for seed in (1, 1, 2)
    )
    assert one == two
    assert one.key != other.key


def test_ids_are_those_of_the_whole_text() -> None:
    tokenizer = WordTokenizer()
    prompt = passkey_prompt(tokenizer, length=90, depth=0.5)
    assert tokenizer.text(prompt.token_ids) == prompt.text
    assert prompt.token_ids[0] == 0


def test_a_merge_at_the_seams_cannot_push_it_over_the_length() -> None:
    class Seamy(WordTokenizer):
        """Counts a third more tokens for a whole text than for its sentences apart."""

        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            ids = super().encode(text, add_special=add_special)
            return ids + [0] * (len(ids) // 3 if add_special else 0)

    assert len(passkey_prompt(Seamy(), length=300, depth=0.5).token_ids) <= 300


@pytest.mark.parametrize("depth", [-0.1, 1.5, float("nan")])
def test_depth_outside_the_text_is_refused(depth: float) -> None:
    with pytest.raises(ConfigError, match="depth: expected 0 to 1"):
        passkey_prompt(WordTokenizer(), length=100, depth=depth)


def test_no_room_for_the_question_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at least \d+ tokens .* got 10"):
        passkey_prompt(WordTokenizer(), length=10, depth=0.5)


@pytest.mark.parametrize("count", [1, 8, 9, 10, 250])
def test_filler_has_exactly_the_count(count: int) -> None:
    tokenizer = WordTokenizer()
    ids = filler_tokens(tokenizer, count)
    assert len(ids) == count
    # Longer filler begins with shorter filler: depths are comparable.
    assert ids == filler_tokens(tokenizer, 300)[:count]


def test_random_ids_repeat_for_a_seed_and_reach_the_whole_vocabulary() -> None:
    ids = random_tokens(50, 1000)
    assert len(ids) == 1000
    assert set(ids) == set(range(50))
    assert random_tokens(50, 1000) == ids
    assert random_tokens(50, 10) == ids[:10]
    assert random_tokens(50, 1000, seed=1) != ids
