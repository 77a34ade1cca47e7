import numpy as np
import pytest

from kvsieve.engine.llm import LLM
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.corpus import Passage
from kvsieve.evals.perplexity import check_perplexity, mean_logprob, perplexity_row
from kvsieve.evals.settings import trials

PASSAGE = Passage(token_ids=np.random.default_rng(2).integers(3, 259, 540).tolist(), source="ids")
EXACT, SPARSE = trials(parse_arms(["exact", "sparse:k=3,tail=0"]), ["C"])


@pytest.mark.parametrize("trial", [EXACT, SPARSE])
@pytest.mark.parametrize("start", [0, 300, 520])
def test_it_is_that_of_the_logits_of_the_prompt(llm: LLM, trial, start: int) -> None:  # type: ignore[no-untyped-def]
    logits = llm.logits(PASSAGE.token_ids, sparse=trial.arm.sparse).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    right = logprobs[np.arange(start, 539), PASSAGE.token_ids[start + 1 :]]
    got, density = mean_logprob(llm, PASSAGE, trial=trial, start=start)
    assert got == pytest.approx(right.mean(), abs=1e-9)
    assert density is not None
    assert (density < 1) == (trial is SPARSE)


def test_the_change_is_relative_to_exact() -> None:
    row = perplexity_row(
        PASSAGE, trial=SPARSE, start=3, logprob=-np.log(11), exact_logprob=-np.log(10), density=0.5
    )
    assert row.perplexity == pytest.approx(11)
    assert row.change == pytest.approx(0.1)


def test_settings_that_read_the_prompt_exactly_and_positions_out_of_range_are_refused() -> None:
    (b,) = trials(parse_arms(["sparse:k=3"]), ["B"])
    with pytest.raises(ConfigError, match="settings: expected C"):
        check_perplexity(b, length=500, start=0)
    for start in (-1, 499):
        with pytest.raises(ConfigError, match="start: expected 0 to 498"):
            check_perplexity(EXACT, length=500, start=start)
    with pytest.raises(ConfigError, match="fit the budget of 3"):
        check_perplexity(SPARSE, length=90, start=0)
