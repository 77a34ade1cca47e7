"""Dense attention in float64: the oracle that every other path is compared with.

Slow and simple on purpose. It shares no code with the kernels: one matrix product, a mask
that acts before the softmax, one softmax over what is left, one matrix product.
"""

from typing import NamedTuple

import numpy as np

from kvsieve.attention.inputs import (
    AttentionShape,
    as_float,
    attention_shape,
    check_values_like_keys,
    described,
    softmax_scale,
)
from kvsieve.errors import ShapeError
from kvsieve.types import F64, AnyArray, Bool


class DenseAttention(NamedTuple):
    """Outputs ``f64 [Hq, Tq, D]`` and the probabilities ``f64 [Hq, Tq, Tkv]`` behind them."""

    out: F64
    probs: F64


def dense_attention(
    q: AnyArray, k: AnyArray, v: AnyArray, mask: Bool | None = None, *, scale: float | None = None
) -> DenseAttention:
    """Attention under a token mask, in float64.

    Parameters
    ----------
    q : float array ``[Hq, Tq, D]``
        Query ``i`` is at position ``Tkv - Tq + i``.
    k, v : float arrays ``[Hkv, Tkv, D]``
        Query head ``h`` reads KV head ``h // (Hq // Hkv)``.
    mask : bool array ``[Tq, Tkv]``, ``[Hkv, Tq, Tkv]`` or ``[Hq, Tq, Tkv]``, optional
        True where a query reads a token. Nothing is added to it, causality included.
        None is the causal mask.
    scale : float, optional
        Factor of the logits, ``1 / sqrt(D)`` by default.

    Returns
    -------
    DenseAttention
        ``out`` and ``probs``. Each row of ``probs`` sums to 1 over the tokens that its mask
        lets through, and is exactly 0 elsewhere (docs/selection.md, section 1).

    Raises
    ------
    ShapeError
        The arrays don't fit together, or a row of the mask lets nothing through.
    NumericalError
        An input holds NaN or infinity.
    """
    shape = attention_shape("dense_attention", q, k)
    check_values_like_keys("dense_attention", v, k)
    factor = softmax_scale("dense_attention", scale, shape.head_dim)
    visible = token_mask("dense_attention", mask, shape)
    q64, k64, v64 = (
        as_float("dense_attention", name, array, dtype=np.float64)
        for name, array in (("q", q), ("k", k), ("v", v))
    )
    k64, v64 = (np.repeat(array, shape.group_size, axis=0) for array in (k64, v64))

    logits = (q64 * factor) @ k64.transpose(0, 2, 1)
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs = weights / weights.sum(axis=-1, keepdims=True)
    return DenseAttention(out=probs @ v64, probs=probs)


def token_mask(function: str, mask: Bool | None, shape: AttentionShape) -> Bool:
    """The mask as ``[Hq or 1, Tq, Tkv]``, each row checked to let at least one token through."""
    if mask is None:
        positions = np.arange(shape.start, shape.kv_len)
        return (np.arange(shape.kv_len)[None, :] <= positions[:, None])[None]
    last_two = (shape.q_len, shape.kv_len)
    heads = {shape.num_q_heads, shape.num_kv_heads}
    fits = (
        isinstance(mask, np.ndarray)
        and mask.dtype == np.bool_
        and mask.shape[-2:] == last_two
        and (mask.ndim == 2 or (mask.ndim == 3 and mask.shape[0] in heads))
    )
    if not fits:
        raise ShapeError(
            f"[{function}] mask: expected bool [Tq={shape.q_len}, Tkv={shape.kv_len}], alone or "
            f"for each of {shape.num_kv_heads} KV or {shape.num_q_heads} query heads, "
            f"got {described(mask)}"
        )
    rows = mask[None] if mask.ndim == 2 else mask
    empty = np.argwhere(~rows.any(axis=-1))
    if empty.size:
        raise ShapeError(
            f"[{function}] mask: expected every row to let a token through, got an empty row "
            f"(head {empty[0, 0]}, query {empty[0, 1]})"
        )
    if rows.shape[0] not in (1, shape.num_q_heads):
        rows = np.repeat(rows, shape.group_size, axis=0)
    return rows
