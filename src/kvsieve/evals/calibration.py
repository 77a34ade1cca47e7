"""Which layers of a model lose too much when it reads only some blocks, and a file that says so.

A profile belongs to one model file and one setting: it lies beside the model, carries its
fingerprint, and says what it was measured with.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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

FORMAT = 2
SUFFIX = ".sparse.json"
"""Instead of the model file's own suffix."""

MIN_MASS = 0.8
"""A layer whose mean kept mass is under this gets more blocks, or stays exact."""

MAX_EXACT = 0.2
"""Share of the layers that may stay exact: each costs what exact attention costs."""

MORE_BLOCKS = (2, 4)
"""Times the budget, for layers that need more; a layer that these do not help stays exact."""

_DECISIVE = (
    "selector", "share", "block_size", "num_probes", "k", "mass", "k_min", "k_max", "first_layer",
)  # fmt: skip
"""Fields of a setting that a profile was measured with, and that a run must have to use it."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Kept mass of one layer: mean and 5th percentile over heads and queries; means by head.

    ``by_budget``: the mean with more blocks, as pairs (k, kept mass), as far as it was measured.
    """

    layer: int
    kept_mass: float
    kept_mass_p5: float
    heads: tuple[float, ...]
    by_budget: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What calibration found, and with what.

    ``sparse`` are the decisive fields of the setting. ``layer_k`` are layers that need more blocks
    to reach ``min_mass``, as pairs (layer, k); ``exact_layers`` the worst of those that no budget
    helped, at most the share ``max_exact`` of all layers.
    """

    model: str
    fingerprint: str
    version: str
    cache_type: str
    sparse: dict[str, Any]
    attn: str
    setting: str
    texts: tuple[str, ...]
    length: int
    queries: int
    min_mass: float
    max_exact: float
    exact_layers: tuple[int, ...]
    layer_k: tuple[tuple[int, int], ...]
    layers: tuple[LayerProfile, ...]

    def write(self, path: Path) -> None:
        """Write it as JSON, a layer a line."""
        about = {"format": FORMAT, **asdict(self)}
        layers = ",\n".join("    " + json.dumps(layer) for layer in about.pop("layers"))
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in about.items()]
        lines.append(f'  "layers": [\n{layers}\n  ]')
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read what `write` wrote; ConfigError names the file and what is wrong with it."""
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            if about.pop("format") != FORMAT:
                raise ConfigError(f"[profile] {path}: expected format {FORMAT}, got another one")
            layers = tuple(
                LayerProfile(
                    **{
                        **layer,
                        "heads": tuple(layer["heads"]),
                        "by_budget": _pairs(layer["by_budget"]),
                    }
                )
                for layer in about.pop("layers")
            )
            about |= {name: tuple(about[name]) for name in ("texts", "exact_layers")}
            profile = cls(**{**about, "layer_k": _pairs(about["layer_k"])}, layers=layers)
            # What a run will make of it is checked here, where the file's name is known.
            profile.applied(SparseAttention(**profile.sparse), name=path.name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"[profile] {path}: expected a file that `kvsieve calibrate` wrote, got one that "
                f"reads as {type(error).__name__}: {error}"
            ) from error
        named = {*profile.exact_layers, *(layer for layer, _ in profile.layer_k)}
        if not named <= {layer.layer for layer in profile.layers}:
            raise ConfigError(
                f"[profile] {path}: expected exact_layers and layer_k among its "
                f"{len(profile.layers)} layers, got {sorted(named)}"
            )
        return profile

    def misfit(self, sparse: SparseAttention, *, fingerprint: str, cache_type: str) -> str | None:
        """Why a run cannot follow it ("expected X, got Y"), or None: it was measured like that."""
        if fingerprint != self.fingerprint:
            return f"expected a profile of this model ({fingerprint}), got {self._model}"
        if cache_type != self.cache_type:
            return f"expected one for a {cache_type} cache, got one for {self.cache_type}"
        for name, measured in self.sparse.items():
            if getattr(sparse, name) != measured:
                return (
                    f"expected one for {name}={getattr(sparse, name)}, "
                    f"got one measured with {name}={measured}"
                )
        return None

    def applied(self, sparse: SparseAttention, *, name: str) -> SparseAttention:
        """The setting, with the layers treated apart that this profile found."""
        return replace(sparse, exact_layers=self.exact_layers, layer_k=self.layer_k, profile=name)

    @property
    def gist(self) -> str:
        """What it does, for people."""
        exact = ", ".join(map(str, self.exact_layers)) or "none"
        more = ", ".join(f"{layer} ({k})" for layer, k in self.layer_k) or "none"
        return f"exact layers: {exact}; layers with more blocks: {more}"

    @property
    def _model(self) -> str:
        return f"that of {self.model} ({self.fingerprint})"


def check_writable(path: Path) -> None:
    """Raise ConfigError now if the profile could not be written after all the work."""
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"[calibrate] --out: expected a file that can be written, got {path}")


def profile_path(model: Path) -> Path:
    """Where the profile of a model file or folder lies."""
    return model.with_name(model.name + SUFFIX) if model.is_dir() else model.with_suffix(SUFFIX)


def cache_name(llm: LLM) -> str:
    """The cache types of a model as one word."""
    k_type, v_type = llm.cache_types
    return k_type if k_type == v_type else f"{k_type}/{v_type}"


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

    Where a layer is under `min_mass`, all are measured again with more blocks.
    Raises ConfigError if `length` tokens are not sparse under `sparse`, or a share is none, or
    `sparse` treats layers apart already.
    """
    _check(sparse, min_mass=min_mass, max_exact=max_exact)
    texts = [read_passage(llm, kind, length) for kind in TEXT_KINDS]
    (trial,) = trials([Arm.of(sparse)], ["B"])
    for text in texts:
        check_passage(trial, text, positions=queries)

    def measure(k: int) -> tuple[LayerProfile, ...]:
        (trial,) = trials([Arm.of(sparse if k == sparse.k else replace(sparse, k=k))], ["B"])
        measured: list[Recall] = []
        for text in texts:
            if on_run is not None:
                on_run(f"{text.source}, {length} tokens, {trial.name}")
            measured.append(
                measure_recall(llm, text, trial=trial, queries=queries, on_progress=on_progress)
            )
        return layer_profiles(measured)

    layers = measure(sparse.k)
    for factor in MORE_BLOCKS if sparse.mass is None else ():
        k = factor * sparse.k
        if k * sparse.block_size >= length - queries or not needing_more(layers, min_mass):
            break
        layers = with_budget(layers, replace(sparse, k=k), measure(k))
    exact_layers = worst_layers(
        layers, min_mass=min_mass, at_most=int(max_exact * llm.config.num_layers)
    )
    return Profile(
        model=llm.info.model_name,
        fingerprint=llm.info.fingerprint,
        version=llm.info.version,
        cache_type=cache_name(llm),
        sparse={name: getattr(sparse, name) for name in _DECISIVE},
        attn=trial.arm.label,
        setting=trial.setting,
        texts=tuple(text.source for text in texts),
        length=length,
        queries=queries,
        min_mass=min_mass,
        max_exact=max_exact,
        exact_layers=exact_layers,
        layer_k=budgets(layers, min_mass=min_mass, exact_layers=exact_layers),
        layers=layers,
    )


def _check(sparse: SparseAttention, *, min_mass: float, max_exact: float) -> None:
    for name, share in (("min_mass", min_mass), ("max_exact", max_exact)):
        if not 0 <= share <= 1:
            raise ConfigError(f"[calibrate] {name}: expected a share from 0 to 1, got {share}")
    if sparse.layers:
        raise ConfigError(
            "[calibrate] sparse: expected no exact_layers and no layer_k, which are what is looked "
            f"for, got {sparse.exact_layers} and {sparse.layer_k}"
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


def with_budget(
    layers: Sequence[LayerProfile], sparse: SparseAttention, measured: Sequence[LayerProfile]
) -> tuple[LayerProfile, ...]:
    """The layers, with what each kept under another setting's budget of it beside it.

    A layer that `measured` leaves out read everything under that setting: it has no more to say.
    """
    kept = {layer.layer: layer.kept_mass for layer in measured}
    own = dict(sparse.layer_budgets)
    return tuple(
        replace(
            layer,
            by_budget=(
                *layer.by_budget,
                (own.get(layer.layer, sparse.k), kept.get(layer.layer, 1.0)),
            ),
        )
        for layer in layers
    )


def needing_more(layers: Sequence[LayerProfile], min_mass: float) -> list[LayerProfile]:
    """Layers that no budget measured so far brings to `min_mass`."""
    return [layer for layer in layers if _best(layer) < min_mass]


def worst_layers(
    layers: Sequence[LayerProfile], *, min_mass: float, at_most: int
) -> tuple[int, ...]:
    """Layers that stay exact: under `min_mass` with any budget, the worst of them; in order."""
    under = needing_more(layers, min_mass)
    worst = sorted(under, key=lambda layer: (_best(layer), layer.layer))[:at_most]
    return tuple(sorted(layer.layer for layer in worst))


def budgets(
    layers: Sequence[LayerProfile], *, min_mass: float, exact_layers: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Pairs (layer, k) for those under `min_mass` that do not stay exact.

    The smallest budget that reaches it, or the largest that was measured.
    """
    found = []
    for layer in layers:
        if layer.kept_mass >= min_mass or layer.layer in exact_layers or not layer.by_budget:
            continue
        enough = [k for k, kept in layer.by_budget if kept >= min_mass]
        found.append((layer.layer, enough[0] if enough else layer.by_budget[-1][0]))
    return tuple(found)


def _best(layer: LayerProfile) -> float:
    return max([layer.kept_mass, *(kept for _, kept in layer.by_budget)])


def _pairs(value: Any) -> tuple[Any, ...]:
    """Lists of two, as JSON has pairs."""
    return tuple(tuple(pair) for pair in value)
