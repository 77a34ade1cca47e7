"""``kvsieve calibrate``: which layers of a model should stay exact."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions, integer, option, real
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.sparse_options import SparseOptions
from kvsieve.errors import ConfigError
from kvsieve.evals.results import markdown_row

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
        real("--min-mass", panel=_RUN, help="A layer that keeps less on average stays exact."),
    ] = 0.8
    max_exact: Annotated[
        float,
        real("--max-exact", panel=_RUN, help="Largest share of the layers that may; the worst."),
    ] = 0.2

    def __post_init__(self) -> None:
        for name, value in (("--length", self.length), ("--queries", self.queries)):
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")
        for name, share in (("--min-mass", self.min_mass), ("--max-exact", self.max_exact)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{name}: expected 0 to 1, got {share}")


@grouped
def calibrate(run: CalibrateOptions, sparse: SparseOptions, model: ModelOptions) -> None:
    """Measure what each layer loses to sparse attention; write a profile.

    Reads two built-in texts, decodes their last tokens sparsely and compares
    with full attention, layer by layer and head by head. The profile lies
    beside the model and names the layers that should stay exact.

    \b
    Examples:
      kvsieve calibrate -m model.gguf
      kvsieve calibrate --sparse-attn --sparse-k 16 --out smollm2.sparse.json
    """
    from kvsieve.engine.model_loader import resolve_model
    from kvsieve.evals.calibration import calibrate as measure
    from kvsieve.evals.calibration import check_writable, profile_path

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
    print(markdown_row(["layer", "kept mass", "5th percentile", "worst head", ""]), end="")
    print(markdown_row(["---"] * 5), end="")
    for one in profile.layers:
        mark = "exact" if one.layer in profile.exact_layers else ""
        worst = f"{min(one.heads):.3f} (head {one.heads.index(min(one.heads))})"
        figures = [f"{one.kept_mass:.3f}", f"{one.kept_mass_p5:.3f}"]
        print(markdown_row([str(one.layer), *figures, worst, mark]), end="")
    exact = ", ".join(map(str, profile.exact_layers)) or "none"
    print(f"\n{profile.attn}: exact layers: {exact}\n{path}")
