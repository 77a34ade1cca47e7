import pytest

from kvsieve.engine.llm import LLM
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.passkey import is_hit, run_passkey


@pytest.mark.parametrize(
    ("reply", "hit"),
    [
        (" 71432. Remember", True),
        ("71432", True),
        (" the key: 71432!", True),
        (" 714321", False),
        (" 7143", False),
        (" 1. 71432", False),
        (" 71 432", False),
        ("", False),
    ],
)
def test_hit_means_that_the_first_number_is_the_key(reply: str, hit: bool) -> None:
    assert is_hit(reply, "71432") is hit


def test_rows_say_what_was_asked_and_what_ran(llm: LLM) -> None:
    heard: list[str] = []
    arms = parse_arms(["exact", "sparse:k=4,tail=0", "sparse:k=50"])
    rows = list(
        run_passkey(llm, arms=arms, lengths=[400], depths=[0.5], max_tokens=3, on_run=heard.append)
    )
    assert [row.attn for row in rows] == [arm.label for arm in arms]
    assert len(heard) == 3
    exact, sparse, roomy = rows
    assert len({(row.key, row.prompt_tokens, row.depth, row.length) for row in rows}) == 1
    assert 350 < exact.prompt_tokens <= exact.length == 400
    assert (exact.mode, exact.density, exact.exact_because) == ("exact", 1.0, None)
    assert sparse.mode == "sparse"
    assert sparse.exact_because is None
    assert sparse.density is not None
    assert 0 < sparse.density < 1
    assert sparse.blocks_read == pytest.approx(sparse.density * exact.blocks_read)
    assert roomy.mode == "exact"
    assert "fit the budget of 50" in (roomy.exact_because or "")
    assert (roomy.answer, roomy.blocks_read) == (exact.answer, exact.blocks_read)


def test_blocks_read_exactly_counts_every_causal_block(llm: LLM) -> None:
    (row,) = run_passkey(llm, arms=parse_arms(["exact"]), lengths=[200], depths=[0.5], max_tokens=3)
    # The last token sampled never goes through the model.
    steps = row.prompt_tokens + 2
    per_head = sum(position // 32 + 1 for position in range(steps))
    assert row.blocks_read == per_head * llm.config.num_kv_heads * llm.config.num_layers


def test_a_prompt_beyond_the_context_stops_it_before_the_first_run(llm: LLM) -> None:
    heard: list[str] = []
    rows = run_passkey(
        llm, arms=parse_arms(["exact"]), lengths=[100, 540], depths=[0.5], on_run=heard.append
    )
    with pytest.raises(CapacityError, match=r"at most 532 tokens .* context of 544, got 540"):
        next(rows)
    assert not heard


def test_nothing_to_ask_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        next(run_passkey(llm, arms=[], lengths=[100], depths=[0.5]))
