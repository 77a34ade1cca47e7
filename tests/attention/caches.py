"""Caches of one layer for tests that call a backend directly."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvsieve.kernels.backend import Backend, Segment
from kvsieve.kernels.layout import PageLayout
from kvsieve.types import CacheType


def backend_named(name: str) -> Backend:
    if name == "native":
        from kvsieve.kernels.native import NativeBackend

        return NativeBackend(threads=2)
    from kvsieve.kernels.reference.backend import ReferenceBackend

    return ReferenceBackend()


def filled_segment(
    backend: Backend,
    k: np.ndarray,
    v: np.ndarray,
    *,
    q_len: int,
    cache_type: CacheType = "f32",
    **fields: Any,
) -> Segment:
    """A segment of the last `q_len` tokens of ``k``, ``v`` ``[Hkv, n, D]``, all of them written.

    The pages are in a shuffled order, among pages of stale bytes.
    """
    num_kv_heads, n, head_dim = k.shape
    num_blocks = -(-n // 32)
    layout = PageLayout(k_type=cache_type, v_type=cache_type, head_dim=head_dim)
    stale = np.full((1, num_blocks + 3, num_kv_heads, layout.page_bytes), 0x45, dtype=np.uint8)
    order = np.random.default_rng(0).permutation(num_blocks + 3)[:num_blocks].astype(np.int32)
    whole = Segment(
        start=0, q_len=n, is_prefill=True, layout=layout, pages=stale, block_table=order
    )
    backend.append(whole, 0, *(np.ascontiguousarray(a.transpose(1, 0, 2)) for a in (k, v)))
    return replace(
        whole,
        start=n - q_len,
        q_len=q_len,
        is_prefill=fields.pop("is_prefill", q_len > 1),
        **fields,
    )


def token_rows(q: np.ndarray) -> np.ndarray:
    """``[Hq, T, D]`` as backends take it."""
    return np.ascontiguousarray(q.transpose(1, 0, 2))
