"""``kvsieve eval sweep`` and ``report``: a grid of evaluations, and a page that shows it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.evals.options import RUN, AskedOptions, depths_of, lengths_of, names
from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions, at_least, integer, numbers, option
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.sparse_options import ArmOptions, SparseOptions
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import Arm
from kvsieve.evals.corpus import TEXT_KINDS
from kvsieve.evals.sweep import TASKS, grid_arms

_GRID = "Grid"


@dataclass(frozen=True, kw_only=True)
class SweepOptions(AskedOptions):
    """The grid, and the file of its results."""

    db: Annotated[
        str,
        option(
            "--db",
            panel=RUN,
            metavar="FILE",
            help="SQLite file of results; rows that it has are not run again.",
        ),
    ] = "results.db"
    tasks: Annotated[
        str,
        option("--tasks", panel=_GRID, metavar="NAME,...", help=f"Some of {', '.join(TASKS)}."),
    ] = "passkey,recall,divergence,speed"
    selectors: Annotated[
        str,
        option("--selectors", panel=_GRID, metavar="NAME,...", help="Selectors to compare."),
    ] = "probe,even"
    budgets: Annotated[
        str,
        option("--budgets", panel=_GRID, metavar="N,N,...", help="Budgets in blocks."),
    ] = "8,16,32"
    text: Annotated[
        str,
        option("--text", panel=_GRID, metavar="KIND,...", help="natural, templated, or both."),
    ] = "natural"
    positions: Annotated[
        int, integer("--positions", panel=_GRID, help="Decoded tokens of divergence.")
    ] = 256
    queries: Annotated[int, integer("--queries", panel=_GRID, help="Decoded tokens of recall.")] = (
        64
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names("--tasks", self.tasks, TASKS)
        names("--text", self.text, TEXT_KINDS)
        at_least("--positions", self.positions, 2)
        at_least("--queries", self.queries)

    def arms(self, compare: ArmOptions, sparse: SparseOptions) -> list[Arm]:
        """Every --attn, or exact and the grid of selectors and budgets; never without exact."""
        if compare.attn:
            arms = compare.arms(sparse)
            return arms if any(arm.sparse is None for arm in arms) else [Arm.of(None), *arms]
        for name, value in (
            ("--sparse-k", sparse.sparse_k),
            ("--sparse-selector", sparse.sparse_selector),
        ):
            if value is not None:
                raise ConfigError(f"{name}: expected --budgets and --selectors in a sweep, got it")
        return grid_arms(
            self.selectors.split(","),
            numbers("--budgets", self.budgets, int),
            sparse=sparse.setting or SparseAttention(),
        )


@grouped
def sweep(
    run: SweepOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Run a grid of evaluations into a file of results.

    Every task at every length, for exact attention and each selector with
    each budget (or each --attn). A row is on disk as soon as it is known: a
    sweep that was stopped, even killed, goes on where it was. A file never
    mixes models, cache types or versions.

    \b
    Examples:
      kvsieve eval sweep --lengths 2000,4000 --selectors probe,even
      kvsieve eval sweep --tasks recall --text natural,templated --budgets 16,32
      kvsieve eval report results.db --out report
    """
    arms = run.arms(compare, sparse)

    from kvsieve.evals.store import ResultStore
    from kvsieve.evals.sweep import Cell, Grid, Sweep, identity_of

    grid = Grid(
        tasks=run.tasks.split(","),
        arms=arms,
        settings=run.setting_names,
        lengths=lengths_of(run.lengths),
        depths=depths_of(run.depths),
        seeds=run.seeds,
        texts=run.text.split(","),
        positions=run.positions,
        queries=run.queries,
        skip_exact=run.skip_exact,
    )
    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        bar.begin("preparing questions and texts")
        made = Sweep(llm, grid)
        with ResultStore.create(Path(run.db), identity_of(llm)) as store:
            total, added = len(made.cells), 0

            def announce(cell: Cell, done: int) -> None:
                bar.begin(cell.name, total=total)
                bar.advance(done, total)

            for cell, row in made.run(store, on_cell=announce):
                added += 1
                bar.close()
                print(f"{cell.name}: {_gist(row)}", flush=True)
    kept = f"{total - added} of {total} were there"
    print(f"kvsieve: {run.db}: {added} rows added, {kept}", file=sys.stderr)


def report(
    results: Annotated[Path, typer.Argument(help="What a sweep wrote.", show_default=False)],
    out: Annotated[
        Path, option("--out", panel=RUN, metavar="FOLDER", help="Made if it is not there.")
    ] = Path("report"),
) -> None:
    """Show a sweep: plots and tables in one HTML page.

    The page needs no other file; the plots lie beside it as PNG too. Needs
    the package matplotlib (pip install 'kvsieve[plot]').

    \b
    Example:
      kvsieve eval report results.db --out report
    """
    from kvsieve.evals.report import write_report
    from kvsieve.evals.store import ResultStore

    with ResultStore.read(results) as store:
        for path in write_report(store, out):
            print(path)


def _gist(row: dict[str, object]) -> str:
    """The figures of a row that a person waits for."""
    wanted = ("answer", "hit", "score", "kept_mass", "oracle_mass", "kl", "top1", "perplexity",
              "change", "prefill_tokens_per_second", "decode_ms")  # fmt: skip
    return ", ".join(f"{name} {row[name]}" for name in wanted if name in row)
