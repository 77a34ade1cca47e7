"""Rows of numbers as small integers with a scale: activations, queries, keys and values.

Three forms, all symmetric around zero:

- *activations*: int8, a scale per 32 values, with the sum a weight's offset needs;
- ``q8_0`` cache rows and queries: int8, one scale for the whole row (one head of one token);
- ``q4_0`` cache rows: integers -8..7, a scale per 32 values, negative where the largest value is
  positive, so that this value lands on -8, the end of the range with the extra step.

Scales are float32, so tiny and huge values survive, and a row of zeros has scale 0. A number is
reconstructed as ``value * scale``. Source: docs/selection.md, section 1.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.errors import NumericalError
from kvsieve.kernels.layout import GROUP
from kvsieve.types import F32, I8, AnyArray, CacheType

TINY = np.float32(2.0**-100)
"""Largest magnitudes up to this count as zero where their inverse is needed, so it stays finite."""

Q8_MAX = 127
Q4_MIN, Q4_MAX = -8, 7
F16_MAX = 65504.0


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one head each, in the form a cache type holds them.

    values  ``[..., D]``: i8 for q8_0 and q4_0, f16 or f32 for the float types
    scales  ``f32 [..., G]``, each for ``D / G`` consecutive values: G is 1 for q8_0 and ``D / 32``
            for q4_0; None for the float types
    """

    values: AnyArray
    scales: F32 | None

    def take(self, rows: AnyArray | slice | int | tuple[slice, ...]) -> "Rows":
        """The same rows, picked by an index on the leading axes."""
        scales = None if self.scales is None else self.scales[rows]
        return Rows(values=self.values[rows], scales=scales)

    def floats(self) -> F32:
        """What the rows stand for, f32 ``[..., D]``."""
        values: F32 = self.values.astype(np.float32)
        if self.scales is None:
            return values
        groups = values.reshape(*self.scales.shape, -1)
        return (groups * self.scales[..., None]).reshape(values.shape)

    def flat(self) -> "Rows":
        """Rows ``[T, H, D]`` as ``[T * H, D]``."""
        scales = None if self.scales is None else self.scales.reshape(-1, self.scales.shape[-1])
        return Rows(values=self.values.reshape(-1, self.values.shape[-1]), scales=scales)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The left side of a projection: ``x ~ values * scales``, in groups of 32.

    values  ``i8 [T, G, 32]``
    scales  ``f32 [T, G]``
    sums    ``f32 [T, G]``: ``scale * sum(values)``, what a constant weight 1 would give
    """

    values: I8
    scales: F32
    sums: F32


def quantize_activations(x: F32) -> Activations:
    """Rows of activations to int8, 32 values at a time.

    ``scale = amax / 127``, ``value = rint(x * (127 / amax))``, half to even. A group whose amax is
    at most `TINY` becomes zeros with scale 0.

    Parameters
    ----------
    x : f32 ``[T, C]``, C a multiple of 32

    Raises
    ------
    NumericalError
        x holds NaN or infinity.
    """
    require_finite("project", "x", x)
    groups = x.reshape(len(x), -1, GROUP)
    amax = np.abs(groups).max(axis=-1)
    inverse = inverse_of_largest(amax, Q8_MAX)
    scales = np.where(inverse > 0, amax / np.float32(Q8_MAX), np.float32(0))
    values = np.clip(np.rint(groups * inverse[..., None]), -Q8_MAX, Q8_MAX).astype(np.int8)
    sums = scales * values.sum(axis=-1, dtype=np.int32).astype(np.float32)
    return Activations(values=values, scales=scales, sums=sums)


def quantize_rows(x: F32, cache_type: CacheType, *, function: str, name: str) -> Rows:
    """Rows in the form of a cache type; `function` and `name` go into the error.

    Parameters
    ----------
    x : f32 ``[..., D]``, one row per head of a token

    Raises
    ------
    NumericalError
        x holds NaN or infinity, or a value that a f16 cache cannot hold (beyond 65504).
    """
    require_finite(function, name, x)
    if cache_type == "q8_0":
        return quantize_q8(x)
    if cache_type == "q4_0":
        return quantize_q4(x)
    if cache_type == "f32":
        return Rows(values=x, scales=None)
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
    if not np.isfinite(halves).all():
        raise NumericalError(
            f"[{function}] {name}: expected magnitudes up to {F16_MAX:g} for a f16 cache, "
            f"got {np.abs(x).max():g}"
        )
    return Rows(values=halves, scales=None)


def quantize_q8(x: F32) -> Rows:
    """``scale = amax / 127`` per row, ``value = rint(x / scale)``, half to even.

    Where the scale is 0 (zeros, or denormals too small to divide) the row is zero. The clip to
    +-127 only acts where a denormal scale was rounded.
    """
    largest: F32 = np.abs(x).max(axis=-1, keepdims=True)
    scales: F32 = largest / np.float32(Q8_MAX)
    values = np.clip(_divide(x, scales), -Q8_MAX, Q8_MAX).astype(np.int8)
    return Rows(values=values, scales=scales)


def quantize_q4(x: F32) -> Rows:
    """Per 32 values: ``scale = m / -8``, ``value = clip(rint(x / scale), -8, 7)``, half to even.

    ``m`` is the value of largest magnitude, sign included, the first among equals.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    where = np.abs(groups).argmax(axis=-1)[..., None]
    scales = np.take_along_axis(groups, where, axis=-1) / np.float32(Q4_MIN)
    values = np.clip(_divide(groups, scales), Q4_MIN, Q4_MAX).astype(np.int8)
    return Rows(values=values.reshape(x.shape), scales=scales[..., 0] + np.float32(0))


def inverse_of_largest(largest: F32, steps: int) -> F32:
    """``steps / largest``: what maps the largest magnitude to `steps`; 0 up to `TINY`."""
    usable = largest > TINY
    inverse: F32 = np.where(usable, np.float32(steps) / np.where(usable, largest, 1), 0)
    return inverse.astype(np.float32)


def require_finite(function: str, name: str, x: F32) -> None:
    """Raise NumericalError if `x` holds NaN or infinity."""
    if not np.isfinite(x).all():
        raise NumericalError(f"[{function}] {name}: expected finite numbers, got NaN or infinity")


def _divide(x: F32, scale: F32) -> F32:
    """``rint(x / scale)``, 0 where the scale is 0."""
    quotient = np.zeros_like(x)
    np.divide(x, scale, out=quotient, where=scale != 0)
    return np.rint(quotient)
