"""Selectors: rules that say which blocks a query reads.

A selector is a frozen dataclass with one verb, `score`. The gate, the guards, the budget, the
choice of the best and the packing into a `BlockMask` live once, in `base`.
"""
