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
    calibrate,
    check_writable,
    layer_profiles,
    profile_path,
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


@pytest.fixture(scope="module")
def profile(llm: LLM) -> Profile:
    return calibrate(llm, SPARSE, length=250, queries=6, min_mass=1.0, max_exact=0.5)


def test_a_profile_says_what_it_was_measured_with(llm: LLM, profile: Profile) -> None:
    assert (profile.fingerprint, profile.cache_type) == (llm.info.fingerprint, "q8_0")
    assert (profile.attn, profile.setting) == ("sparse:k=3,selector=even", "B")
    assert profile.texts[0] == "templated:0"
    assert profile.texts[1].startswith("natural:")
    assert [layer.layer for layer in profile.layers] == [0, 1]
    worst = min(profile.layers, key=lambda layer: layer.kept_mass)
    assert profile.exact_layers == (worst.layer,)
    assert all(len(layer.heads) == llm.config.num_q_heads for layer in profile.layers)


def test_it_comes_back_from_its_file_and_bad_files_are_named(
    profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "model.sparse.json"
    profile.write(path)
    assert Profile.read(path) == profile
    assert json.loads(path.read_text())["format"] == 1
    good = json.loads(path.read_text())
    for broken in (
        "not json",
        "[]",
        json.dumps({**good, "format": 2}),
        json.dumps({key: value for key, value in good.items() if key != "fingerprint"}),
        json.dumps({**good, "exact_layers": [7]}),
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
    check_writable(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="--out: expected a file that can be written"):
        check_writable(tmp_path / "no" / "x.json")


def test_what_cannot_be_calibrated_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="fit the budget of 16"):
        calibrate(llm, replace(SPARSE, k=16), length=250, queries=6)
    with pytest.raises(ConfigError, match="min_mass: expected a share"):
        calibrate(llm, SPARSE, length=250, queries=6, min_mass=1.5)
