import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError
from kvsieve.lab.ledger import LONGEST_TOKENS, break_even, first_context, ledger
from kvsieve.lab.reading import Rule
from kvsieve.lab.shape import ModelShape

ONE_HEAD = ModelShape(head_dim=128, k_type="bf16", v_type="bf16")
SMOLLM2 = ModelShape(head_dim=64, num_q_heads=9, num_kv_heads=3, num_layers=30)


def test_one_head_at_32768_tokens_with_a_scanned_index() -> None:
    rule = Rule(sparse=SparseAttention(selector="even", k=32), scan_dims=16)
    counted = ledger(ONE_HEAD, rule, n_tokens=32768)
    exact, sparse = counted.exact_token, counted.rule_token
    assert (exact.attention_flop, exact.cache_bytes) == (16_777_216, 16 * 2**20)
    assert (sparse.attention_flop, sparse.cache_bytes) == (524_288, 512 * 2**10)
    assert sparse.index_bytes == 2**20
    assert sparse.selection_flop == 2 * 16 * 32768
    assert (exact.selection_flop, exact.index_bytes, exact.selection_bytes) == (0, 0, 0)
    assert exact.total_bytes == exact.cache_bytes


def test_a_window_over_a_prompt_of_4096() -> None:
    counted = ledger(ONE_HEAD, Rule(window_tokens=256), n_tokens=4096)
    assert (counted.exact_prompt.pairs, counted.rule_prompt.pairs) == (8_390_656, 1_015_936)
    assert counted.rule_prompt.attention_flop == 4 * 128 * 1_015_936


def test_everything_but_pairs_is_summed_over_heads_and_layers() -> None:
    rule = Rule(sparse=SparseAttention(selector="even", share="group"))
    costs = ledger(SMOLLM2, rule, n_tokens=8192).rule_token
    assert costs.pairs == 1024
    assert costs.attention_flop == 30 * 9 * 4 * 64 * 1024
    assert costs.selection_flop == 30 * 9 * 2 * 64 * 8 * 256
    assert costs.cache_bytes == 30 * 3 * 1024 * 136
    assert costs.index_bytes == 30 * 3 * 256 * 8 * 68
    assert costs.total_flop == costs.attention_flop + costs.selection_flop
    assert costs.total_bytes == costs.cache_bytes + costs.index_bytes + costs.selection_bytes


@pytest.mark.parametrize("n", [0, LONGEST_TOKENS + 1])
def test_contexts_that_are_not_counted(n: int) -> None:
    with pytest.raises(ConfigError, match=r"\[ledger\] context: expected 1 to 1,048,576"):
        ledger(ONE_HEAD, Rule(window_tokens=1), n_tokens=n)


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("selector", ["probe", "even"])
def test_break_even_is_the_first_context_that_saves_bytes(share, selector) -> None:
    rule = Rule(sparse=SparseAttention(selector=selector, share=share))
    found = break_even(SMOLLM2, rule)

    def saves(n: int) -> bool:
        counted = ledger(SMOLLM2, rule, n_tokens=n)
        return counted.rule_token.total_bytes < counted.exact_token.total_bytes

    first = found.token_bytes_at_tokens
    assert first is not None
    assert not saves(first - 1)
    assert all(saves(n) for n in range(first, first + 500))
    assert all(saves(n) for n in range(first, 60_000, 997))


def test_break_even_of_one_head_by_hand() -> None:
    """q8_0: 264 bytes a token, a block of 8,448; choosing reads 8 keys of 132 and 8 of scores.

    With k = 2: a block left out saves 8,448, and each of N blocks costs 1,064, the list 8.
    From N = 3 (65 tokens) on, (N - 2) 8,448 > 1,064 N + 8: 8,448 > 3,200.
    """
    one = ModelShape(head_dim=128)
    rule = Rule(sparse=SparseAttention(selector="even", k=2))
    assert break_even(one, rule).token_bytes_at_tokens == 65
    # A scan of 124 16-bit dimensions reads 7,936 of 8,448 and 8 of scores per block:
    # (N - 2) 8,448 > 7,944 N + 8 from N = 34 on, that is 33 x 32 + 1 tokens.
    wide = Rule(sparse=SparseAttention(selector="even", k=2), scan_dims=124)
    assert break_even(one, wide).token_bytes_at_tokens == 33 * 32 + 1


def test_a_selector_that_reads_more_than_it_saves_never_pays() -> None:
    rule = Rule(sparse=SparseAttention(selector="even", k=2), scan_dims=132)
    assert break_even(ModelShape(head_dim=128), rule).token_bytes_at_tokens is None
    # Three heads that choose alone read three halves of f16 keys, more than keys and values once.
    f16 = ModelShape(head_dim=64, num_q_heads=3, k_type="f16", v_type="f16")
    assert (
        break_even(f16, Rule(sparse=SparseAttention(selector="even"))).token_bytes_at_tokens is None
    )
    grouped = Rule(sparse=SparseAttention(selector="even", share="group"))
    assert break_even(f16, grouped).token_bytes_at_tokens is not None


def test_break_even_of_a_prompt_saves_from_there_on() -> None:
    rule = Rule(sparse=SparseAttention(k=4, dense_tail=0))
    first = break_even(SMOLLM2, rule).prompt_flop_at_tokens
    assert first is not None
    for n in (first - 1, first, first + 40, 2 * first):
        counted = ledger(SMOLLM2, rule, n_tokens=n)
        saves = counted.rule_prompt.total_flop < counted.exact_prompt.total_flop
        assert saves == (n >= first)


@pytest.mark.parametrize("first", [1, 2, 3, 64, 65, 1000, 1024])
def test_first_context_finds_the_step(first: int) -> None:
    assert first_context(lambda n: n >= first, longest_tokens=2048) == first


def test_first_context_of_nothing_and_of_savings_that_shrink_within_a_block() -> None:
    assert first_context(lambda n: False, longest_tokens=2048) is None
    # Blocks 5 to 9 save with fewer than ten tokens in the open block, block 10 always does.
    saved = lambda n: (n - 1) // 32 >= 10 or ((n - 1) // 32 >= 5 and (n - 1) % 32 < 9)  # noqa: E731
    assert first_context(saved, longest_tokens=2048) == 321
