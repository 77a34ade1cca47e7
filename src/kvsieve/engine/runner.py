"""Takes a batch through the model, and keeps caches and counts of its sequences up to date."""

import threading
from collections.abc import Callable

import numpy as np

from kvsieve.engine.batch import Batch, SequenceStep
from kvsieve.engine.plan import sparse_plan
from kvsieve.kernels.backend import Segment, StepStats
from kvsieve.models.decoder import Decoder
from kvsieve.types import F32


class Runner:
    """The one place where sequences meet the model. Passes of several threads take turns."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._turn = threading.Lock()

    def forward(
        self, batch: Batch, *, on_layer: Callable[[], None] | None = None
    ) -> tuple[list[F32 | None], StepStats]:
        """Run every step of `batch`; the caches have grown by its rows when this returns.

        Returns, for each step, ``f32 [rows asked for, vocab]`` or None, and what the pass cost.
        If `on_layer` raises, or memory runs out, no cache has grown.
        """
        for step in batch.steps:
            step.sequence.cache.reserve(step.end)
        segments = [_segment(step) for step in batch.steps]
        token_ids = np.concatenate([s.sequence.token_ids(s.start, s.end) for s in batch.steps])
        counts, rows = _logit_rows(batch)
        with self._turn:
            logits, stats = self.decoder.forward(
                token_ids, segments, logit_rows=rows or None, on_layer=on_layer
            )
        for step, counted in zip(batch.steps, stats.segments, strict=True):
            sequence = step.sequence
            sequence.cache.commit(step.end)
            phase = sequence.prefill if step.is_prefill else sequence.decode
            pool = sequence.cache.pool
            queries = step.q_len * pool.num_layers * pool.num_kv_heads
            phase.add(stats, counted, queries=queries)
        if logits is None:
            return [None] * len(counts), stats
        parts: list[F32 | None] = []
        first = 0
        for count in counts:
            parts.append(logits[first : first + count] if count else None)
            first += count
        return parts, stats


def _segment(step: SequenceStep) -> Segment:
    sequence = step.sequence
    plan = sparse_plan(sequence.sparse, prompt_len=sequence.prompt_len, is_prefill=step.is_prefill)
    return sequence.cache.segment(
        start=step.start,
        q_len=step.q_len,
        is_prefill=step.is_prefill,
        sparse=plan,
        record_importance=step.is_prefill and sequence.cache.importance is not None,
    )


def _logit_rows(batch: Batch) -> tuple[list[int], list[int]]:
    """Rows asked for per step, and their places in the pass."""
    counts: list[int] = []
    rows: list[int] = []
    first = 0
    for step in batch.steps:
        wanted = {"none": 0, "last": 1, "all": step.q_len}[step.logit_rows]
        counts.append(wanted)
        rows.extend(range(first + step.q_len - wanted, first + step.q_len))
        first += step.q_len
    return counts, rows
