"""Angles of rotary position embeddings, as tables of cosines and sines."""

import numpy as np
from numpy.typing import NDArray

from kvsieve.errors import ShapeError
from kvsieve.types import F32, F64

_CHUNK = 1024
"""Positions computed together. `RopeTable` always computes whole aligned chunks, so that the
bits of a row never depend on which other positions were asked for."""


def rope_tables(
    positions: NDArray[np.integer], *, rope_dim: int, theta: float, factors: F64 | F32 | None = None
) -> tuple[F32, F32]:
    """Cosine and sine of every position and pair, computed in float64, rounded once.

    The angle of pair ``i`` at position ``p`` is ``p * theta**(-2i / rope_dim) / factors[i]``.

    Parameters
    ----------
    positions : integers [T]
    rope_dim : even number of rotated dimensions of a head
    theta : base of the frequencies
    factors : [rope_dim / 2] or None
        Divides the frequencies (``rope_freqs.weight`` of Llama 3 files).

    Returns
    -------
    cos, sin : f32 [T, rope_dim / 2]

    Raises
    ------
    ShapeError
        If `factors` has another length.
    """
    exponents = np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim
    frequencies = float(theta) ** -exponents
    if factors is not None:
        if factors.shape != frequencies.shape:
            raise ShapeError(
                f"[rope_tables] factors: expected {frequencies.shape}, got {factors.shape}"
            )
        frequencies = frequencies / factors.astype(np.float64)
    angles = np.multiply.outer(positions.astype(np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class RopeTable:
    """`rope_tables` of the positions from 0 on, computed once and grown as positions need."""

    def __init__(self, *, rope_dim: int, theta: float, factors: F32 | None = None) -> None:
        self._rope_dim = rope_dim
        self._theta = theta
        self._factors = factors
        self._cos: F32 = np.empty((0, rope_dim // 2), np.float32)
        self._sin: F32 = np.empty((0, rope_dim // 2), np.float32)

    def rows(self, positions: NDArray[np.integer]) -> tuple[F32, F32]:
        """``cos, sin: f32 [T, rope_dim / 2]``, C-contiguous copies, of ``positions [T] >= 0``."""
        if positions.size:
            if int(positions.min()) < 0:
                raise ShapeError(
                    f"[RopeTable.rows] positions: expected 0 or more, got {int(positions.min())}"
                )
            self._grow(int(positions.max()) + 1)
        return self._cos[positions], self._sin[positions]

    def _grow(self, num_positions: int) -> None:
        have = len(self._cos)
        if num_positions <= have:
            return
        starts = range(have, num_positions, _CHUNK)
        parts = [
            rope_tables(
                np.arange(start, start + _CHUNK),
                rope_dim=self._rope_dim,
                theta=self._theta,
                factors=self._factors,
            )
            for start in starts
        ]
        self._cos = np.concatenate([self._cos, *(cos for cos, _ in parts)])
        self._sin = np.concatenate([self._sin, *(sin for _, sin in parts)])
