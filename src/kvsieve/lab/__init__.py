"""See why sparse attention works, and what it costs, before running it.

`arithmetic` has the formulas, `ledger` puts them side by side for a model, `prediction` puts times
to them; `experiment` is a run small enough to print, and `checks` what must hold of it.
"""

from kvsieve.lab.arithmetic import (
    attention_flop,
    attention_speedup_ratio,
    causal_pairs,
    loaded_tokens,
    other_ms,
    reach_tokens,
    score_flop,
    vector_bytes,
    whole_speedup_ratio,
    window_pairs,
)
from kvsieve.lab.ledger import BreakEven, Costs, Ledger, break_even, ledger
from kvsieve.lab.reading import Rule
from kvsieve.lab.shape import ModelShape
from kvsieve.lab.speedup import PartTimes, Rest

__all__ = [
    "BreakEven",
    "Costs",
    "Ledger",
    "ModelShape",
    "PartTimes",
    "Rest",
    "Rule",
    "attention_flop",
    "attention_speedup_ratio",
    "break_even",
    "causal_pairs",
    "ledger",
    "loaded_tokens",
    "other_ms",
    "reach_tokens",
    "score_flop",
    "vector_bytes",
    "whole_speedup_ratio",
    "window_pairs",
]
