"""How much of full attention a selection keeps, and how far its output is from the exact one.

Source: docs/selection.md, section 8. Density is a property of `BlockMask`.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.attention.inputs import described
from kvsieve.errors import ShapeError
from kvsieve.types import F64, AnyArray, Bool


@dataclass(frozen=True, kw_only=True)
class KeptMass:
    """Mean and 5th percentile of the kept mass over (head, query) rows."""

    mean: float
    p5: float


def kept_mass(probs: AnyArray, mask: Bool) -> F64:
    """Sum of the full-attention probabilities that fall on the tokens of `mask`.

    Parameters
    ----------
    probs : float array ``[Hq, Tq, Tkv]``
        Probabilities of exact attention, for example ``dense_attention(q, k, v).probs``.
    mask : bool array ``[Tq, Tkv]``, ``[Hkv, Tq, Tkv]`` or ``[Hq, Tq, Tkv]``
        The tokens read, for example ``block_mask.to_dense()``.

    Returns
    -------
    f64 ``[Hq, Tq]``, each between 0 and 1.
    """
    fits = (
        isinstance(probs, np.ndarray)
        and isinstance(mask, np.ndarray)
        and probs.ndim == 3
        and mask.dtype == np.bool_
        and mask.shape[-2:] == probs.shape[1:]
        and (mask.ndim == 2 or (mask.ndim == 3 and probs.shape[0] % mask.shape[0] == 0))
    )
    if not fits:
        raise ShapeError(
            f"[kept_mass] mask: expected bool [Tq, Tkv] or [heads, Tq, Tkv] that fits "
            f"probs [Hq, Tq, Tkv] = {described(probs)}, got {described(mask)}"
        )
    heads = mask[None] if mask.ndim == 2 else mask
    read = np.repeat(heads, probs.shape[0] // heads.shape[0], axis=0)
    return np.asarray(np.where(read, probs, 0.0).sum(axis=-1, dtype=np.float64))


def summarize_kept_mass(mass: F64) -> KeptMass:
    """Mean and 5th percentile (linear between neighbours) over all rows of `kept_mass`."""
    return KeptMass(mean=float(mass.mean()), p5=float(np.percentile(mass, 5)))


def relative_error(out: AnyArray, exact: AnyArray) -> F64:
    """Relative L2 error of each row, ``|out - exact| / |exact|`` over the last axis, in float64."""
    if out.shape != exact.shape:
        raise ShapeError(f"[relative_error] out: expected {exact.shape}, got {out.shape}")
    difference = np.linalg.norm(out.astype(np.float64) - exact, axis=-1)
    return np.asarray(difference / np.linalg.norm(exact.astype(np.float64), axis=-1))
