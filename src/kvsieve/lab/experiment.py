"""Sparse attention small enough to print, made of the project's own parts; four ways to break it.

Each query chooses blocks as a decoded token does (selector ``probe`` without importance), adds a
window and a global token, and reads that set once. The selectors, masks and the kernels behind
`attend` are those of the engine; a break changes one step of putting them together.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.dense import dense_attention
from kvsieve.attention.masks import global_tokens, sliding_window
from kvsieve.attention.selection import attend
from kvsieve.attention.selectors.probe import ProbeSelector
from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import Backend
from kvsieve.types import F32, F64, Bool

Break = Literal["diagonal", "renormalise", "topk-before-mask", "duplicate"]
BREAKS: tuple[Break, ...] = get_args(Break)

N_TOKENS = 24
HEAD_DIM = 4
BLOCK_TOKENS = 4
WINDOW_TOKENS = 3
GLOBAL_POSITION = 0
SCALE = HEAD_DIM**-0.5
SELECTOR = ProbeSelector(k=2, block_size=BLOCK_TOKENS, num_probes=2)
LOCAL = sliding_window(WINDOW_TOKENS) | global_tokens([GLOBAL_POSITION])


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensors:
    """Queries, keys and values of one head, f32 ``[1, 24, 4]`` each, in tenths."""

    q: F32
    k: F32
    v: F32

    @classmethod
    def drawn(cls, seed: int) -> "Tensors":
        """From a normal distribution, rounded so that what is printed is what is computed with."""
        if seed < 0:
            raise ConfigError(f"[lab] seed: expected 0 or more, got {seed}")
        values = np.random.default_rng(seed).standard_normal((3, 1, N_TOKENS, HEAD_DIM))
        q, k, v = (np.round(values, 1) + 0.0).astype(np.float32)  # no negative zeros in print
        return cls(q=q, k=k, v=v)

    def with_future(self, after: int, *, sign: float) -> "Tensors":
        """Other tokens after position `after`, as different as can be.

        Their keys point along (`sign` 1) or against (-1) the query at `after`, so that it would
        rank them first or last if it could see them.
        """
        q, k, v = self.q.copy(), self.k.copy(), self.v.copy()
        q[:, after + 1 :] = -q[:, after + 1 :] + 1
        k[:, after + 1 :] = sign * 10 * self.q[:, after : after + 1]
        v[:, after + 1 :] = 100
        return Tensors(q=q, k=k, v=v)


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """How one query came to what it reads.

    scores   f32 ``[blocks seen]``, the largest logit of two keys per block
    blocks   chosen blocks, ascending
    tokens   positions read, in the order in which they are gathered
    """

    query: int
    scores: F32
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """One run: what each query reads, and the outputs of both ways to compute it."""

    tensors: Tensors
    backend: Backend
    broken: Break | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """Every query's choice."""
        return [self._row(query) for query in range(N_TOKENS)]

    @cached_property
    def mask(self) -> Bool:
        """The positions that each query reads, bool ``[24, 24]``: the mask that the run defines."""
        mask: Bool = np.zeros((N_TOKENS, N_TOKENS), np.bool_)
        for row in self.rows:
            mask[row.query, list(row.tokens)] = True
        return mask

    @cached_property
    def block_mask(self) -> BlockMask:
        """The blocks that a kernel would load for each tile of 4 queries."""
        edge = N_TOKENS // BLOCK_TOKENS
        shape = (1, edge, BLOCK_TOKENS, edge, BLOCK_TOKENS)
        grid: Bool = np.asarray(self.mask.reshape(shape).any(axis=(2, 4)))
        return BlockMask.from_blocks(grid, q_len=N_TOKENS, kv_len=N_TOKENS, block_size=BLOCK_TOKENS)

    @cached_property
    def loaded(self) -> Bool:
        """Positions in the blocks that each query touches, bool ``[24, 24]``."""
        by_block = self.mask.reshape(N_TOKENS, -1, BLOCK_TOKENS).any(axis=2)
        return np.repeat(by_block, BLOCK_TOKENS, axis=1)

    def masked_dense(self) -> F64:
        """Every key scored, the mask set before the softmax: the float64 oracle, ``[24, 4]``."""
        tensors = self.tensors
        out: F64 = dense_attention(tensors.q, tensors.k, tensors.v, self.mask, scale=SCALE).out[0]
        return out

    def gathered(self, queries: range = range(N_TOKENS)) -> F32:
        """The chosen keys and values gathered, then the engine's kernels, f32 ``[queries, 4]``."""
        if self.broken == "renormalise":
            return self._zeroed_afterwards()[queries.start : queries.stop]
        return np.concatenate([self._gathered_row(self.rows[query]) for query in queries])

    def _gathered_row(self, row: Row) -> F32:
        tensors, tokens = self.tensors, list(row.tokens)
        q = tensors.q[:, row.query : row.query + 1]
        out: F32 = attend(
            q, tensors.k[:, tokens], tensors.v[:, tokens], scale=SCALE, backend=self.backend
        )[0]
        return out

    def _zeroed_afterwards(self) -> F32:
        """The break: a full softmax, then zeros, and nobody makes the weights sum to 1 again."""
        tensors = self.tensors
        probs = dense_attention(tensors.q, tensors.k, tensors.v, scale=SCALE).probs[0]
        out: F32 = (np.where(self.mask, probs, 0.0) @ tensors.v[0]).astype(np.float32)
        return out

    def _row(self, query: int) -> Row:
        # The break: scores of keys that come after the query compete for its places.
        visible = N_TOKENS if self.broken == "topk-before-mask" else query + 1
        q = self.tensors.q[:, query : query + 1]
        scores = SELECTOR.score(q, self.tensors.k[:, :visible], scale=SCALE)[0, 0]
        blocks = [int(block) for block in SELECTOR.pick(scores, None)]
        chosen = [
            token
            for block in blocks
            for token in range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            if token <= query or (self.broken == "diagonal" and block == query // BLOCK_TOKENS)
        ]
        local = [int(token) for token in np.flatnonzero(LOCAL.tokens(1, query + 1))]
        # The break: a list has no idea that a token is in it already.
        both = chosen + local if self.broken == "duplicate" else sorted({*chosen, *local})
        return Row(query=query, scores=scores, blocks=tuple(blocks), tokens=tuple(both))


WHY: dict[Break, str] = {
    "diagonal": (
        "The block that holds the query is read without the mask inside it, so a query sees the "
        "rest of its own block: its future. For the mask that this defines, attention is right, "
        "and the dense reference under the same mask agrees. Only changing the future shows it."
    ),
    "renormalise": (
        "The softmax ran over every token and the weights of the others were set to zero after "
        "it. What is left sums to less than 1, so outputs shrink. Nothing of the future is read, "
        "so changing the future changes nothing."
    ),
    "topk-before-mask": (
        "Blocks were ranked before causality was applied, so future blocks took places and were "
        "thrown out afterwards: which past blocks a query reads depends on its future. For the "
        "mask that came out, attention is right, and the dense reference under it agrees."
    ),
    "duplicate": (
        "Chosen blocks and window were joined without removing what is in both, so a token in "
        "both is gathered twice and counts with twice its weight. A mask cannot say twice: the "
        "dense reference counts it once. Nothing of the future is read."
    ),
}
"""What each break does, and which check can see it."""
