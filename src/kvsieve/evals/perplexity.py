"""Perplexity of a text read as a prompt: exact prefill against sparse prefill."""

from dataclasses import dataclass

import numpy as np

from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.errors import ConfigError
from kvsieve.evals.answers import log_softmax
from kvsieve.evals.corpus import Passage
from kvsieve.evals.settings import Trial
from kvsieve.types import F32


@dataclass(frozen=True, kw_only=True)
class PerplexityRow:
    """One setting's perplexity over a text read as a prompt, from position ``start`` on.

    ``change`` is relative to exact attention over the same cache type; ``density`` is the prompt's.
    """

    attn: str
    setting: str
    text: str
    length: int
    start: int
    perplexity: float
    change: float
    density: float | None


def check_perplexity(trial: Trial, *, length: int, start: int) -> None:
    """Raise ConfigError for positions that are not there, or a sparse arm that stays exact."""
    if not 0 <= start < length - 1:
        raise ConfigError(
            f"[perplexity] start: expected 0 to {length - 2} in a text of {length} tokens, "
            f"got {start}"
        )
    if trial.setting in ("A", "B"):
        raise ConfigError(
            "[perplexity] settings: expected C, in which the prompt is read sparsely, "
            f"got {trial.setting}"
        )
    trial.refuse(trial.why_exact(prompt_len=length, num_tokens=length), num_tokens=length)


def mean_logprob(
    llm: LLM, text: Passage, *, trial: Trial, start: int, on_progress: Progress | None = None
) -> tuple[float, float | None]:
    """Mean log-probability of the tokens after positions `start` on, and the prompt's density."""
    ids = np.asarray(text.token_ids)
    total, count = 0.0, 0
    with llm.walk(text.token_ids, sparse=trial.arm.sparse, max_tokens=len(ids)) as walk:
        for first, rows in walk.prompt_logits(start=start, on_progress=on_progress):
            # Row i predicts the token after position first + i; the text's last has none.
            begin, end = max(first, start), min(first + len(rows), len(ids) - 1)
            for at in range(begin, end, 64):
                part = slice(at, min(at + 64, end))
                chosen = _chosen(rows[part.start - first : part.stop - first], ids[at + 1 :])
                total += chosen
                count += part.stop - part.start
        report = walk.report
    if trial.arm.sparse is not None:
        trial.check_sparse(report)
    return total / count, report.prefill.density


def perplexity_row(
    text: Passage,
    *,
    trial: Trial,
    start: int,
    logprob: float,
    exact_logprob: float,
    density: float | None,
) -> PerplexityRow:
    """The row of what `mean_logprob` gave, for the trial and for exact attention."""
    return PerplexityRow(
        attn=trial.arm.label,
        setting=trial.setting,
        text=text.source,
        length=len(text.token_ids),
        start=start,
        perplexity=round(float(np.exp(-logprob)), 6),
        change=round(float(np.exp(exact_logprob - logprob) - 1), 8),
        density=density,
    )


def _chosen(rows: F32, tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> float:
    logprobs = log_softmax(rows)
    return float(logprobs[np.arange(len(rows)), tokens[: len(rows)]].sum())
