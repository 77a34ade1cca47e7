"""Between a job and the prefix cache: what it may take from there, and what it leaves."""

import numpy as np

from kvsieve.cache.prefix_cache import PrefixCache
from kvsieve.engine.job import Job
from kvsieve.engine.origins import prompt_origins, reusable_tokens
from kvsieve.engine.sequence import Sequence
from kvsieve.types import BLOCK_SIZE, I32

SNAPSHOT_TOKENS = 512
"""What selectors keep is saved on multiples of so many tokens (docs/selection.md, 5)."""


def begin(prefix: PrefixCache, job: Job) -> None:
    """Start a job's prompt behind what is cached of it; nothing if it asked for a fresh start, or
    for the logits of the whole prompt.
    """
    sequence = job.sequence
    assert sequence is not None  # admitted, so opened
    job.has_begun = True
    kind = snapshot_kind(sequence)
    if kind is not None and job.request.cache_prompt:
        sequence.snapshots_at = SNAPSHOT_TOKENS
    if not job.request.cache_prompt or sequence.scores_prompt:
        return
    origins = prompt_origins(
        sequence.sparse, prompt_len=sequence.prompt_len, any_way=sequence.reuses_generated
    )
    # The last row has to run, because it is what gives logits.
    limit = sequence.prompt_len - 1
    match = prefix.match(sequence.prompt_ids, origins, limit=limit, snapshot_kind=kind)
    if not match.num_tokens:
        return
    sequence.cache.adopt(match.blocks, num_tokens=match.num_tokens)
    sequence.cache.restore(match.snapshots)
    sequence.num_cached = match.num_tokens
    job.snapshot_at = match.num_tokens
    job.kept = list(match.entries[: match.num_tokens // BLOCK_SIZE])


def keep_prompt(prefix: PrefixCache, job: Job) -> None:
    """Leave the whole blocks that a chunk completed, and what selectors keep up to here."""
    sequence = job.sequence
    assert sequence is not None  # it has just run
    done, origins = reusable_tokens(sequence)
    # The sequence goes on writing to its open block.
    _keep(prefix, job, sequence, tokens=done // BLOCK_SIZE * BLOCK_SIZE, origins=origins)
    kind, at = snapshot_kind(sequence), sequence.cache.num_tokens
    is_whole = at == len(job.kept) * BLOCK_SIZE and at > job.snapshot_at
    if kind is None or not is_whole or at != _snapshot_before(sequence, at):
        return
    _keep_snapshot(prefix, job, sequence, kind=kind)


def keep_all(prefix: PrefixCache, job: Job) -> I32:
    """Leave everything that others may reuse of a sequence that runs no more; its tokens."""
    sequence = job.sequence
    assert sequence is not None  # it has run
    done, origins = reusable_tokens(sequence)
    ids = _keep(prefix, job, sequence, tokens=done, origins=origins)
    kind = snapshot_kind(sequence) if sequence.reuses_generated else None
    if kind is not None and job.snapshot_at < done == len(job.kept) * BLOCK_SIZE:
        # Nothing runs after this, so the sequence may end with its last whole block.
        sequence.cache.truncate(done)
        _keep_snapshot(prefix, job, sequence, kind=kind)
    return ids


def snapshot_kind(sequence: Sequence) -> str | None:
    """What selectors keep for this sequence beside its pages; None: nothing."""
    cache = sequence.cache
    if cache.index_layout is None and cache.importance is None:
        return None
    return repr((cache.index_layout, cache.importance is not None))


def _keep_snapshot(prefix: PrefixCache, job: Job, sequence: Sequence, *, kind: str) -> None:
    """Leave what selectors keep of the tokens so far, which end with a whole block."""
    snapshot = sequence.cache.snapshot(since=job.snapshot_at)
    if snapshot is not None:
        prefix.add_snapshot(job.kept[-1], kind, snapshot)
        job.snapshot_at = sequence.cache.num_tokens


def _keep(
    prefix: PrefixCache, job: Job, sequence: Sequence, *, tokens: int, origins: list[bytes]
) -> I32:
    ids = np.ascontiguousarray(sequence.token_ids(0, tokens), np.int32)
    job.kept = prefix.insert(sequence.cache, ids, origins, after=job.kept)
    return ids


def _snapshot_before(sequence: Sequence, at: int) -> int:
    """The last position up to `at` where a snapshot belongs."""
    last = (sequence.prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE
    return last if at >= last else at // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS
