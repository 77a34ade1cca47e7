"""A grid of evaluations, cell by cell; what is in the results file already is not run again."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.errors import ConfigError
from kvsieve.evals.answers import ask, check_prompt, make_prompt, why_exact
from kvsieve.evals.arms import Arm
from kvsieve.evals.divergence import POSITIONS, Reference, exact_reference, measure_divergence
from kvsieve.evals.passages import passage_why_exact, read_passage
from kvsieve.evals.perplexity import mean_logprob, perplexity_row
from kvsieve.evals.recall import QUERIES, measure_recall, recall_rows
from kvsieve.evals.settings import ANY, Trial, trials
from kvsieve.evals.speed import measure_speed
from kvsieve.evals.store import Identity, ResultStore
from kvsieve.evals.tasks import MAKERS

QUESTIONS = tuple(MAKERS)
PASSAGES = ("recall", "divergence", "perplexity")
TASKS = (*QUESTIONS, *PASSAGES, "speed")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a sweep runs: every task at every length, in every arm and setting.

    depths, seeds  of questions; texts  of recall, divergence and perplexity
    positions      decoded tokens of divergence; queries  of recall
    """

    tasks: Sequence[str]
    arms: Sequence[Arm]
    settings: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float] = (0.1, 0.5, 0.9)
    seeds: Sequence[int] = (0,)
    texts: Sequence[str] = ("natural",)
    positions: int = POSITIONS
    queries: int = QUERIES
    skip_exact: bool = False

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not (self.tasks and self.arms and self.lengths and self.depths):
            raise ConfigError(
                f"[sweep] tasks: expected some of {', '.join(TASKS)}, an attention setting, a "
                f"length and a depth, got {', '.join(unknown) or 'none'}"
            )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row to be: a trial of a task. ``key`` names all that decides it."""

    task: str
    trial: Trial
    length: int
    seed: int
    depth: float | None = None
    text: str | None = None
    size: int | None = None

    @property
    def key(self) -> str:
        """Everything that decides the row, the model and version aside: the defaults too."""
        sparse = self.trial.arm.sparse
        about = {
            **asdict(self),
            "trial": None,
            "sparse": None if sparse is None else asdict(sparse),
            "setting": self.trial.setting,
        }
        return json.dumps(about, sort_keys=True)

    @property
    def name(self) -> str:
        """For people."""
        depth = "" if self.depth is None else f", depth {self.depth:g}"
        return f"{self.task}, {self.length} tokens{depth}, {self.trial.name}"


def grid_arms(
    selectors: Sequence[str], budgets: Sequence[int], *, sparse: SparseAttention
) -> list[Arm]:
    """Exact, and every selector with every budget; all else is as in `sparse`."""
    fields = vars(sparse)
    settings = [
        SparseAttention(**{**fields, "selector": selector, "k": k})
        for selector in selectors
        for k in budgets
    ]
    return [Arm.of(None), *map(Arm.of, settings)]


def identity_of(llm: LLM) -> Identity:
    """What results of this model may be kept with."""
    k_type, v_type = llm.cache_types
    return Identity(
        model=llm.info.model_name,
        fingerprint=llm.info.fingerprint,
        version=llm.info.version,
        cache_type=k_type if k_type == v_type else f"{k_type}/{v_type}",
    )


class Sweep:
    """The cells of a grid for one loaded model: checked when it is made, run by `run`.

    Raises ConfigError or CapacityError if a cell cannot be made or would compare exact with exact;
    with `Grid.skip_exact` the latter are left out.
    """

    def __init__(self, llm: LLM, grid: Grid) -> None:
        self._llm = llm
        self._grid = grid
        # What the trials of one text share: cells of a text follow one another.
        self._reference: tuple[Any, Reference] | None = None
        self._exact_logprob: tuple[Any, float] | None = None
        self.cells = [cell for task in grid.tasks for cell in self._cells_of(task)]

    def run(
        self,
        store: ResultStore,
        *,
        on_cell: Callable[[Cell, int], None] | None = None,
        on_progress: Progress | None = None,
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Run what `store` does not have yet; a row is on disk when it is given.

        `on_cell` hears which cell starts, and how many of all cells are done.
        """
        done = sum(store.has(cell.key) for cell in self.cells)
        for cell in self.cells:
            if store.has(cell.key):
                continue
            if on_cell is not None:
                on_cell(cell, done)
            began = perf_counter()
            row = self._row(cell, on_progress)
            store.add(cell.key, row, task=cell.task, seconds=perf_counter() - began)
            done += 1
            yield cell, row

    # -- which cells there are -----------------------------------------------------------------
    def _cells_of(self, task: str) -> Iterator[Cell]:
        grid = self._grid
        settings = ["C"] if task in ("perplexity", "speed") else grid.settings
        asked = trials(grid.arms, settings)
        if task in ("recall", "divergence"):
            asked = [trial for trial in asked if trial.arm.sparse is not None]
        if task in QUESTIONS:
            yield from self._question_cells(task, asked)
            return
        size = {"recall": grid.queries, "divergence": grid.positions}.get(task, 0)
        for length in grid.lengths:
            for kind in (None,) if task == "speed" else grid.texts:
                source = kind and read_passage(self._llm, kind, length, seed=grid.seeds[0]).source
                for trial in asked:
                    # A benchmark decodes tokens of its own after the prompt.
                    because = passage_why_exact(trial, length, positions=size)
                    if because and grid.skip_exact:
                        continue
                    trial.refuse(because, num_tokens=length)
                    yield Cell(
                        task=task,
                        trial=trial,
                        length=length,
                        seed=grid.seeds[0],
                        text=source,
                        size=size or None,
                    )

    def _question_cells(self, task: str, asked: Sequence[Trial]) -> Iterator[Cell]:
        grid = self._grid
        for length in grid.lengths:
            for depth in grid.depths:
                for seed in grid.seeds:
                    prompt = make_prompt(
                        self._llm, task=task, length=length, depth=depth, seed=seed
                    )
                    for trial in asked:
                        if not (grid.skip_exact and why_exact(trial, prompt)):
                            check_prompt(trial, prompt)
                            yield Cell(
                                task=task, trial=trial, length=length, seed=seed, depth=depth
                            )

    # -- how a cell becomes a row -----------------------------------------------------------------
    def _row(self, cell: Cell, on_progress: Progress | None) -> dict[str, Any]:
        llm, trial = self._llm, cell.trial
        if cell.task in QUESTIONS:
            prompt = make_prompt(
                llm, task=cell.task, length=cell.length, depth=cell.depth or 0.0, seed=cell.seed
            )
            return asdict(
                ask(
                    llm,
                    prompt,
                    trial=trial,
                    length=cell.length,
                    seed=cell.seed,
                    on_progress=on_progress,
                )
            )
        if cell.task == "speed":
            return asdict(measure_speed(llm, cell.length, trial=trial, on_progress=on_progress))
        return self._passage_row(cell, on_progress)

    def _passage_row(self, cell: Cell, on_progress: Progress | None) -> dict[str, Any]:
        llm, trial = self._llm, cell.trial
        assert cell.text is not None  # a cell of a passage has one
        text = read_passage(llm, cell.text.split(":")[0], cell.length, seed=cell.seed)
        if cell.task == "recall":
            measured = measure_recall(
                llm, text, trial=trial, queries=self._grid.queries, on_progress=on_progress
            )
            (row,) = recall_rows(measured, text, trial=trial)
            return asdict(row)
        which = (cell.text, cell.length)
        exact = Trial(arm=Arm.of(None), setting=ANY)
        if cell.task == "divergence":
            if self._reference is None or self._reference[0] != which:
                made = exact_reference(
                    llm, text, exact=exact, positions=self._grid.positions, on_progress=on_progress
                )
                self._reference = (which, made)
            return asdict(
                measure_divergence(llm, self._reference[1], trial=trial, on_progress=on_progress)
            )
        start = cell.length // 2
        if self._exact_logprob is None or self._exact_logprob[0] != which:
            exactly, _ = mean_logprob(llm, text, trial=exact, start=start, on_progress=on_progress)
            self._exact_logprob = (which, exactly)
        logprob, density = mean_logprob(
            llm, text, trial=trial, start=start, on_progress=on_progress
        )
        return asdict(
            perplexity_row(
                text,
                trial=trial,
                start=start,
                logprob=logprob,
                exact_logprob=self._exact_logprob[1],
                density=density,
            )
        )
