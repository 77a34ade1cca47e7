"""Questions asked of the tiny model: rows, settings, and arms that only pretend to be sparse."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.outputs import AttentionReport
from kvsieve.engine.walk import Walk
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals.answers import ask, log_softmax, make_prompt, run_answers
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.settings import trials
from kvsieve.evals.tasks import TaskPrompt


def test_log_softmax_of_hand_values() -> None:
    got = log_softmax(np.log(np.array([1, 2, 5], np.float32)) + np.float32(1000))
    assert np.exp(got) == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=1e-4)


def test_rows_say_what_was_asked_in_which_setting_and_what_ran(llm: LLM) -> None:
    heard: list[str] = []
    asked = trials(parse_arms(["exact", "sparse:k=4,tail=0,selector=even"]), ["A", "B", "C"])
    rows = list(
        run_answers(
            llm, task="passkey", trials=asked, lengths=[400], depths=[0.5], on_run=heard.append
        )
    )
    assert [(row.setting, row.mode) for row in rows] == [
        ("any", "exact"), ("A", "sparse"), ("B", "sparse"), ("C", "sparse"),
    ]  # fmt: skip
    assert heard[0] == "400 tokens, depth 0.5, exact"
    assert heard[2] == "400 tokens, depth 0.5, sparse:k=4,tail=0,selector=even (B)"
    assert len({(row.expected, row.prompt_tokens, row.depth, row.length) for row in rows}) == 1
    exact, a, b, c = rows
    assert 350 < exact.prompt_tokens <= exact.length == 400
    assert exact.density == 1.0
    # A reads the prompt exactly, B all but the question, C next to nothing of it.
    assert a.density is not None
    assert b.density is not None
    assert c.density is not None
    assert 1 > a.density > b.density > c.density
    assert all(row.logprob < 0 for row in rows)


def test_the_logprob_is_that_of_the_right_answer_after_the_prompt(llm: LLM) -> None:
    (trial,) = trials(parse_arms(["exact"]), ["B"])
    prompt = make_prompt(llm, task="passkey", length=300, depth=0.2, seed=3)
    row = ask(llm, prompt, trial=trial, length=300, seed=3)
    answer = llm.tokenizer.encode(" " + prompt.expected, add_special=False)
    logits = llm.logits(prompt.token_ids + answer)[len(prompt.token_ids) - 1 : -1]
    wide = logits.astype(np.float64)
    chosen = wide[np.arange(len(answer)), answer] - np.log(np.exp(wide).sum(axis=1))
    assert row.logprob == pytest.approx(chosen.mean(), abs=1e-5)
    assert row.top1 == pytest.approx((logits.argmax(axis=1) == answer).mean(), abs=1e-4)


def test_a_sparse_arm_that_would_stay_exact_stops_it_before_the_first_run(llm: LLM) -> None:
    heard: list[str] = []
    asked = trials(parse_arms(["exact", "sparse:k=10"]), ["B"])
    options = {"task": "passkey", "trials": asked, "lengths": [200, 420], "depths": [0.5]}
    with pytest.raises(
        ConfigError, match=r"sparse:k=10 \(B\): .*all 7 blocks fit the budget of 10"
    ):
        next(run_answers(llm, **options, on_run=heard.append))
    assert not heard
    rows = list(run_answers(llm, **options, skip_exact=True))
    assert [(row.length, row.mode) for row in rows] == [
        (200, "exact"), (420, "exact"), (420, "sparse"),
    ]  # fmt: skip


def test_an_arm_that_ran_exact_all_the_same_is_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is what was planned; the blocks read are the evidence."""
    honest = Walk.report.fget
    assert honest is not None

    def everything(self: Walk) -> AttentionReport:
        report = honest(self)
        decode = replace(report.decode, attended=report.decode.causal)
        return replace(report, decode=decode)

    monkeypatch.setattr(Walk, "report", property(everything))
    (trial,) = trials(parse_arms(["sparse:k=4"]), ["B"])
    prompt = make_prompt(llm, task="passkey", length=300, depth=0.2, seed=0)
    with pytest.raises(ConfigError, match="expected sparse attention, got exact: every block"):
        ask(llm, prompt, trial=trial, length=300, seed=0)


def test_a_prompt_beyond_the_context_stops_it_before_the_first_run(llm: LLM) -> None:
    heard: list[str] = []
    asked = trials(parse_arms(["exact"]), ["B"])
    rows = run_answers(
        llm, task="passkey", trials=asked, lengths=[100, 540], depths=[0.5], on_run=heard.append
    )
    with pytest.raises(CapacityError, match=r"at most 532 tokens .* context of 544, got 540"):
        next(rows)
    assert not heard


def test_nothing_to_ask_and_unknown_tasks_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        next(run_answers(llm, task="passkey", trials=[], lengths=[100], depths=[0.5]))
    with pytest.raises(ConfigError, match="passkey, kv, vartrack, copy, got 'riddle'"):
        make_prompt(llm, task="riddle", length=100, depth=0.5, seed=0)


def test_a_model_that_ends_at_once_is_still_asked_for_the_right_answer(llm: LLM) -> None:
    prompt = make_prompt(llm, task="passkey", length=300, depth=0.2, seed=0)
    silent = TaskPrompt(**{**prompt.__dict__, "reply_tokens": 0})
    (trial,) = trials(parse_arms(["sparse:k=4"]), ["A"])
    row = ask(llm, silent, trial=trial, length=300, seed=0)
    assert (row.answer, row.hit, row.mode) == ("", False, "sparse")
