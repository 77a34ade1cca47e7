"""Which layers of a model lose too much when it reads only some blocks, and a file that says so.

A profile belongs to one model file: it lies beside it and carries its fingerprint.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import Arm
from kvsieve.evals.corpus import TEXT_KINDS
from kvsieve.evals.passages import check_passage, read_passage
from kvsieve.evals.recall import QUERIES, Recall, measure_recall
from kvsieve.evals.settings import trials

FORMAT = 1
SUFFIX = ".sparse.json"
"""Instead of the model file's own suffix."""

MIN_MASS = 0.8
"""A layer whose mean kept mass is under this should stay exact."""

MAX_EXACT = 0.2
"""Share of the layers that may: each costs what exact attention costs."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Kept mass of one layer: mean and 5th percentile over heads and queries; means by head."""

    layer: int
    kept_mass: float
    kept_mass_p5: float
    heads: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What calibration found, and with what.

    ``exact_layers`` are the worst layers under ``min_mass``, at most the share ``max_exact``.
    """

    model: str
    fingerprint: str
    version: str
    cache_type: str
    attn: str
    setting: str
    texts: tuple[str, ...]
    length: int
    queries: int
    min_mass: float
    max_exact: float
    exact_layers: tuple[int, ...]
    layers: tuple[LayerProfile, ...]

    def write(self, path: Path) -> None:
        """Write it as JSON, a layer a line."""
        about = {"format": FORMAT, **asdict(self)}
        layers = ",\n".join("    " + json.dumps(layer) for layer in about.pop("layers"))
        head = json.dumps(about, indent=2).removesuffix("\n}")
        path.write_text(f'{head},\n  "layers": [\n{layers}\n  ]\n}}\n', encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read what `write` wrote; ConfigError names the file and what is wrong with it."""
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            if about.pop("format") != FORMAT:
                raise ConfigError(f"[profile] {path}: expected format {FORMAT}, got another one")
            layers = tuple(
                LayerProfile(**{**layer, "heads": tuple(layer["heads"])})
                for layer in about.pop("layers")
            )
            about |= {name: tuple(about[name]) for name in ("texts", "exact_layers")}
            profile = cls(**about, layers=layers)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"[profile] {path}: expected a file that `kvsieve calibrate` wrote, got one that "
                f"reads as {type(error).__name__}: {error}"
            ) from error
        numbers = [layer.layer for layer in profile.layers]
        if not set(profile.exact_layers) <= set(numbers) or not all(
            isinstance(number, int) for number in numbers
        ):
            raise ConfigError(
                f"[profile] {path}: expected exact_layers among its {len(numbers)} layers, "
                f"got {list(profile.exact_layers)}"
            )
        return profile


def check_writable(path: Path) -> None:
    """Raise ConfigError now if the profile could not be written after all the work."""
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"[calibrate] --out: expected a file that can be written, got {path}")


def profile_path(model: Path) -> Path:
    """Where the profile of a model file lies."""
    return model.with_suffix(SUFFIX)


def calibrate(
    llm: LLM,
    sparse: SparseAttention,
    *,
    length: int,
    queries: int = QUERIES,
    min_mass: float = MIN_MASS,
    max_exact: float = MAX_EXACT,
    on_run: Callable[[str], None] | None = None,
    on_progress: Progress | None = None,
) -> Profile:
    """Measure every layer and head on both kinds of built-in text, in setting B.

    Raises ConfigError if `length` tokens are not sparse under `sparse`, or a share is none.
    """
    for name, share in (("min_mass", min_mass), ("max_exact", max_exact)):
        if not 0 <= share <= 1:
            raise ConfigError(f"[calibrate] {name}: expected a share from 0 to 1, got {share}")
    (trial,) = trials([Arm.of(sparse)], ["B"])
    texts = [read_passage(llm, kind, length) for kind in TEXT_KINDS]
    for text in texts:
        check_passage(trial, text, positions=queries)
    measured: list[Recall] = []
    for text in texts:
        if on_run is not None:
            on_run(f"{text.source}, {length} tokens, {trial.name}")
        measured.append(
            measure_recall(llm, text, trial=trial, queries=queries, on_progress=on_progress)
        )
    layers = layer_profiles(measured)
    k_type, v_type = llm.cache_types
    return Profile(
        model=llm.info.model_name,
        fingerprint=llm.info.fingerprint,
        version=llm.info.version,
        cache_type=k_type if k_type == v_type else f"{k_type}/{v_type}",
        attn=trial.arm.label,
        setting=trial.setting,
        texts=tuple(text.source for text in texts),
        length=length,
        queries=queries,
        min_mass=min_mass,
        max_exact=max_exact,
        exact_layers=worst_layers(
            layers, min_mass=min_mass, at_most=int(max_exact * llm.config.num_layers)
        ),
        layers=layers,
    )


def layer_profiles(measured: Sequence[Recall]) -> tuple[LayerProfile, ...]:
    """Layers that ran sparsely on every text, in order."""
    common = set.intersection(*(set(recall.layers) for recall in measured))
    found = []
    for layer in sorted(common):
        kept = np.concatenate([recall.layers[layer].kept for recall in measured], axis=1)
        found.append(
            LayerProfile(
                layer=layer,
                kept_mass=round(float(kept.mean()), 4),
                kept_mass_p5=round(float(np.percentile(kept, 5)), 4),
                heads=tuple(round(float(mean), 4) for mean in kept.mean(axis=1)),
            )
        )
    return tuple(found)


def worst_layers(
    layers: Sequence[LayerProfile], *, min_mass: float, at_most: int
) -> tuple[int, ...]:
    """Layers under `min_mass`, the worst ones if there are more than `at_most`; in order."""
    under = [layer for layer in layers if layer.kept_mass < min_mass]
    worst = sorted(under, key=lambda layer: (layer.kept_mass, layer.layer))[:at_most]
    return tuple(sorted(layer.layer for layer in worst))
