"""What a setting reads: bytes to choose blocks, and bytes of the blocks it chose."""

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.outputs import BlockReads
from kvsieve.engine.plan import selector_index
from kvsieve.kernels.layout import LANES, PageLayout
from kvsieve.kernels.reference.refinement import num_refined
from kvsieve.types import BLOCK_SIZE, CacheType

IMPORTANCE_BYTES = 8
"""Per token and layer, shared by the KV heads."""


def choose_bytes(
    sparse: SparseAttention | None, layout: PageLayout, *, num_kv_heads: int, num_tokens: int
) -> float:
    """Bytes read to choose blocks, per token of a context of `num_tokens`, KV head and list.

    The packed index where there is one; else the sampled keys in their pages, of `oracle` all keys.
    What the selector `probe` sums of importance is added, and the keys of blocks that `anchors`
    looked at in vain.
    """
    if sparse is None or sparse.selector in ("window", "random"):
        return 0.0
    if sparse.rule is not None or sparse.selector == "oracle":
        return key_bytes(layout.k_type, layout.head_dim)
    index = selector_index(sparse, layout)
    if index is not None:
        read = index.record_bytes / (LANES * index.block_size)
    else:
        per_block = -(-sparse.block_size // max(1, sparse.block_size // sparse.num_probes))
        read = per_block * key_bytes(layout.k_type, layout.head_dim) / sparse.block_size
    if sparse.selector == "anchors":
        blocks = min(num_refined(sparse.largest_budget), -(-num_tokens // sparse.block_size))
        in_vain = max(0, blocks - sparse.largest_budget) * sparse.block_size
        read += in_vain * key_bytes(layout.k_type, layout.head_dim) / num_tokens
    importance = IMPORTANCE_BYTES / num_kv_heads if sparse.uses_importance else 0.0
    return read + importance


def key_bytes(cache_type: CacheType, head_dim: int) -> float:
    """Bytes of one token's key of one head, its scales included."""
    scales = {"q8_0": 4, "q4_0": 4 * head_dim // 32}.get(cache_type, 0)
    return {"f32": 4.0, "f16": 2.0, "q8_0": 1.0, "q4_0": 0.5}[cache_type] * head_dim + scales


def attend_bytes(reads: BlockReads, layout: PageLayout) -> float | None:
    """Mean bytes of the blocks that one query token read, per layer and KV head."""
    return reads.attended / reads.queries * layout.page_bytes if reads.queries else None


def exact_bytes(num_tokens: int, layout: PageLayout) -> float:
    """The same for exact attention over `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE) * layout.page_bytes
