"""The two tables of the original system's report: exact beside sparse, by depth, in Markdown."""

from collections.abc import Iterable, Sequence

from kvsieve.evals.bench import BenchRow, DepthResult
from kvsieve.evals.results import markdown_row, readable

_Pair = tuple[DepthResult, DepthResult | None]


def prefill_table(results: Sequence[DepthResult]) -> str:
    """Reading the prompt: total time, its GEMM and attention shares, and what sparse changed.

    GEMM is the dense work; attention includes choosing the blocks, as the original counts it.
    """
    header = ["n", "sparse", "exact total", "sparse total", "exact GEMM / attention"]
    header += ["sparse GEMM / attention", "change"]
    rows = []
    for exact, sparse in _pairs(results):
        a = exact.prefill
        b = sparse.prefill if sparse else None
        change = f"{(b.ms / a.ms - 1) * 100:+.1f} %" if b else ""
        totals = [f"{row.ms / 1e3:.3f} s" if row else "" for row in (a, b)]
        rows.append([str(exact.depth), _name(sparse), *totals, _shares(a), _shares(b), change])
    return _table(header, rows)


def decode_table(results: Sequence[DepthResult]) -> str:
    """Per decoded token: attention (choosing the blocks included) and total time."""
    header = ["n", "sparse", "exact attention ms/token", "sparse attention ms/token"]
    header += ["exact total ms/token", "sparse total ms/token"]
    rows = []
    for exact, sparse in _pairs(results):
        arms = [exact.decode, sparse.decode if sparse else None]
        attention = [readable(arm.attention_ms + arm.select_ms) if arm else "" for arm in arms]
        totals = [readable(arm.ms) if arm else "" for arm in arms]
        rows.append([str(exact.depth), _name(sparse), *attention, *totals])
    return _table(header, rows)


def _pairs(results: Sequence[DepthResult]) -> Iterable[_Pair]:
    """Each sparse result beside the exact one of its depth; exact alone where nothing is sparse."""
    for exact in (result for result in results if result.arm.sparse is None):
        others: list[DepthResult | None] = [
            other
            for other in results
            if other.depth == exact.depth and other.arm.sparse is not None
        ]
        yield from ((exact, other) for other in others or [None])


def _name(result: DepthResult | None) -> str:
    return result.arm.label if result else ""


def _shares(row: BenchRow | None) -> str:
    if row is None:
        return ""
    attention = (row.attention_ms + row.select_ms) / row.ms
    return f"{row.dense_ms / row.ms * 100:.1f} % / {attention * 100:.1f} %"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(markdown_row(line) for line in lines)
