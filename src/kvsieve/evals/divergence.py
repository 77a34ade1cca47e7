"""How far sparse attention moves the next-token distribution, on the decode path.

Exact attention over the same cache type is the reference; both read the same tokens.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.evals.answers import log_softmax
from kvsieve.evals.corpus import Passage
from kvsieve.evals.passages import check_passage, decode_passage
from kvsieve.evals.reads import attend_bytes
from kvsieve.evals.settings import Trial
from kvsieve.types import F32, F64

POSITIONS = 256
"""Decoded positions at the end of the text."""


@dataclass(frozen=True, kw_only=True)
class DivergenceRow:
    """One setting against exact attention, over the decoded positions of one text.

    ``kl`` is the mean of KL(exact || this) in nats, ``kl_p95`` its 95th percentile; ``top1`` the
    share of positions where both hold the same token most likely; ``logprob`` the mean
    log-probability of the text's own next token, ``logprob_exact`` that of exact attention.
    ``read_bytes``: mean per query token, layer and KV head.
    """

    attn: str
    setting: str
    text: str
    length: int
    positions: int
    kl: float
    kl_p95: float
    kl_max: float
    top1: float
    logprob: float
    logprob_exact: float
    read_bytes: float | None
    density: float | None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Log-probabilities under exact attention: f32 ``[positions, vocab]``, of one passage."""

    logprobs: F32
    passage: Passage


def exact_reference(
    llm: LLM, text: Passage, *, exact: Trial, positions: int, on_progress: Progress | None = None
) -> Reference:
    """Read the passage exactly; `exact` is the trial of exact attention."""
    rows = np.empty((positions, llm.config.vocab_size), np.float32)
    with decode_passage(
        llm, text, trial=exact, positions=positions, on_progress=on_progress
    ) as walk:
        for row, token in zip(rows, text.token_ids[-positions:], strict=True):
            row[:] = log_softmax(walk.step(token))
    return Reference(logprobs=rows, passage=text)


def measure_divergence(
    llm: LLM, reference: Reference, *, trial: Trial, on_progress: Progress | None = None
) -> DivergenceRow:
    """Decode the same positions in `trial`; ConfigError if a sparse one read everything."""
    text, exact = reference.passage, reference.logprobs
    positions = len(exact)
    check_passage(trial, text, positions=positions)
    divergences: F64 = np.empty(positions)
    agree = np.empty(positions, bool)
    chosen = np.empty(positions - 1)
    tokens = text.token_ids[-positions:]
    with decode_passage(
        llm, text, trial=trial, positions=positions, on_progress=on_progress
    ) as walk:
        for i, token in enumerate(tokens):
            logprobs = log_softmax(walk.step(token))
            divergences[i] = kl_divergence(exact[i].astype(np.float64), logprobs)
            agree[i] = exact[i].argmax() == logprobs.argmax()
            if i + 1 < positions:
                chosen[i] = logprobs[tokens[i + 1]]
        report = walk.report
    trial.check_sparse(report)
    right = exact[np.arange(positions - 1), tokens[1:]]
    return DivergenceRow(
        attn=trial.arm.label,
        setting=trial.setting,
        text=text.source,
        length=len(text.token_ids),
        positions=positions,
        kl=round(float(divergences.mean()), 8),
        kl_p95=round(float(np.percentile(divergences, 95)), 8),
        kl_max=round(float(divergences.max()), 8),
        top1=round(float(agree.mean()), 4),
        logprob=round(float(chosen.mean()), 6),
        logprob_exact=round(float(right.mean(dtype=np.float64)), 6),
        read_bytes=attend_bytes(report.decode, walk.cache.pool.layout),
        density=report.decode.density,
    )


def kl_divergence(logp: F64, logq: F64) -> float:
    """KL(p || q) in nats of log-probabilities over the last axis; at least 0."""
    return max(0.0, float((np.exp(logp) * (logp - logq)).sum()))
