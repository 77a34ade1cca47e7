"""Norms of queries and keys, balanced: the same attention, from rows that quantise better.

A cache row of 8 bits has one scale, so a few large channels cost all others their precision. The
norms' weights are often what makes channels large (Gemma 3 has keys with one of 24 beside a median
of 2), and a score does not change if a channel of the queries is multiplied by what the keys' is
divided by. Powers of two are used, so in float32 not a bit changes.
"""

import numpy as np

from kvsieve.types import F32, F64

_MOST = 8
"""Largest exponent: 2**8 is far beyond what norms differ by, and far from the end of float16."""


def balanced_norms(
    q_norm: F32, k_norm: F32, *, rope_dim: int, interleaved: bool
) -> tuple[F32, F32]:
    """Weights of both norms, ``q * s`` and ``k / s``, where s makes them alike in every channel.

    Parameters
    ----------
    q_norm, k_norm : f32 [D]
    rope_dim : how many channels rope rotates; the two of a pair mix, and get one s
    interleaved : pairs are ``(2i, 2i + 1)``; otherwise ``(i, i + rope_dim / 2)``

    Returns
    -------
    q_norm, k_norm : f32 [D]
    """
    q, k = (_sizes(norm, rope_dim, interleaved) for norm in (q_norm, k_norm))
    known = (q > 0) & (k > 0)
    ratio = np.divide(k, q, out=np.ones_like(k), where=known)
    exponents = np.clip(np.rint(np.log2(ratio) / 2), -_MOST, _MOST)
    scales = np.exp2(exponents).astype(np.float32)
    return q_norm * scales, k_norm / scales


def _sizes(norm: F32, rope_dim: int, interleaved: bool) -> F64:
    """How large each channel gets: root mean square of its pair's weights, f64 ``[D]``."""
    squares = np.square(norm, dtype=np.float64)
    rotated = squares[:rope_dim]
    pairs = rotated.reshape(-1, 2) if interleaved else rotated.reshape(2, -1).T
    means = pairs.mean(axis=1)
    squares[:rope_dim] = np.repeat(means, 2) if interleaved else np.tile(means, 2)
    sizes: F64 = np.sqrt(squares)
    return sizes
