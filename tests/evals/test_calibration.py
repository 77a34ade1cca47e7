import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.errors import ConfigError
from kvsieve.evals.calibration import (
    LayerProfile,
    Profile,
    budgets,
    calibrate,
    check_writable,
    layer_profiles,
    profile_path,
    with_budget,
    worst_layers,
)
from kvsieve.evals.recall import LayerRecall, Recall

SPARSE = SparseAttention(k=3, selector="even")


def recall(**kept: list[list[float]]) -> Recall:
    """Kept mass ``[heads, queries]`` by layer: ``l0=..., l2=...``."""
    layers = {
        int(name[1:]): LayerRecall(
            **dict.fromkeys(("kept", "oracle", "error", "blocks"), np.array(rows))
        )
        for name, rows in kept.items()
    }
    return Recall(layers=layers, num_layers=9, choose_bytes=0.0, read_bytes=None, density=None)


def test_a_layer_is_the_mean_over_texts_heads_and_queries() -> None:
    one = recall(l0=[[0.2, 0.4], [0.6, 0.8]], l1=[[1.0, 1.0], [1.0, 1.0]])
    two = recall(l0=[[0.0, 0.2], [1.0, 1.0]])
    (layer,) = layer_profiles([one, two])  # layer 1 was exact in one text
    assert layer.layer == 0
    assert layer.kept_mass == pytest.approx(4.2 / 8)
    assert layer.heads == pytest.approx((0.2, 0.85))
    values = [0.2, 0.4, 0.6, 0.8, 0.0, 0.2, 1.0, 1.0]
    assert layer.kept_mass_p5 == pytest.approx(np.percentile(values, 5), abs=1e-4)


@pytest.mark.parametrize(
    ("min_mass", "at_most", "expected"),
    [(0.8, 9, (1, 2, 4)), (0.8, 2, (1, 4)), (0.8, 0, ()), (0.1, 9, ()), (0.7, 1, (4,))],
)
def test_the_worst_layers_under_the_limit_stay_exact(
    min_mass: float, at_most: int, expected: tuple[int, ...]
) -> None:
    masses = (0.9, 0.6, 0.7, 0.95, 0.5)
    layers = [
        LayerProfile(layer=i, kept_mass=mass, kept_mass_p5=0.0, heads=(mass,))
        for i, mass in enumerate(masses)
    ]
    assert worst_layers(layers, min_mass=min_mass, at_most=at_most) == expected


def layer(number: int, kept: float, *by_budget: tuple[int, float]) -> LayerProfile:
    return LayerProfile(
        layer=number, kept_mass=kept, kept_mass_p5=0.0, heads=(kept,), by_budget=by_budget
    )


def test_a_layer_gets_the_least_blocks_that_help_and_the_hopeless_stay_exact() -> None:
    layers = [
        layer(0, 0.9, (64, 0.95), (128, 0.99)),
        layer(1, 0.7, (64, 0.81), (128, 0.9)),
        layer(2, 0.5, (64, 0.6), (128, 0.8)),
        layer(3, 0.3, (64, 0.4), (128, 0.5)),
        layer(4, 0.4, (64, 0.5), (128, 0.7)),
    ]
    for at_most, exact, more in (
        (5, (3, 4), ((1, 64), (2, 128))),
        (1, (3,), ((1, 64), (2, 128), (4, 128))),
        (0, (), ((1, 64), (2, 128), (3, 128), (4, 128))),
    ):
        assert worst_layers(layers, min_mass=0.8, at_most=at_most) == exact
        assert budgets(layers, min_mass=0.8, exact_layers=exact) == more
    assert budgets([layer(0, 0.5)], min_mass=0.8, exact_layers=()) == ()  # only one was measured


def test_another_budget_stands_beside_the_first() -> None:
    layers = [layer(0, 0.5), layer(2, 0.6)]
    layers = with_budget(layers, replace(SPARSE, k=8), [layer(0, 0.7), layer(2, 0.9)])
    layers = with_budget(layers, replace(SPARSE, k=16), [layer(0, 0.8)])  # layer 2 read everything
    assert [one.by_budget for one in layers] == [((8, 0.7), (16, 0.8)), ((8, 0.9), (16, 1.0))]
    assert [one.kept_mass for one in layers] == [0.5, 0.6]
    # What a layer read is noted, not what the others did.
    first = SparseAttention(k=8, selector="anchors", first_layer=4)
    layers = with_budget([layer(0, 0.5), layer(2, 0.6)], first, [layer(0, 0.7), layer(2, 0.9)])
    assert [one.by_budget for one in layers] == [((32, 0.7),), ((8, 0.9),)]


@pytest.fixture(scope="module")
def profile(llm: LLM) -> Profile:
    return calibrate(llm, SPARSE, length=250, queries=6, min_mass=1.0, max_exact=0.5)


def test_a_profile_says_what_it_was_measured_with(llm: LLM, profile: Profile) -> None:
    assert (profile.fingerprint, profile.cache_type) == (llm.info.fingerprint, "q8_0")
    assert (profile.attn, profile.setting) == ("sparse:k=3,selector=even", "B")
    assert profile.texts[0] == "templated:0"
    assert profile.texts[1].startswith("natural:")
    assert [layer.layer for layer in profile.layers] == [0, 1]
    worst = min(profile.layers, key=lambda layer: layer.by_budget[-1][1])
    assert profile.exact_layers == (worst.layer,)
    assert all(len(layer.heads) == llm.config.num_q_heads for layer in profile.layers)
    # 250 tokens hold 6 blocks beside those of the queries, not 12.
    assert all([k for k, _ in layer.by_budget] == [6] for layer in profile.layers)
    assert all(layer.by_budget[0][1] > layer.kept_mass for layer in profile.layers)
    assert profile.layer_k == ((1 - worst.layer, 6),)
    assert profile.sparse["k"] == 3


def test_it_fits_the_run_that_it_was_measured_for_alone(llm: LLM, profile: Profile) -> None:
    def misfit(sparse: SparseAttention = SPARSE, **other: str) -> str:
        about = {"fingerprint": llm.info.fingerprint, "cache_type": "q8_0", **other}
        return profile.misfit(sparse, **about) or ""

    assert misfit() == ""
    assert misfit(replace(SPARSE, dense_tail=0, warn_mass=0.0, phase="decode")) == ""
    assert misfit(fingerprint="0" * 16).startswith(f"expected a profile of this model ({'0' * 16})")
    assert "for a q4_0 cache, got one for q8_0" in misfit(cache_type="q4_0")
    assert "selector=window, got one measured with selector=even" in misfit(
        replace(SPARSE, selector="window")
    )
    assert "k=4, got one measured with k=3" in misfit(replace(SPARSE, k=4))
    taken = profile.applied(replace(SPARSE, dense_tail=7), name="x.json")
    assert (taken.exact_layers, taken.layer_k) == (profile.exact_layers, profile.layer_k)
    assert (taken.profile, taken.dense_tail, taken.k) == ("x.json", 7, 3)


def test_it_comes_back_from_its_file_and_bad_files_are_named(
    profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "model.sparse.json"
    profile.write(path)
    assert Profile.read(path) == profile
    assert json.loads(path.read_text())["format"] == 2
    good = json.loads(path.read_text())
    for broken in (
        "not json",
        "[]",
        json.dumps({**good, "format": 1}),
        json.dumps({key: value for key, value in good.items() if key != "fingerprint"}),
        json.dumps({**good, "exact_layers": [7]}),
        json.dumps({**good, "layer_k": [[7, 8]]}),
        json.dumps({**good, "layer_k": [[0, 0]]}),
        json.dumps({**good, "layer_k": [[0, 8, 9]]}),
        json.dumps({**good, "layer_k": [3]}),
        json.dumps({**good, "sparse": {"no_such_field": 1}}),
        json.dumps({**good, "exact_layers": 1}),
        json.dumps({**good, "layers": [{"layer": 0}]}),
    ):
        path.write_text(broken)
        with pytest.raises(ConfigError, match=r"model.sparse.json: expected"):
            Profile.read(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        Profile.read(tmp_path / "missing.json")


def test_where_it_lies_and_whether_it_can(tmp_path: Path) -> None:
    assert profile_path(Path("a/Model.Q4_1.gguf")) == Path("a/Model.Q4_1.sparse.json")
    folder = tmp_path / "Model-0.5B"
    folder.mkdir()
    assert profile_path(folder) == tmp_path / "Model-0.5B.sparse.json"
    check_writable(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="--out: expected a file that can be written"):
        check_writable(tmp_path / "no" / "x.json")


def test_what_cannot_be_calibrated_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="fit the budget of 16"):
        calibrate(llm, replace(SPARSE, k=16), length=250, queries=6)
    with pytest.raises(ConfigError, match=r"expected no exact_layers and no layer_k.*\(0,\)"):
        calibrate(llm, replace(SPARSE, exact_layers=(0,)), length=250, queries=6)
    with pytest.raises(ConfigError, match="min_mass: expected a share"):
        calibrate(llm, SPARSE, length=250, queries=6, min_mass=1.5)
