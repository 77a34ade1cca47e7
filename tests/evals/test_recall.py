"""Kept mass: hand values, a loop in float64, and a real run of the tiny model."""

import numpy as np
import pytest

from kvsieve.engine.llm import LLM
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.corpus import Passage
from kvsieve.evals.recall import (
    LayerRecall,
    estimate_error,
    head_recall,
    measure_recall,
    recall_rows,
)
from kvsieve.evals.settings import trials

TOKENS, QUERIES = 300, 7


def trial_of(text: str, setting: str = "B"):
    (trial,) = trials(parse_arms([text]), [setting])
    return trial


@pytest.fixture(scope="module")
def passage() -> Passage:
    ids = np.random.default_rng(0).integers(3, 259, TOKENS).tolist()
    return Passage(token_ids=ids, source="ids")


def test_missing_the_heaviest_block_costs_its_mass_and_not_its_count() -> None:
    """Section 8: with weights .80/.15/.05, 2 of 3 keys is no measure."""
    mass = np.repeat([0.80, 0.15, 0.05], 32) / 32
    q, keys = np.ones((3, 1), np.float32), np.log(mass)[:, None].astype(np.float32)
    values = np.repeat([2.0, 4.0, 8.0], 32)[:, None].astype(np.float32)
    read = np.array([[0, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    got = head_recall(q, keys, values, read=read, visible=np.ones((3, 96), bool))
    assert got.kept == pytest.approx([0.20, 0.95, 0.80], abs=1e-6)
    assert got.oracle == pytest.approx([0.95, 0.95, 0.80], abs=1e-6)
    assert got.blocks.tolist() == [2, 2, 1]
    # Full: .8*2 + .15*4 + .05*8 = 2.6; kept alone and normalised: 5, 2.2/.95, 2.
    want = abs(np.array([5.0, 2.2 / 0.95, 2.0]) - 2.6) / 2.6
    assert got.error == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("arm", ["sparse:k=4,first=1", "sparse:k=3,selector=even,share=group"])
def test_the_lists_that_ran_are_compared_with_full_attention(
    llm: LLM, passage: Passage, arm: str
) -> None:
    trial = trial_of(arm)
    heard = {}
    with llm.walk(passage.token_ids[:-QUERIES], sparse=trial.arm.sparse, max_tokens=TOKENS) as walk:
        walk.read_prompt()
        for token in passage.token_ids[-QUERIES:]:
            at = walk.num_tokens
            walk.step(token, on_attention=lambda n, trace, at=at: heard.update({(n, at): trace}))
        caches = [walk.cache.read(layer) for layer in range(llm.config.num_layers)]
    kept = np.zeros((llm.config.num_layers, llm.config.num_q_heads, QUERIES))
    for (layer, at), trace in heard.items():
        keys = caches[layer][0].astype(np.float64)
        for head in range(llm.config.num_q_heads):
            kv_head = head * llm.config.num_kv_heads // llm.config.num_q_heads
            logits = [float(trace.q[0, head] @ keys[kv_head, s]) for s in range(at + 1)]
            weights = np.exp(np.array(logits) - max(logits))
            row = head * trace.lists.num_heads // llm.config.num_q_heads
            blocks = trace.lists.indices[trace.lists.indptr[row] : trace.lists.indptr[row + 1]]
            inside = sum(weights[32 * b : 32 * b + 32].sum() for b in blocks)
            kept[layer, head, at - (TOKENS - QUERIES)] = inside / weights.sum()

    recall = measure_recall(llm, passage, trial=trial, queries=QUERIES)
    for layer, one in recall.layers.items():
        assert one.kept == pytest.approx(kept[layer], abs=1e-5)
        assert (one.oracle >= one.kept - 1e-6).all()
        assert (one.blocks == trial.arm.sparse.k).all()
    (row,) = recall_rows(recall, passage, trial=trial)
    assert row.kept_mass == pytest.approx(kept.mean(), abs=1e-5)
    assert row.kept_mass_p5 == pytest.approx(np.percentile(kept, 5), abs=1e-5)
    assert (row.setting, row.queries, row.layer, row.exact_layers) == ("B", QUERIES, None, 0)
    assert row.output_error > 0


def test_rows_by_layer_and_by_head_average_to_the_whole(llm: LLM, passage: Passage) -> None:
    trial = trial_of("sparse:k=4,first=1", "C")
    recall = measure_recall(llm, passage, trial=trial, queries=QUERIES)
    (whole,) = recall_rows(recall, passage, trial=trial)
    for by, count in (("layer", 2), ("head", 4)):
        rows = list(recall_rows(recall, passage, trial=trial, by=by))
        assert len(rows) == count
        assert np.mean([row.kept_mass for row in rows]) == pytest.approx(whole.kept_mass, abs=1e-5)
        assert {row.layer for row in rows} == {0, 1}
    with pytest.raises(ConfigError, match="all, layer, head, got 'token'"):
        next(recall_rows(recall, passage, trial=trial, by="token"))


def test_what_the_engine_estimated_stands_beside_the_truth(llm: LLM, passage: Passage) -> None:
    trial = trial_of("sparse:k=4,first=1")
    with llm.walk(passage.token_ids[:-QUERIES], sparse=trial.arm.sparse, max_tokens=TOKENS) as walk:
        walk.read_prompt()
        for token in passage.token_ids[-QUERIES:]:
            walk.step(token)
        said = walk.report.kept_mass
    recall = measure_recall(llm, passage, trial=trial, queries=QUERIES)
    (row,) = recall_rows(recall, passage, trial=trial)
    assert said is not None
    assert row.estimate == pytest.approx(said.mean, abs=1e-5)
    assert row.estimate_bias == pytest.approx(row.estimate - row.kept_mass, abs=2e-6)
    assert 0 < abs(row.estimate_bias) <= row.estimate_mae < 0.2
    by_head = list(recall_rows(recall, passage, trial=trial, by="head"))
    mean = np.mean([head.estimate_mae for head in by_head])
    assert mean == pytest.approx(row.estimate_mae, abs=2e-6)
    trial = trial_of("sparse:k=4,selector=even")
    (row,) = recall_rows(measure_recall(llm, passage, trial=trial), passage, trial=trial)
    assert (row.estimate, row.estimate_mae, row.estimate_bias) == (None, None, None)


def test_the_oracle_keeps_what_it_says(llm: LLM, passage: Passage) -> None:
    """One selection per head, from true masses; the best blocks do without guards."""
    rows = {}
    for selector in ("oracle", "random"):
        trial = trial_of(f"sparse:k=4,selector={selector}")
        (rows[selector],) = recall_rows(
            measure_recall(llm, passage, trial=trial), passage, trial=trial
        )
    row = rows["oracle"]
    assert row.estimate == pytest.approx(row.kept_mass, abs=1e-3)
    assert row.estimate_mae is not None
    assert row.estimate_mae < 3e-3  # queries are kept in 8 bits, and measured in 32
    assert rows["random"].kept_mass < row.kept_mass <= row.oracle_mass + 1e-6


def test_the_error_of_an_estimate_by_hand() -> None:
    rest = dict.fromkeys(("oracle", "error", "blocks"), np.zeros((1, 2)))
    first = LayerRecall(kept=np.array([[0.5, 0.9]]), estimate=np.array([[0.6, 0.8]]), **rest)
    second = LayerRecall(kept=np.array([[0.4, 0.2]]), estimate=np.array([[0.7, 0.3]]), **rest)
    assert estimate_error([first, second]) == pytest.approx((0.6, 0.15, 0.1))
    assert estimate_error([LayerRecall(kept=np.zeros((1, 2)), **rest)]) == (None, None, None)


def test_bytes_read_to_choose_and_to_attend(llm: LLM, passage: Passage) -> None:
    head_dim, kv_heads = llm.config.head_dim, llm.config.num_kv_heads
    for selector, importance in (("probe", 8 / kv_heads), ("even", 0)):
        trial = trial_of(f"sparse:k=4,selector={selector}")
        recall = measure_recall(llm, passage, trial=trial, queries=QUERIES)
        # 8 of 32 keys of 8 bits, each with an f32 scale.
        assert recall.choose_bytes == pytest.approx(8 / 32 * (head_dim + 4) + importance)
        page = 2 * 32 * (head_dim + 4)
        assert recall.density is not None
        blocks = sum(-(-(at + 1) // 32) for at in range(TOKENS - QUERIES, TOKENS)) / QUERIES
        assert recall.read_bytes == pytest.approx(recall.density * blocks * page)


def test_what_cannot_be_measured_is_refused(llm: LLM, passage: Passage) -> None:
    with pytest.raises(ConfigError, match="expected a sparse setting, got exact"):
        measure_recall(llm, passage, trial=trial_of("exact"))
    with pytest.raises(ConfigError, match="fit the budget of 10"):
        measure_recall(llm, passage, trial=trial_of("sparse:k=10"))
    with pytest.raises(ConfigError, match="expected 1 to 299 of 300 tokens"):
        measure_recall(llm, passage, trial=trial_of("sparse:k=4"), queries=300)
