from kvsieve.evals.arms import Arm
from kvsieve.evals.bench import BenchRow, DepthResult
from kvsieve.evals.tables import decode_table, prefill_table


def row(*, ms: float, attention: float, select: float, dense: float) -> BenchRow:
    return BenchRow(
        test="",
        attn="",
        cache_type="q8_0",
        threads=2,
        ms=ms,
        ms_stddev=0.0,
        tokens_per_second=1.0,
        attention_ms=attention,
        select_ms=select,
        dense_ms=dense,
        density=1.0,
    )


def result(attn: str, *, depth: int, prefill: BenchRow, decode: BenchRow) -> DepthResult:
    return DepthResult(depth=depth, arm=Arm.parse(attn), prefill=prefill, decode=decode)


EXACT = result(
    "exact",
    depth=4096,
    prefill=row(ms=2000, attention=1200, select=0, dense=780),
    decode=row(ms=10.0, attention=7.0, select=0.0, dense=2.5),
)
SPARSE = result(
    "sparse:k=32",
    depth=4096,
    prefill=row(ms=1500, attention=500, select=150, dense=790),
    decode=row(ms=4.0, attention=1.0, select=0.5, dense=2.4),
)


def test_prefill_puts_exact_beside_sparse() -> None:
    # Attention as the original counts it, with selection: (500 + 150) / 1500.
    assert prefill_table([EXACT, SPARSE]).splitlines()[2:] == [
        "| 4096 | sparse:k=32 | 2.000 s | 1.500 s | 39.0 % / 60.0 % | 52.7 % / 43.3 % | -25.0 % |"
    ]


def test_decode_puts_exact_beside_sparse() -> None:
    assert decode_table([EXACT, SPARSE]).splitlines()[2:] == [
        "| 4096 | sparse:k=32 | 7.00 | 1.50 | 10.00 | 4.00 |"
    ]


def test_pairs_stay_within_a_depth_and_exact_stands_alone_without_sparse() -> None:
    near = result("exact", depth=512, prefill=EXACT.prefill, decode=EXACT.decode)
    lines = decode_table([near, EXACT, SPARSE]).splitlines()[2:]
    assert lines[0] == "| 512 |  | 7.00 |  | 10.00 |  |"
    assert len(lines) == 2
