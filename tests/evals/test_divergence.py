import numpy as np
import pytest

from kvsieve.engine.llm import LLM
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.corpus import Passage
from kvsieve.evals.divergence import exact_reference, kl_divergence, measure_divergence
from kvsieve.evals.settings import trials

POSITIONS = 12
PASSAGE = Passage(token_ids=np.random.default_rng(1).integers(3, 259, 250).tolist(), source="ids")


def test_kl_of_hand_values() -> None:
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    # .5 ln 2 - .25 ln 2
    assert kl_divergence(p, q) == pytest.approx(0.25 * np.log(2))
    assert kl_divergence(p, p) == 0


def test_exact_differs_by_nothing_and_sparse_as_its_logits_do(llm: LLM) -> None:
    exact, b, c = trials(parse_arms(["exact", "sparse:k=3,tail=0"]), ["B", "C"])
    reference = exact_reference(llm, PASSAGE, exact=exact, positions=POSITIONS)
    row = measure_divergence(llm, reference, trial=exact)
    # Log-probabilities are kept in 32 bits.
    assert row.kl < 1e-7
    assert (row.top1, row.density) == (1.0, 1.0)
    assert row.logprob == pytest.approx(row.logprob_exact, abs=1e-5)
    want = llm.logits(PASSAGE.token_ids, prompt_len=250 - POSITIONS).astype(np.float64)
    for trial in (b, c):
        row = measure_divergence(llm, reference, trial=trial)
        got = llm.logits(
            PASSAGE.token_ids, prompt_len=250 - POSITIONS, sparse=trial.arm.sparse
        ).astype(np.float64)
        last = (want[-POSITIONS:], got[-POSITIONS:])
        p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in last)
        kl = (np.exp(p) * (p - q)).sum(axis=1)
        assert row.kl == pytest.approx(kl.mean(), abs=1e-6)
        assert row.kl_max == pytest.approx(kl.max(), abs=1e-6)
        assert row.kl > 1e-4
        assert row.top1 == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=1e-4)
        nexts = PASSAGE.token_ids[-POSITIONS + 1 :]
        assert row.logprob == pytest.approx(q[np.arange(POSITIONS - 1), nexts].mean(), abs=1e-5)
        assert (row.setting, row.positions, row.text) == (trial.setting, POSITIONS, "ids")
        assert row.density is not None
        assert row.density < 1
