"""Angles of rotary position embeddings, as tables of cosines and sines."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvsieve.errors import ShapeError
from kvsieve.types import F32, F64, AnyArray

_CHUNK = 1024
"""Positions computed together. `RopeTable` always computes whole aligned chunks, so that the
bits of a row never depend on which other positions were asked for."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the frequencies of a model were changed so that it reaches further than it was trained.

    linear  all divided by ``factor``
    llama3  those with a wavelength above ``original_context / low_freq_factor`` divided by
            ``factor``, below ``original_context / high_freq_factor`` left, in between mixed
    yarn    those that turn less than ``beta_slow`` times in ``original_context`` divided by
            ``factor``, more than ``beta_fast`` times left, in between mixed; cosines and sines are
            multiplied by ``attention_factor`` (None: ``0.1 ln factor + 1``)
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    """yarn: whether the bounds of the mixed part are rounded to whole pairs."""

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_amplitude(self.factor)

    def apply(self, frequencies: F64, *, theta: float) -> F64:
        """The model's frequencies from those of plain rope: f64 ``[rope_dim / 2]``."""
        if self.kind == "linear":
            divided: F64 = frequencies / self.factor
            return divided
        kept: AnyArray
        if self.kind == "llama3":
            turns = self.original_context * frequencies / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        else:
            low, high = self._mixed_pairs(2 * len(frequencies), theta)
            kept = 1 - (np.arange(len(frequencies)) - low) / (high - low)
        kept = np.clip(kept, 0.0, 1.0)
        mixed: F64 = frequencies * kept + frequencies / self.factor * (1 - kept)
        return mixed

    def _mixed_pairs(self, rope_dim: int, theta: float) -> tuple[float, float]:
        """Pairs between which yarn goes over from kept to divided frequencies."""

        def pair_that_turns(times: float) -> float:
            length = self.original_context / (times * 2 * math.pi)
            return rope_dim * math.log(length) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope_dim - 1)
        return low, high if high > low else low + 0.001  # no division by zero


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """Yarn's own choice of what cosines and sines are multiplied by."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_tables(
    positions: NDArray[np.integer],
    *,
    rope_dim: int,
    theta: float,
    factors: F64 | F32 | None = None,
    scaling: RopeScaling | None = None,
) -> tuple[F32, F32]:
    """Cosine and sine of every position and pair, computed in float64, rounded once.

    The angle of pair ``i`` at position ``p`` is ``p * theta**(-2i / rope_dim) / factors[i]``,
    before scaling.

    Parameters
    ----------
    positions : integers [T]
    rope_dim : even number of rotated dimensions of a head
    theta : base of the frequencies
    factors : [rope_dim / 2] or None
        Divides the frequencies (``rope_freqs.weight`` of Llama 3 files).
    scaling : RopeScaling or None

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
    amplitude = 1.0
    if scaling is not None:
        frequencies = scaling.apply(frequencies, theta=theta)
        amplitude = scaling.amplitude
    angles = np.multiply.outer(positions.astype(np.float64), frequencies)
    return (
        (np.cos(angles) * amplitude).astype(np.float32),
        (np.sin(angles) * amplitude).astype(np.float32),
    )


class RopeTable:
    """`rope_tables` of the positions from 0 on, computed once and grown as positions need."""

    def __init__(
        self,
        *,
        rope_dim: int,
        theta: float,
        factors: F32 | None = None,
        scaling: RopeScaling | None = None,
    ) -> None:
        self._rope_dim = rope_dim
        self._theta = theta
        self._factors = factors
        self._scaling = scaling
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
                scaling=self._scaling,
            )
            for start in starts
        ]
        self._cos = np.concatenate([self._cos, *(cos for cos, _ in parts)])
        self._sin = np.concatenate([self._sin, *(sin for _, sin in parts)])
