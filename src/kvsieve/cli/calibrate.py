"""``kvsieve calibrate``: which layers of a model need more blocks, or should stay exact."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions, at_least, integer, option, real
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.sparse_options import SparseOptions
from kvsieve.errors import ConfigError
from kvsieve.evals.results import markdown_row

if TYPE_CHECKING:
    from kvsieve.evals.calibration import Profile

_RUN = "Calibration"


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What is measured, what counts as too little, and where the profile goes."""

    out: Annotated[
        Path | None,
        option(
            "--out",
            panel=_RUN,
            metavar="FILE",
            show_default="beside the model, with the suffix .sparse.json",
            help="Where the profile is written.",
        ),
    ] = None
    length: Annotated[
        int, integer("--length", panel=_RUN, help="Tokens of each of the two texts.")
    ] = 4000
    queries: Annotated[
        int, integer("--queries", panel=_RUN, help="Last tokens of a text that are measured.")
    ] = 64
    min_mass: Annotated[
        float,
        real("--min-mass", panel=_RUN, help="A layer that keeps less on average gets more blocks."),
    ] = 0.8
    max_exact: Annotated[
        float,
        real("--max-exact", panel=_RUN, help="Largest share of the layers that may stay exact."),
    ] = 0.2

    def __post_init__(self) -> None:
        at_least("--length", self.length)
        at_least("--queries", self.queries)
        for name, share in (("--min-mass", self.min_mass), ("--max-exact", self.max_exact)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{name}: expected 0 to 1, got {share}")


@grouped
def calibrate(run: CalibrateOptions, sparse: SparseOptions, model: ModelOptions) -> None:
    """Measure what each layer loses to sparse attention; write a profile.

    Reads two built-in texts, decodes their last tokens sparsely and compares
    with full attention, layer by layer and head by head. The profile lies
    beside the model: layers that keep too little get twice or four times the
    blocks there, and the worst stay exact if that is not enough. Later runs
    of the same setting take it up and say so (--sparse-profile none: not).

    \b
    Examples:
      kvsieve calibrate -m model.gguf
      kvsieve calibrate --sparse-attn --sparse-k 16 --out smollm2.sparse.json
    """
    from kvsieve.engine.model_loader import resolve_model
    from kvsieve.evals.calibration import calibrate as measure
    from kvsieve.evals.calibration import check_writable, profile_path

    if sparse.sparse_profile:
        raise ConfigError("--sparse-profile: expected none where one is made, got it")
    path = run.out or profile_path(resolve_model(model.source, offline=model.offline))
    check_writable(path)
    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        profile = measure(
            llm,
            sparse.setting or SparseAttention(),
            length=run.length,
            queries=run.queries,
            min_mass=run.min_mass,
            max_exact=run.max_exact,
            on_run=bar.begin,
            on_progress=bar.advance,
        )
    profile.write(path)
    print("".join(map(markdown_row, _table(profile))))
    print(f"{profile.attn}: {profile.gist}\n{path}")


def _table(profile: "Profile") -> list[list[str]]:
    """Kept mass by layer: with the budget, with more of it, and what becomes of the layer."""
    more = [k for k, _ in profile.layers[-1].by_budget] if profile.layers else []
    head = ["layer", "kept mass", "5th percentile", "worst head", *(f"k={k}" for k in more), ""]
    rows = [head, ["---"] * len(head)]
    budgets = dict(profile.layer_k)
    for one in profile.layers:
        worst = f"{min(one.heads):.3f} (head {one.heads.index(min(one.heads))})"
        figures = [f"{one.kept_mass:.3f}", f"{one.kept_mass_p5:.3f}", worst]
        figures += [
            f"{kept:.3f}" if k == usual else f"{kept:.3f} (k={k})"
            for usual, (k, kept) in zip(more, one.by_budget, strict=True)
        ]
        mark = f"k={budgets[one.layer]}" if one.layer in budgets else ""
        mark = "exact" if one.layer in profile.exact_layers else mark
        rows.append([str(one.layer), *figures, mark])
    return rows
