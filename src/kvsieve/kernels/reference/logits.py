"""Logits: the scaled dot products of queries and keys, for every cache type.

The softmax scale is folded into q first. Over integer keys q becomes integers too (one scale per
row and head), so a logit is an exact integer times one product of two scales: the same bits on
every machine, which is why the chosen blocks are. Over float keys q stays float32.
Source: docs/selection.md, section 1.
"""

import numpy as np

from kvsieve.kernels.reference.arithmetic import float_dot, fma, int_dot
from kvsieve.kernels.reference.quantize import Rows, quantize_q8, require_finite
from kvsieve.types import F32, CacheType


def fold_queries(q: F32, k_type: CacheType, *, scale: float) -> Rows:
    """Queries times the softmax scale, in the form that meets keys of type `k_type`.

    Parameters
    ----------
    q : f32 ``[..., D]``, after rope
    scale : usually ``1 / sqrt(D)``; rounded to float32

    Raises
    ------
    NumericalError
        q holds NaN or infinity.
    """
    require_finite("attend", "q", q)
    folded = q * np.float32(scale)
    if k_type in ("q8_0", "q4_0"):
        return quantize_q8(folded)
    return Rows(values=folded, scales=None)


def logits(q: Rows, keys: Rows) -> F32:
    """Logit of every (query row, key): f32 ``[R, N]``.

    Parameters
    ----------
    q : Rows ``[R, D]`` of `fold_queries`
    keys : Rows ``[N, D]``

    Notes
    -----
    q8_0: ``int_dot * (k_scale * q_scale)``. q4_0: the same per group of 32 dimensions, added in
    order with one fused step each. f16, f32: one fused chain, dimensions ascending.
    """
    if q.scales is None or keys.scales is None:
        return float_dot(q.values, keys.values)
    num_groups = keys.scales.shape[1]
    q_groups = np.split(q.values, num_groups, axis=1)
    key_groups = np.split(keys.values, num_groups, axis=1)
    total: F32 = np.zeros((len(q.values), len(keys.values)), dtype=np.float32)
    for g in range(num_groups):
        scale = q.scales * keys.scales[:, g]
        total = fma(int_dot(q_groups[g], key_groups[g]), scale, total)
    return total
