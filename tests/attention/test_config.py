"""`SparseAttention` refuses what it cannot do, and says what it expected."""

from dataclasses import FrozenInstanceError

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError


def test_defaults_are_the_measured_ones_and_the_original_systems_budget() -> None:
    sparse = SparseAttention()
    assert (sparse.k, sparse.block_size, sparse.num_probes) == (32, 32, 8)
    assert (sparse.selector, sparse.share, sparse.phase) == ("anchors", "auto", "both")
    assert sparse.dense_tail == 256


def test_a_group_chooses_together_where_blocks_are_many() -> None:
    assert SparseAttention(k=32).sharing == "group"
    assert SparseAttention(k=31).sharing == "head"
    assert SparseAttention(k=32, selector="probe").sharing == "head"
    assert SparseAttention(mass=0.9).sharing == "head"
    assert SparseAttention(k=4, share="group").sharing == "group"
    assert SparseAttention(k=64, share="head").sharing == "head"
    # Layer 0 has 32 blocks there, and still chooses as all others do.
    of_layer = SparseAttention(k=8).of_layer(0)
    assert of_layer is not None
    assert (of_layer.k, of_layer.sharing) == (32, "head")


def test_the_first_layer_has_a_larger_budget_under_anchors_alone() -> None:
    assert SparseAttention(k=8).layer_budgets == ((0, 32),)
    assert SparseAttention(k=8, layer_k=((3, 9),)).layer_budgets == ((0, 32), (3, 9))
    assert SparseAttention(k=8, layer_k=((0, 9),)).layer_budgets == ((0, 9),)
    assert SparseAttention(k=8, exact_layers=(0,)).layer_budgets == ()
    assert SparseAttention(k=8, first_layer=1).layer_budgets == ()
    assert SparseAttention(k=8, selector="probe").layer_budgets == ()
    assert SparseAttention(mass=0.9).layer_budgets == ()
    assert SparseAttention(k=2**30).layer_budgets == ((0, 2**31 - 1),)


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
        (
            {"selector": "best"},
            "selector: expected one of probe, even, anchors, minmax, mean, meanstd, window, "
            "oracle, random, got 'best'",
        ),
        ({"share": "layer"}, "share: expected one of auto, head, group"),
        ({"seed": -1, "selector": "random"}, "seed: expected an integer of at least 0, got -1"),
        ({"seed": 1}, "seed: expected selector random, got anchors"),
        ({"mass": 0.9, "selector": "minmax"}, "mass: expected selector anchors, .* got minmax"),
        ({"warn_mass": 0.5, "selector": "mean"}, "warn_mass: expected selector anchors, .* mean"),
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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mass": 1.5}, "mass: expected a share, 0 to 1, got 1.5"),
        ({"mass": 0.0, "selector": "anchors"}, "mass: expected a share above 0"),
        ({"mass": 0.9, "selector": "even"}, "mass: expected selector anchors"),
        ({"warn_mass": 0.9, "selector": "even"}, "warn_mass: expected selector anchors"),
        ({"k_min": 9, "k_max": 8}, "k_min: expected at most k_max=8, got 9"),
        ({"exact_layers": [0]}, "exact_layers: expected a tuple"),
        ({"exact_layers": (-1,)}, "exact_layers: expected an integer of at least 0"),
        ({"layer_k": ((0, 0),)}, "layer_k: expected an integer of at least 1, got 0"),
        ({"layer_k": ((-1, 4),)}, "layer_k: expected an integer of at least 0, got -1"),
        ({"layer_k": (3, 4)}, r"layer_k: expected a tuple of pairs"),
        ({"layer_k": ((1, 4), (1, 5))}, "layer_k: expected each layer once"),
        ({"layer_k": ((1, 4),), "exact_layers": (1,)}, "layer_k: expected each layer once"),
        (
            {"layer_k": ((1, 4),), "mass": 0.9, "selector": "anchors"},
            "layer_k: expected no mass beside it",
        ),
    ],
)
def test_budgets_are_checked(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SparseAttention(**fields)  # type: ignore[arg-type]


def test_a_mass_budget_is_between_k_min_and_k_max() -> None:
    by_mass = SparseAttention(selector="anchors", mass=0.9, k_min=4, k_max=64, k=7)
    assert (by_mass.smallest_budget, by_mass.largest_budget) == (4, 64)
    by_blocks = SparseAttention(selector="anchors", k_min=4, k_max=64, k=7)
    assert (by_blocks.smallest_budget, by_blocks.largest_budget) == (7, 7)


def test_one_layers_setting_has_its_budget_and_no_layers() -> None:
    sparse = SparseAttention(
        k=8, selector="anchors", first_layer=4, layer_k=((2, 5),), exact_layers=(3,)
    )
    assert sparse.of_layer(3) is None
    for layer, k in ((0, 32), (1, 8), (2, 5)):
        own = sparse.of_layer(layer)
        assert own is not None
        assert (own.k, own.layer_budgets, own.exact_layers) == (k, (), ())


def test_a_layer_with_a_smaller_budget_is_the_first_to_be_sparse() -> None:
    assert SparseAttention(k=7, layer_k=((2, 5), (3, 9))).smallest_budget == 5
