import pytest

from kvsieve.engine.outputs import AttentionReport, BlockReads
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.settings import trials


def report(mode: str, prefill: tuple[int, int], decode: tuple[int, int]) -> AttentionReport:
    reads = [BlockReads(attended=a, causal=c, queries=1) for a, c in (prefill, decode)]
    return AttentionReport(
        mode=mode,  # type: ignore[arg-type]
        selector="even",
        share="head",
        k=4,
        block_size=32,
        prefill=reads[0],
        decode=reads[1],
        exact_because=None,
    )


def test_each_setting_says_where_an_arm_is_sparse_and_exact_runs_once() -> None:
    found = trials(parse_arms(["exact", "sparse:k=8"]), ["A", "B", "C"])
    assert [(one.name, one.arm.sparse and one.arm.sparse.phase) for one in found] == [
        ("exact", None),
        ("sparse:k=8 (A)", "decode"),
        ("sparse:k=8 (B)", "decode"),
        ("sparse:k=8 (C)", "both"),
    ]
    # 90 tokens of context, 10 of question: only B decodes the question.
    assert [one.prompt_len(100, 90) for one in found] == [100, 100, 90, 100]


@pytest.mark.parametrize("settings", [[], ["D"], ["B", "B"]])
def test_settings_are_different_ones_of_three(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match="different ones of A, B, C"):
        trials(parse_arms(["exact"]), settings)


def test_an_arm_may_not_choose_its_phase() -> None:
    with pytest.raises(ConfigError, match="no phase beside a setting"):
        trials(parse_arms(["sparse:phase=decode"]), ["B"])


def test_only_blocks_left_out_count_as_sparse() -> None:
    exact, b, c = trials(parse_arms(["exact", "sparse:k=4"]), ["B", "C"])
    exact.check_sparse(report("exact", (9, 9), (9, 9)))
    b.check_sparse(report("sparse", (9, 9), (5, 9)))
    c.check_sparse(report("sparse", (5, 9), (9, 9)))
    for trial, ran in (
        (b, report("exact", (9, 9), (9, 9))),
        (b, report("sparse", (5, 9), (9, 9))),
        (c, report("sparse", (9, 9), (9, 9))),
    ):
        with pytest.raises(ConfigError, match="expected sparse attention, got exact"):
            trial.check_sparse(ran)
