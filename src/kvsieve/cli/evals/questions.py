"""``kvsieve eval passkey | kv | vartrack | copy``: questions with a known answer."""

import sys
from collections import defaultdict

from kvsieve.cli.evals.options import QuestionOptions, depths_of, lengths_of
from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions
from kvsieve.cli.profiles import profiled_arms
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.sparse_options import ArmOptions, SparseOptions
from kvsieve.evals.results import RowWriter
from kvsieve.evals.settings import trials


@grouped
def passkey(
    ask: QuestionOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Hide a five-digit key in filler text and ask for it at the end.

    One row per length, depth and attention setting: the answer, whether its
    first number is the key (hit), how probable the right answer was (logprob),
    what ran (mode), and which share of the cache was read (density).

    \b
    Examples:
      kvsieve eval passkey
      kvsieve eval passkey --lengths 2000,6000 --depths 0.1,0.9
      kvsieve eval passkey --attn exact --attn sparse:k=1 -o json
    """
    _ask("passkey", ask, compare=compare, sparse=sparse, model=model)


@grouped
def kv(
    ask: QuestionOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Ask for one number among many whose keys look alike.

    The context is pairs ("The code of the grey owl is 58213."), hundreds of
    which share a word with the one asked for. Hard for a small model: compare
    logprob and top1 with those of exact attention rather than hits.

    \b
    Example:
      kvsieve eval kv --lengths 1000,2000 --attn exact --attn sparse:k=8
    """
    _ask("kv", ask, compare=compare, sparse=sparse, model=model)


@grouped
def vartrack(
    ask: QuestionOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Follow a chain of assignments hidden in filler to its number.

    Hard for a small model: compare logprob and top1 with those of exact
    attention rather than hits.

    \b
    Example:
      kvsieve eval vartrack --lengths 1000,2000 --attn exact --attn sparse:k=8
    """
    _ask("vartrack", ask, compare=compare, sparse=sparse, model=model)


@grouped
def copy(
    ask: QuestionOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Repeat a list of words hidden in filler, given its first four.

    score is the share of the other words that the answer has in place.

    \b
    Example:
      kvsieve eval copy --lengths 2000 --samples 4
    """
    _ask("copy", ask, compare=compare, sparse=sparse, model=model)


def _ask(
    task: str,
    ask: QuestionOptions,
    *,
    compare: ArmOptions,
    sparse: SparseOptions,
    model: ModelOptions,
) -> None:
    arms = compare.arms(sparse)
    trials(arms, ask.setting_names)  # refused before anything is loaded

    from kvsieve.evals.answers import AnswerRow, run_answers

    scores: dict[str, list[float]] = defaultdict(list)
    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        bar.close()
        arms = profiled_arms(arms, compare=compare, options=sparse, llm=llm, model=model)
        asked = trials(arms, ask.setting_names)
        answered = run_answers(
            llm,
            task=task,
            trials=asked,
            lengths=lengths_of(ask.lengths),
            depths=depths_of(ask.depths),
            seeds=ask.seeds,
            skip_exact=ask.skip_exact,
            on_run=bar.begin,
            on_progress=bar.advance,
        )
        with RowWriter(sys.stdout, AnswerRow, form=ask.output) as rows:
            for row in answered:
                bar.close()
                rows.write(row)
                name = row.attn if row.mode == "exact" else f"{row.attn} ({row.setting})"
                scores[name].append(row.score)
    for name, got in scores.items():
        found = f"{sum(score == 1 for score in got)} of {len(got)} found"
        mean = f", {sum(got) / len(got):.2f} of the answer on average" if task == "copy" else ""
        print(f"kvsieve: {name}: {found}{mean}", file=sys.stderr)
