"""``kvsieve lab``: sparse attention on 24 tokens, checked, and broken on purpose."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from kvsieve.cli.groups import grouped
from kvsieve.cli.options import BACKENDS, integer, option
from kvsieve.errors import ConfigError

FAILED = 1
"""Exit code when a check fails."""

_LAB = "Experiment"


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """Which numbers, what to break, and where a picture goes."""

    seed: Annotated[int, integer("-s", "--seed", panel=_LAB, help="Draws the tensors.")] = 0
    broken: Annotated[
        str | None,
        option(
            "--break",
            panel=_LAB,
            metavar="WHAT",
            help="diagonal (no mask inside the query's own block), renormalise (zeros after the "
            "softmax), topk-before-mask (choose, then apply causality), duplicate (a token in "
            "two lists counts twice).",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        option(
            "--plot",
            panel=_LAB,
            metavar="FILE",
            help="Draw the masks, and what is loaded without being read (.png, .svg or .pdf).",
        ),
    ] = None
    backend: Annotated[
        str,
        option(
            "--backend",
            panel=_LAB,
            metavar="NAME",
            help="Kernels of the gathered attention: native (the C++ core) or reference (NumPy).",
        ),
    ] = "native"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"--backend: expected one of {', '.join(BACKENDS)}, got {self.backend}"
            )


@grouped
def lab(options: LabOptions) -> None:
    """Walk through sparse attention on 24 tokens, and check it.

    Prints small tensors, what each query reads, and one query step by step.
    Four checks follow; exit code 1 if one fails. --break breaks one step on
    purpose and shows which check sees it, and why the others cannot.
    docs/learn has the course that goes with it.

    \b
    Examples:
      kvsieve lab --seed 7
      kvsieve lab --break diagonal
      kvsieve lab --plot masks.png
    """
    from kvsieve.kernels.backends import BackendName, make_backend
    from kvsieve.lab.checks import run_checks
    from kvsieve.lab.drawing import draw_masks
    from kvsieve.lab.experiment import BREAKS, Experiment, Tensors
    from kvsieve.lab.walkthrough import walkthrough
    from kvsieve.plotting import check_can_plot

    if options.broken is not None and options.broken not in BREAKS:
        raise ConfigError(f"--break: expected one of {', '.join(BREAKS)}, got {options.broken}")
    if options.plot is not None:
        check_can_plot(options.plot)
    experiment = Experiment(
        tensors=Tensors.drawn(options.seed),
        backend=make_backend(cast("BackendName", options.backend), threads=1),
        broken=options.broken,
    )
    checks = run_checks(experiment)
    print(walkthrough(experiment, checks, seed=options.seed))
    if options.plot is not None:
        draw_masks(experiment, options.plot)
    if not all(check.passed for check in checks):
        raise typer.Exit(FAILED)
