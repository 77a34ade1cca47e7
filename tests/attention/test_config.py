"""`SparseAttention` refuses what it cannot do, and says what it expected."""

from dataclasses import FrozenInstanceError

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError


def test_defaults_are_the_original_systems() -> None:
    sparse = SparseAttention()
    assert (sparse.k, sparse.block_size, sparse.num_probes, sparse.selector) == (32, 32, 8, "probe")
    assert (sparse.share, sparse.phase, sparse.dense_tail) == ("head", "both", 128)


@pytest.mark.parametrize(
    ("selector", "phase", "expected"),
    [
        ("probe", "both", True),
        ("probe", "decode", True),
        ("probe", "prefill", False),
        ("even", "both", False),
    ],
)
def test_importance_is_recorded_only_for_who_reads_it(
    selector: str, phase: str, expected: bool
) -> None:
    assert SparseAttention(selector=selector, phase=phase).uses_importance is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k: expected an integer of at least 1, got 0"),
        ({"k": -1}, "k: .*got -1"),
        ({"k": 1.5}, "k: .*got 1.5"),
        ({"k": True}, "k: .*got True"),
        ({"k": "8"}, "k: .*got '8'"),
        ({"k": 2**31}, "k: expected an integer of at most 2147483647, got 2147483648"),
        ({"block_size": 2**40}, "block_size: expected an integer of at most 2147483647"),
        ({"block_size": 31}, "block_size: expected an integer of at least 32"),
        ({"block_size": 48}, "block_size: expected 32 or a multiple of it, got 48"),
        ({"num_probes": 0}, "num_probes: expected an integer of at least 1"),
        ({"num_probes": 33}, "num_probes: expected at most block_size=32"),
        ({"dense_tail": -1}, "dense_tail: expected an integer of at least 0"),
        ({"selector": "best"}, "selector: expected one of probe, even, got 'best'"),
        ({"share": "layer"}, "share: expected one of head, group"),
        ({"phase": "never"}, "phase: expected one of both, prefill, decode"),
    ],
)
def test_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[SparseAttention\] {message}"):
        SparseAttention(**options)  # type: ignore[arg-type]


def test_accepted_extremes() -> None:
    SparseAttention(k=2**31 - 1, block_size=4096, num_probes=4096, dense_tail=0)


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SparseAttention().k = 3  # type: ignore[misc]
