"""One request on its way through the engine: its tokens, its cache, and what it has cost so far."""

from dataclasses import dataclass, field

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.kv_cache import KVCache
from kvsieve.engine.outputs import BlockReads, KeptMass
from kvsieve.kernels.backend import SegmentStats, StepStats
from kvsieve.types import BLOCK_SIZE, F32, I32

_SCORED_ROWS = 4 * BLOCK_SIZE
"""Prompt rows per step whose logits are all wanted: with a vocabulary of 150,000, 80 MB of them,
and a tenth of a second in which no other reply goes on."""


@dataclass(kw_only=True)
class PhaseTotals:
    """Time and block reads of one phase of one sequence, summed over its steps."""

    total_ns: int = 0
    attention_ns: int = 0
    select_ns: int = 0
    dense_ns: int = 0
    attended: int = 0
    causal: int = 0
    queries: int = 0
    kept_mass: list[F32] = field(default_factory=list)

    def add(self, stats: StepStats, segment: SegmentStats, *, queries: int) -> None:
        """Count a step. A sequence waits for the whole step, whatever else is in the batch."""
        self.attention_ns += stats.attention_ns
        self.select_ns += stats.select_ns
        self.dense_ns += stats.dense_ns
        self.attended += segment.pairs_attended
        self.causal += segment.pairs_causal
        self.queries += queries
        if segment.kept_mass is not None:
            self.kept_mass.append(segment.kept_mass)

    @property
    def kept(self) -> KeptMass | None:
        """Estimated kept mass over the sparse steps, None where nothing was estimated."""
        steps = [step for step in self.kept_mass if (step < 1).any()]
        return KeptMass.of(np.stack(steps)) if steps else None

    @property
    def reads(self) -> BlockReads:
        """The block reads as a value for a report."""
        return BlockReads(attended=self.attended, causal=self.causal, queries=self.queries)


@dataclass(kw_only=True)
class Sequence:
    """Tokens of one request. The first `cache.num_tokens` of them have been through the model.

    `num_cached` of them went through it for an earlier request, and came from a prefix cache.
    `snapshots_at`: chunks of the prompt end on multiples of so many tokens, and on the last one of
    32 before its end, because what selectors keep is saved there for other sequences.
    `reuses_generated`: it takes from a prefix cache, and leaves there, what was not computed as a
    prompt of its own would be.
    `scores_prompt`: the logits of every prompt row are wanted, not only those of the last.
    `full_layers`: the model's layers that have no window, and so may be sparse.
    """

    prompt_ids: I32
    cache: KVCache
    sparse: SparseAttention | None = None
    num_cached: int = 0
    snapshots_at: int | None = None
    reuses_generated: bool = False
    scores_prompt: bool = False
    full_layers: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    prefill: PhaseTotals = field(default_factory=PhaseTotals)
    decode: PhaseTotals = field(default_factory=PhaseTotals)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and generated, whether or not they have been through."""
        return self.prompt_len + len(self.output_ids)

    def chunk_limit(self, start: int) -> int:
        """Position at which a chunk of the prompt that begins at `start` ends at the latest."""
        limit = self.prompt_len
        if self.scores_prompt:
            limit = min(limit, (start // _SCORED_ROWS + 1) * _SCORED_ROWS)
        if self.snapshots_at is None:
            return limit
        limit = min(limit, (start // self.snapshots_at + 1) * self.snapshots_at)
        last = (self.prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE
        return min(limit, last if start < last else self.prompt_len)

    def token_ids(self, start: int, end: int) -> I32:
        """Ids at positions ``start .. end``, i32."""
        head = self.prompt_ids[start:end]
        tail = self.output_ids[max(0, start - self.prompt_len) : max(0, end - self.prompt_len)]
        return np.concatenate([head, np.asarray(tail, np.int32)]) if tail else head
