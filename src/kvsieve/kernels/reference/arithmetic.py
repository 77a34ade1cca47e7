"""The few float operations whose rounding the specification fixes.

Everything here is elementwise or reduces in one stated order, so that a row's bits never
depend on which other rows are computed beside it.
"""

import numpy as np

from kvsieve.types import F32, AnyArray

EXACT_F32_INTEGER = 2**24
"""Every integer up to this magnitude is a float32, so sums below it are exact in any order."""

ONE_THREAD_PRODUCT = 2**18
ONE_THREAD_MATRIX = 2**13
"""OpenBLAS starts threads beyond R * N * C = 4 * 65536, or N * C = 4 * 2304 where R is 1. Smaller
products keep the reference to the one thread it promises (50 times faster on a busy machine).
"""

EXP_FLOOR = np.float32(-87.0)
"""e**-87 is 1.6e-38, close to the smallest normal float32."""


def fma(a: AnyArray, b: AnyArray, c: AnyArray) -> F32:
    """``a * b + c``, rounded once to float32, elementwise; a and b broadcast to the shape of c.

    The product of two float32 is exact in float64 (24 + 24 bits fit 53), so only the sum is
    rounded, to 53 bits and then to 24. That differs from a hardware fused operation only where
    the first rounding lands exactly on a tie of the second: about once in 2**29 operations.
    """
    total = np.multiply(a, b, dtype=np.float64)
    total += c
    return total.astype(np.float32)


def exp(x: F32) -> F32:
    """``e**x`` for x <= 0, in float32; 0 below `EXP_FLOOR`."""
    result: F32 = np.where(x >= EXP_FLOOR, np.exp(np.maximum(x, EXP_FLOOR)), np.float32(0))
    return result


def float_dot(q: F32, k: F32) -> F32:
    """Dot products in float32: one chain of fused operations, dimensions ascending.

    Parameters
    ----------
    q : f32 ``[..., R, D]``
    k : f32 ``[..., N, D]``

    Returns
    -------
    f32 ``[..., R, N]``; the order does not depend on R, N or the machine, unlike a BLAS product.
    """
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    dot: F32 = np.zeros((*batch, q.shape[-2], k.shape[-2]), dtype=np.float32)
    for d in range(q.shape[-1]):
        dot = fma(q[..., :, None, d], k[..., None, :, d], dot)
    return dot


def int_dot(a: AnyArray, b: AnyArray) -> F32:
    """Exact dot products of small integers, as float32.

    Parameters
    ----------
    a : integers ``[R, C]``, 8 bits each, signed or not
    b : integers ``[N, C]``, 8 bits signed

    Returns
    -------
    f32 ``[R, N]``: the integer sum, rounded to float32 only if it exceeds 2**24. Integers are
    carried in floats because NumPy multiplies float matrices, not integer ones, with BLAS;
    as long as no partial sum leaves the exact range the order of the sum cannot matter.
    """
    largest = 255 * 128 * a.shape[1]
    carrier = np.float32 if largest < EXACT_F32_INTEGER else np.float64
    left: AnyArray = a.astype(carrier)
    right: AnyArray = b.astype(carrier)
    step = max(1, min(ONE_THREAD_MATRIX, ONE_THREAD_PRODUCT // len(a)) // a.shape[1])
    columns = [left @ right[first : first + step].T for first in range(0, max(1, len(b)), step)]
    product: AnyArray = np.concatenate(columns, axis=1)
    return product.astype(np.float32)
