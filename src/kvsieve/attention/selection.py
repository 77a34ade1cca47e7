"""`select_blocks` and `attend`: block-sparse attention on plain arrays.

For trying a selection out: the same rules and the same kernels as the engine's, without a
model. The engine itself hands its paged cache to the kernels and does not come through here.
"""

from typing import Any

import numpy as np

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.config import SparseAttention
from kvsieve.attention.dense import dense_attention
from kvsieve.attention.inputs import (
    AttentionShape,
    as_float,
    attention_shape,
    check_positive,
    check_values_like_keys,
    described,
    softmax_scale,
)
from kvsieve.attention.selectors.anchors import AnchorsSelector
from kvsieve.attention.selectors.base import Selector
from kvsieve.attention.selectors.even import EvenSelector
from kvsieve.attention.selectors.mean import MeanSelector
from kvsieve.attention.selectors.meanstd import MeanStdSelector
from kvsieve.attention.selectors.minmax import MinMaxSelector
from kvsieve.attention.selectors.oracle import OracleSelector
from kvsieve.attention.selectors.probe import ProbeSelector
from kvsieve.attention.selectors.random import RandomSelector
from kvsieve.attention.selectors.window import WindowSelector
from kvsieve.errors import ConfigError, ShapeError
from kvsieve.kernels.backend import Backend, BlockLists, Segment
from kvsieve.kernels.backends import BackendName, make_backend
from kvsieve.kernels.layout import GROUP, PageLayout
from kvsieve.types import BLOCK_SIZE, F32, I64, AnyArray, Bool, CacheType

_IMPORTANCE_UNITS = 2**24


def select_blocks(
    q: AnyArray,
    k: AnyArray,
    *,
    sparse: SparseAttention,
    importance: AnyArray | None = None,
    prompt_len: int | None = None,
    scale: float | None = None,
) -> BlockMask:
    """Which blocks of keys each query reads under `sparse`.

    Parameters
    ----------
    q : float array ``[Hq, Tq, D]``
        Queries at positions ``Tkv - Tq`` to ``Tkv - 1``, rotary embedding applied. More than one
        query is a piece of a prompt and is read in tiles of 32 positions; a single one is a
        decoded token, unless `prompt_len` says that it still belongs to the prompt.
    k : float array ``[Hkv, Tkv, D]``
        All keys up to the last query. Both arrays are computed with as float32.
    sparse : SparseAttention
        Selector, budget and guards. Its `phase` is honoured: a call of the other phase reads
        everything.
    importance : float or int64 array ``[Tkv]``, optional
        Attention probability that each token received from the prompt's queries, summed over
        them and over query heads; zero for generated tokens. Integers are in units of 2**-24,
        floats are rounded to them. Read by selector ``probe`` on a decoded token, which
        reserves half of its budget by it.
    prompt_len : int, optional
        Tokens of the whole prompt. In prefill the default is ``Tkv``; tiles from
        ``max(0, prompt_len - sparse.dense_tail) // 32`` on read everything.
    scale : float, optional
        Factor of the logits, ``1 / sqrt(D)`` by default; folded into q before the product.

    Returns
    -------
    BlockMask
        In prefill, and on a decoded token with ``share="group"``, one list per (KV head, tile).
        On a decoded token with ``share="head"`` one list per query head, with
        ``mask.lists_per_kv_head == Hq // Hkv``: ``mask.blocks(h)`` is what query head ``h``
        reads. A query or tile that the gate leaves exact lists every causal block, and a
        decoded token that is exact has one list per KV head. Ties go to the lower block.

    Raises
    ------
    ShapeError
        The arrays don't fit together, or a piece of a prompt does not fall on tile edges.
    ConfigError
        `prompt_len`, `scale` or `importance` is out of range.
    NumericalError
        An input holds NaN or infinity.

    Notes
    -----
    docs/selection.md, sections 2 to 6. Under `sparse.block_size` > 32 blocks are chosen in aligned
    groups and listed as the blocks of 32 that they are made of.
    """
    if not isinstance(sparse, SparseAttention):
        raise ConfigError(f"[select_blocks] sparse: expected SparseAttention, got {sparse!r}")
    shape = attention_shape("select_blocks", q, k)
    factor = softmax_scale("select_blocks", scale, shape.head_dim)
    q32, k32 = as_float("select_blocks", "q", q), as_float("select_blocks", "k", k)
    units = _importance_units(importance, shape)
    is_prefill = _is_prefill(shape, prompt_len)
    if sparse.phase not in ("both", "prefill" if is_prefill else "decode"):
        return BlockMask.full(
            q_len=shape.q_len, kv_len=shape.kv_len, num_kv_heads=shape.num_kv_heads
        )
    selector = selector_for(sparse)
    if not is_prefill:
        return selector.select_decode(q32, k32, scale=factor, importance=units)
    total = shape.kv_len if prompt_len is None else prompt_len
    exact_from_tile = max(0, total - sparse.dense_tail) // BLOCK_SIZE
    return selector.select_prefill(q32, k32, scale=factor, exact_from_tile=exact_from_tile)


def selector_for(sparse: SparseAttention) -> Selector:
    """The built-in selector that `sparse` names, with its settings."""
    if isinstance(sparse.rule, Selector):
        return sparse.rule.under(k=sparse.k, block_size=sparse.block_size, share=sparse.sharing)
    budget: dict[str, Any] = {
        "k": sparse.largest_budget,
        "block_size": sparse.block_size,
        "share": sparse.sharing,
    }
    if sparse.selector in ("anchors", "oracle"):
        by_shares = {"anchors": AnchorsSelector, "oracle": OracleSelector}[sparse.selector]
        return by_shares(**budget, mass=sparse.mass or 0.0, k_min=sparse.k_min)
    if sparse.selector in ("probe", "even"):
        by_keys = {"probe": ProbeSelector, "even": EvenSelector}[sparse.selector]
        return by_keys(**budget, num_probes=sparse.num_probes)
    if sparse.selector == "random":
        return RandomSelector(**budget, seed=sparse.seed)
    kinds: dict[str, type[Selector]] = {
        "minmax": MinMaxSelector,
        "mean": MeanSelector,
        "meanstd": MeanStdSelector,
        "window": WindowSelector,
    }
    return kinds[sparse.selector](**budget)


def attend(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    mask: BlockMask | Bool | None = None,
    *,
    scale: float | None = None,
    cache_type: CacheType = "f32",
    backend: BackendName | Backend = "native",
) -> F32:
    """Causal attention over everything, over a `BlockMask`, or over a token mask.

    Parameters
    ----------
    q : float array ``[Hq, Tq, D]``
        Query ``i`` is at position ``Tkv - Tq + i``; any `D`.
    k, v : float arrays ``[Hkv, Tkv, D]``
        Query head ``h`` reads KV head ``h // (Hq // Hkv)``. All arrays are taken as float32.
    mask : BlockMask or bool array, optional
        None reads every token up to the query. A `BlockMask` of blocks of 32 reads the visible
        tokens of its blocks through the kernels, bit for bit what the engine computes; one that
        lists every causal block gives the same bits as None. A bool array ``[Tq, Tkv]``,
        ``[Hkv, Tq, Tkv]`` or ``[Hq, Tq, Tkv]``, or a `BlockMask` of another block size, is an
        exact rule on tokens: it is computed densely in float64 (`dense_attention`), whatever
        the `backend`, and causality is the mask's own business.
    scale : float, optional
        Factor of the logits, ``1 / sqrt(D)`` by default.
    cache_type : str
        How keys and values are kept before they are read: ``f32`` (default), ``f16``, ``q8_0``
        or ``q4_0``. Token masks take ``f32`` alone.
    backend : str or Backend
        ``native`` (the C++ core), ``reference`` (NumPy), or a backend to reuse between calls.

    Returns
    -------
    f32 ``[Hq, Tq, D]``
        The softmax is normalised over the tokens that are read, never over the others. It is
        reduced over runs of 16 listed blocks, merged in order.

    Raises
    ------
    ShapeError
        The arrays and the mask don't fit together, or a row of a token mask is empty.
    ConfigError
        Unknown backend or cache type, or a scale that is not finite.
    NumericalError
        An input holds NaN or infinity.

    Notes
    -----
    docs/selection.md, sections 1 and 6.
    """
    shape = attention_shape("attend", q, k)
    check_values_like_keys("attend", v, k)
    factor = softmax_scale("attend", scale, shape.head_dim)
    kernels = make_backend(backend) if isinstance(backend, str) else backend
    tokens: Bool | None = None
    lists: BlockLists | None = None
    if not isinstance(mask, BlockMask):
        tokens = mask
    else:
        _check_block_mask(mask, shape)
        if mask.block_size == BLOCK_SIZE:
            lists = mask.to_block_lists()
        else:
            tokens = mask.to_dense()
    q32, k32, v32 = (
        as_float("attend", name, array) for name, array in (("q", q), ("k", k), ("v", v))
    )
    if lists is not None and lists.num_heads > shape.num_kv_heads and shape.q_len > 1:
        # The kernels take lists of prompt tiles per KV head alone: give each query head its own.
        k32, v32 = (np.repeat(array, shape.group_size, axis=0) for array in (k32, v32))
    if tokens is not None:
        if cache_type != "f32":
            raise ConfigError(
                f"[attend] cache_type: expected f32 with a token mask, got {cache_type!r}"
            )
        return dense_attention(q32, k32, v32, tokens, scale=factor).out.astype(np.float32)
    return _attend_cached(
        (q32, k32, v32),
        scale=factor,
        cache_type=cache_type,
        lists=lists,
        backend=kernels,
    )


def _attend_cached(
    arrays: tuple[F32, F32, F32],
    *,
    scale: float,
    cache_type: CacheType,
    lists: BlockLists | None,
    backend: Backend,
) -> F32:
    """Write keys and values to a cache of one layer, then attend as the engine does."""
    head_dim = arrays[0].shape[2]
    q, k, v = (_as_token_rows(array) for array in arrays)
    kv_len, num_kv_heads, padded_dim = k.shape
    layout = PageLayout(k_type=cache_type, v_type=cache_type, head_dim=padded_dim)
    num_blocks = -(-kv_len // BLOCK_SIZE)
    pages = np.zeros((1, num_blocks, num_kv_heads, layout.page_bytes), dtype=np.uint8)

    def segment(q_len: int) -> Segment:
        return Segment(
            start=kv_len - q_len,
            q_len=q_len,
            is_prefill=q_len > 1,
            layout=layout,
            pages=pages,
            block_table=np.arange(num_blocks, dtype=np.int32),
        )

    backend.append(segment(kv_len), 0, k, v)
    out = backend.attend(segment(len(q)), 0, q, scale=scale, lists=lists)
    return np.ascontiguousarray(out[:, :, :head_dim].transpose(1, 0, 2))


def _as_token_rows(array: F32) -> F32:
    """``[heads, T, D]`` as the kernels take it: ``[T, heads, D']``, D filled up with zeros.

    A page holds head dimensions in multiples of 32 at worst. Zeros add nothing to a dot
    product, and the zero channels of the output are cut off again.
    """
    filled = np.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % GROUP)))
    return np.ascontiguousarray(filled.transpose(1, 0, 2))


def _check_block_mask(mask: BlockMask, shape: AttentionShape) -> None:
    expected = (shape.num_kv_heads, shape.q_len, shape.kv_len)
    got = (mask.num_kv_heads, mask.q_len, mask.kv_len)
    if got != expected or mask.lists_per_kv_head not in (1, shape.group_size):
        raise ShapeError(
            f"[attend] mask: expected (num_kv_heads, q_len, kv_len) = {expected} with 1 or "
            f"{shape.group_size} lists per KV head, got {got} with {mask.lists_per_kv_head}"
        )


def _is_prefill(shape: AttentionShape, prompt_len: int | None) -> bool:
    """Whether the queries belong to a prompt; if so, they must fall on tile edges."""
    if prompt_len is None:
        is_prefill, complete = shape.q_len > 1, True
    else:
        check_positive("select_blocks", "prompt_len", prompt_len)
        is_prefill = prompt_len >= shape.kv_len
        complete = prompt_len == shape.kv_len or shape.kv_len % BLOCK_SIZE == 0
    if not is_prefill and shape.q_len > 1:
        raise ShapeError(
            f"[select_blocks] q: expected one query beyond the prompt of {prompt_len} tokens "
            f"(tokens are decoded one at a time), got {shape.q_len} up to position {shape.kv_len}"
        )
    if is_prefill and (shape.start % BLOCK_SIZE or not complete):
        raise ShapeError(
            f"[select_blocks] q: expected whole tiles of {BLOCK_SIZE} prompt positions (only the "
            f"prompt's last may be partial), got positions {shape.start} to {shape.kv_len - 1}"
        )
    return is_prefill


def _importance_units(importance: AnyArray | None, shape: AttentionShape) -> I64 | None:
    """Importance in whole units of 2**-24."""
    if importance is None:
        return None
    if not isinstance(importance, np.ndarray) or importance.shape != (shape.kv_len,):
        raise ShapeError(
            f"[select_blocks] importance: expected [Tkv={shape.kv_len}], "
            f"got {described(importance)}"
        )
    if importance.dtype.kind == "f":
        values = as_float("select_blocks", "importance", importance, dtype=np.float64)
        units: I64 = np.rint(values * _IMPORTANCE_UNITS).astype(np.int64)
    elif importance.dtype == np.int64:
        units = importance
    else:
        raise ShapeError(
            f"[select_blocks] importance: expected float or int64, got {importance.dtype}"
        )
    if (units < 0).any():
        raise ConfigError(
            "[select_blocks] importance: expected sums of probabilities, got a negative one"
        )
    return units
