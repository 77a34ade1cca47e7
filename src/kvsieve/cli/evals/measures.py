"""``kvsieve eval recall | divergence | perplexity``: texts read without a question."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvsieve.cli.evals.options import (
    DivergenceOptions,
    PassageOptions,
    PerplexityOptions,
    RecallOptions,
    lengths_of,
)
from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions
from kvsieve.cli.profiles import profiled_arms
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.sparse_options import ArmOptions, SparseOptions
from kvsieve.evals.arms import Arm
from kvsieve.evals.results import RowWriter
from kvsieve.evals.settings import Trial, trials

if TYPE_CHECKING:
    from kvsieve.engine.llm import LLM
    from kvsieve.evals.corpus import Passage


@grouped
def recall(
    run: RecallOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Measure how much of full attention falls on the blocks that are read.

    kept_mass: share of the full-attention probability on the blocks read,
    mean over layers, heads and decoded tokens (p5: 5th percentile), beside
    oracle_mass, what the best blocks of the same number would keep;
    output_error of attention; bytes read to choose per token and KV head.

    \b
    Examples:
      kvsieve eval recall --attn sparse:k=16 --attn sparse:k=16,selector=even
      kvsieve eval recall --text natural,templated --lengths 5000 --by layer
    """
    arms = compare.arms(sparse)
    trials(arms, run.setting_names)  # refused before anything is loaded

    from kvsieve.evals.recall import RecallRow, measure_recall, recall_rows

    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        bar.close()
        arms = profiled_arms(arms, compare=compare, options=sparse, llm=llm, model=model)
        asked = [one for one in trials(arms, run.setting_names) if one.arm.sparse]
        runs = list(_passages(llm, run, asked, positions=run.queries))
        with RowWriter(sys.stdout, RecallRow, form=run.output) as rows:
            for text, among in runs:
                for trial in among:
                    bar.begin(f"{text.source}, {len(text.token_ids)} tokens, {trial.name}")
                    measured = measure_recall(
                        llm, text, trial=trial, queries=run.queries, on_progress=bar.advance
                    )
                    bar.close()
                    for row in recall_rows(measured, text, trial=trial, by=run.by):
                        rows.write(row)


@grouped
def divergence(
    run: DivergenceOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Compare next-token distributions with those of exact attention.

    The last tokens of a text are decoded one by one. kl: mean KL divergence
    in nats from exact attention over the same cache type; top1: share of
    positions with the same most likely token; logprob of the text itself.

    \b
    Example:
      kvsieve eval divergence --lengths 5000 --attn sparse:k=16
    """
    arms = compare.arms(sparse)
    trials(arms, run.setting_names)

    from kvsieve.evals.divergence import DivergenceRow, exact_reference, measure_divergence

    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        bar.close()
        arms = profiled_arms(arms, compare=compare, options=sparse, llm=llm, model=model)
        asked = trials(arms, run.setting_names)
        runs = list(_passages(llm, run, asked, positions=run.positions))
        with RowWriter(sys.stdout, DivergenceRow, form=run.output) as rows:
            for text, among in runs:
                name = f"{text.source}, {len(text.token_ids)} tokens"
                bar.begin(f"{name}, exact")
                reference = exact_reference(
                    llm,
                    text,
                    exact=_exact(),
                    positions=run.positions,
                    on_progress=bar.advance,
                )
                for trial in among:
                    bar.begin(f"{name}, {trial.name}")
                    row = measure_divergence(llm, reference, trial=trial, on_progress=bar.advance)
                    bar.close()
                    rows.write(row)


@grouped
def perplexity(
    run: PerplexityOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Read a text as a prompt, sparsely, and compare perplexity with exact.

    \b
    Example:
      kvsieve eval perplexity --lengths 4096 --attn sparse:k=32,tail=0
    """
    arms = compare.arms(sparse)
    trials(arms, run.setting_names)

    from kvsieve.evals.perplexity import (
        PerplexityRow,
        check_perplexity,
        mean_logprob,
        perplexity_row,
    )

    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        bar.close()
        arms = profiled_arms(arms, compare=compare, options=sparse, llm=llm, model=model)
        asked = trials(arms, run.setting_names)
        runs = list(_passages(llm, run, asked, positions=0))
        for text, among in runs:
            length = len(text.token_ids)
            for trial in [_exact(), *among]:
                check_perplexity(trial, length=length, start=run.first_of(length))
        with RowWriter(sys.stdout, PerplexityRow, form=run.output) as rows:
            for text, among in runs:
                start, exact_logprob = run.first_of(len(text.token_ids)), None
                for trial in [_exact(), *(one for one in among if one.arm.sparse)]:
                    bar.begin(f"{text.source}, {len(text.token_ids)} tokens, {trial.name}")
                    logprob, density = mean_logprob(
                        llm, text, trial=trial, start=start, on_progress=bar.advance
                    )
                    exact_logprob = logprob if exact_logprob is None else exact_logprob
                    bar.close()
                    rows.write(
                        perplexity_row(
                            text,
                            trial=trial,
                            start=start,
                            logprob=logprob,
                            exact_logprob=exact_logprob,
                            density=density,
                        )
                    )


def _exact() -> Trial:
    (trial,) = trials([Arm.of(None)], ["B"])
    return trial


def _passages(
    llm: "LLM", run: PassageOptions, asked: list[Trial], *, positions: int
) -> "Iterator[tuple[Passage, list[Trial]]]":
    """Every text with the settings to try on it; all are checked when the list is made.

    `positions` are decoded after the prompt; with 0 all of a text is a prompt.
    """
    from kvsieve.evals.passages import passage_why_exact, read_passage

    for kind in run.kinds:
        for length in lengths_of(run.lengths):
            text = read_passage(llm, kind, length, seed=run.seed)
            among = []
            for trial in asked:
                because = passage_why_exact(trial, length, positions=positions)
                if not (because and run.skip_exact):
                    trial.refuse(because, num_tokens=length)
                    among.append(trial)
            yield text, among
