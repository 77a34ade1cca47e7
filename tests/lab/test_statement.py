"""What the lines say: the numbers of the lesson, exact beside sparse."""

from dataclasses import replace

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.lab.kernel_times import ContextTime, KernelTime
from kvsieve.lab.ledger import BreakEven, ledger
from kvsieve.lab.prediction import KernelCost, Measured, TimeModel
from kvsieve.lab.reading import Rule
from kvsieve.lab.shape import ModelShape
from kvsieve.lab.speedup import PartTimes, Rest
from kvsieve.lab.statement import (
    break_even_lines,
    explanation_lines,
    ledger_lines,
    measured_lines,
    part_lines,
    rest_lines,
)

ONE_HEAD = ModelShape(head_dim=128, k_type="bf16", v_type="bf16")
SCAN = Rule(sparse=SparseAttention(selector="even"), scan_dims=16)


def row(lines: list[str], label: str, table: int = 0) -> list[str]:
    found = [line for line in lines if line.strip().startswith(label)]
    return found[table].strip().removeprefix(label).split()


def test_the_table_of_one_head() -> None:
    lines = ledger_lines(ledger(ONE_HEAD, SCAN, n_tokens=32768))
    assert row(lines, "FLOP, attention") == ["16,777,216", "524,288", "32.00x"]
    assert row(lines, "bytes, cache") == ["16", "MiB", "512", "KiB", "32.00x"]
    assert row(lines, "bytes, index") == ["0", "B", "1", "MiB", "-"]
    assert "scan of 16 dimensions, 32 of 1,024 blocks of 32" in lines[2]


def test_the_table_of_a_window() -> None:
    lines = ledger_lines(ledger(ONE_HEAD, Rule(window_tokens=256), n_tokens=4096))
    assert row(lines, "pairs per head and layer", 1) == ["8,390,656", "1,015,936", "8.26x"]
    assert lines[2].endswith("a window of 256 tokens")


def test_the_head_has_the_bytes_of_the_cache() -> None:
    shape = ModelShape(head_dim=128, num_q_heads=16, num_kv_heads=8, num_layers=28)
    rule = Rule(sparse=SparseAttention())
    lines = ledger_lines(ledger(shape, rule, n_tokens=8192))
    assert "q8_0: 2,112 bytes per token and layer; at 8,192 tokens 17.3 MB per layer" in lines[1]
    short = ledger_lines(ledger(shape, rule, n_tokens=1000))
    assert short[2].endswith("all fit: exact")
    assert row(short, "FLOP, all")[2] == "1.00x"
    mixed = ModelShape(head_dim=128, v_type="q4_0")
    assert "q8_0/q4_0" in ledger_lines(ledger(mixed, rule, n_tokens=10))[1]


def test_formulas_come_with_their_numbers() -> None:
    text = "\n".join(explanation_lines(ledger(ONE_HEAD, SCAN, n_tokens=32768)))
    assert "4 d Hq L pairs = 4 x 128 x 1 x 1 x 1,024" in text
    assert "(k - 1) S + n - S (N - 1) = 31 x 32 + 32" in text
    assert "n (n + 1) / 2 = 536,887,296" in text
    assert "importance" not in text
    rule = Rule(sparse=SparseAttention(selector="probe"))
    probe = ledger(ModelShape(head_dim=128), rule, n_tokens=4096)
    assert "8 n L of importance" in "\n".join(explanation_lines(probe))
    window = ledger(ONE_HEAD, Rule(window_tokens=256), n_tokens=4096)
    assert "min(n, w) = 256 tokens" in "\n".join(explanation_lines(window))
    short = ledger(ONE_HEAD, Rule(sparse=SparseAttention()), n_tokens=100)
    assert "all 4 blocks fit the budget: exact" in "\n".join(explanation_lines(short))


def test_break_even() -> None:
    found = BreakEven(
        token_bytes_at_tokens=1153, token_flop_at_tokens=None, prompt_flop_at_tokens=7
    )
    lines = break_even_lines(found)
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "1,153 tokens", "never", "7 tokens",
    ]  # fmt: skip


def test_times_that_got_better() -> None:
    times = PartTimes(attention_ms=2, select_ms=0.35, gather_ms=0.25, sparse_ms=0.5, other_ms=6)
    text = "\n".join(part_lines(times))
    assert "2.00 -> 1.10 ms (0.35 + 0.25 + 0.5)   1.82x, faster" in text
    assert "8.00 -> 7.10 ms   1.13x" in text
    assert "at most     1.33x" in text
    assert "break even" not in text


def test_times_that_got_worse_say_what_to_attack() -> None:
    lines = part_lines(PartTimes(attention_ms=1.4, select_ms=0.7, gather_ms=0.6, sparse_ms=0.4))
    assert lines[0].endswith("0.82x, slower")
    assert lines[-2].startswith("attack      selection first: 0.70 of 1.70 ms (41%)")
    assert lines[-1] == "to break even, 0.30 ms must go"


@pytest.mark.parametrize(
    ("rest", "verdict"),
    [
        (Rest.of([52.5, 92.3, 155.2], [9.7, 48.9, 110.7]), "constant, so only attention grows"),
        (Rest.of([50, 90], [10, 10]), "not constant"),
    ],
)
def test_what_attention_leaves(rest: Rest, verdict: str) -> None:
    assert verdict in rest_lines(rest)[1]


def test_measured_beside_predicted() -> None:
    def at(n: int, exact_us: float) -> ContextTime:
        return ContextTime(
            n_tokens=n,
            exact=KernelTime(attention_us=exact_us, select_us=0),
            sparse=KernelTime(attention_us=20, select_us=5),
        )

    shape = ModelShape(head_dim=64, num_kv_heads=1)
    model = TimeModel(
        shape=shape,
        sparse=SparseAttention(),
        exact=KernelCost(fixed_us=0, bytes_per_us=136),
        select=KernelCost(fixed_us=5, bytes_per_us=float("inf")),
        attend=KernelCost(fixed_us=20, bytes_per_us=float("inf")),
    )
    result = Measured(model=model, calibration=(at(500, 1), at(600, 2)), measured=(at(2000, 2500),))
    lines = measured_lines(result)
    assert "calibrated at 500, 600 tokens" in lines[0]
    assert lines[1].endswith("0.0 + bytes at 0.1 GB/s")
    assert lines[2].endswith("5.0 (always the same bytes)")
    # 2,000 tokens at 1 us each over 25 us, against 2,500 measured.
    assert lines[6].split() == ["2,000", "2,500", "5", "20", "100.00x", "80.00x", "-20%"]
    assert not any("busy" in line for line in lines)
    busy = replace(result, measured=(replace(at(2000, 2500), settled=False),))
    assert "  the machine is busy: the fastest steps do not agree at 2,000 tokens" in (
        measured_lines(busy)
    )
