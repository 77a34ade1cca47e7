"""Small caches for tests: pages in shuffled order, every unwritten byte poisoned."""

from dataclasses import replace

import numpy as np

from kvsieve.kernels.backend import Segment, SparsePlan
from kvsieve.kernels.layout import IndexLayout, PageLayout
from kvsieve.kernels.reference import pages

POISON = 0xFF
"""As f32 or f16 scales and values this is NaN; as codes, the largest magnitude."""


def plan(**changes) -> SparsePlan:
    settings = {
        "selector": "even",
        "k": 4,
        "block_size": 32,
        "num_probes": 8,
        "share": "head",
        "exact_from_tile": 10**6,
    }
    return SparsePlan(**(settings | changes))


def empty_segment(
    num_tokens: int,
    *,
    k_type="f32",
    v_type=None,
    head_dim=32,
    kv_heads=2,
    layers=1,
    sparse=None,
    seed=0,
) -> Segment:
    """A poisoned prefill segment of `num_tokens` rows from position 0, nothing appended yet."""
    layout = PageLayout(k_type=k_type, v_type=v_type or k_type, head_dim=head_dim)
    num_blocks = -(-num_tokens // 32)
    table = np.random.default_rng(seed).permutation(num_blocks + 3)[:num_blocks]
    index_layout = index = None
    if sparse is not None and k_type == "q8_0":
        index_layout = IndexLayout(
            head_dim=head_dim, block_size=sparse.block_size, num_probes=sparse.num_probes
        )
        shape = (layers, index_layout.num_groups(num_tokens), kv_heads, index_layout.record_bytes)
        index = np.full(shape, POISON, dtype=np.uint8)
    return Segment(
        start=0,
        q_len=num_tokens,
        is_prefill=True,
        layout=layout,
        pages=np.full((layers, num_blocks + 3, kv_heads, layout.page_bytes), POISON, np.uint8),
        block_table=table.astype(np.int32),
        sparse=sparse,
        index_layout=index_layout,
        index=index,
    )


def filled_segment(k: np.ndarray, v: np.ndarray, **options) -> Segment:
    """A segment with keys and values ``[T, Hkv, D]`` appended."""
    segment = empty_segment(len(k), head_dim=k.shape[2], kv_heads=k.shape[1], **options)
    pages.append(segment, 0, k, v)
    return segment


def last_token(segment: Segment, **changes) -> Segment:
    """The same cache, seen by a decode step of its last token."""
    end = segment.start + segment.q_len
    return replace(segment, **({"start": end - 1, "q_len": 1, "is_prefill": False} | changes))


def rows(segment: Segment, start: int, stop: int) -> Segment:
    """The same cache, seen by the prefill rows from `start` to `stop`."""
    return replace(segment, start=start, q_len=stop - start)


def stored(segment: Segment, kv_head: int, side: str) -> np.ndarray:
    """What the cache holds, as float64 ``[T, D]``."""
    blocks = np.arange(-(-(segment.start + segment.q_len) // 32))
    read = pages.read_keys if side == "k" else pages.read_values
    got = read(segment, 0, kv_head, blocks)
    values = got.values.astype(np.float64)
    if got.scales is not None:
        width = values.shape[1] // got.scales.shape[1]
        values *= np.repeat(got.scales, width, axis=1)
    return values[: segment.start + segment.q_len]


def random_qkv(tokens: int, q_heads: int, kv_heads: int, head_dim: int = 32, *, seed: int = 0):
    """q ``[T, Hq, D]``, k and v ``[T, Hkv, D]``, float32."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, q_heads, head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, tokens, kv_heads, head_dim), dtype=np.float32)
    return q, k, v


def dense_oracle(q, k, v, mask, *, scale) -> np.ndarray:
    """Attention of one head in float64: q ``[R, D]``, k and v ``[T, D]``, mask ``[R, T]``."""
    logits = q.astype(np.float64) @ k.astype(np.float64).T * scale
    logits = np.where(mask, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights @ v.astype(np.float64) / weights.sum(axis=1, keepdims=True)


def probabilities(q, k, mask, *, scale) -> np.ndarray:
    """The weights of `dense_oracle`, float64 ``[R, T]``."""
    logits = np.where(mask, q.astype(np.float64) @ k.astype(np.float64).T * scale, -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)
