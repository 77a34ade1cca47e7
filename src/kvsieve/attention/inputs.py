"""Checks of the arrays that users hand to the public functions of this package."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsieve.errors import ConfigError, NumericalError, ShapeError
from kvsieve.types import AnyArray


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes that q and k agree on; queries end at position `kv_len`."""

    num_q_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.kv_len - self.q_len


def attention_shape(function: str, q: AnyArray, k: AnyArray) -> AttentionShape:
    """Sizes of ``q [Hq, Tq, D]`` and ``k [Hkv, Tkv, D]``; ShapeError if they don't fit together."""
    for name, array in (("q", q), ("k", k)):
        if _rank(array) != 3 or 0 in array.shape:
            raise ShapeError(
                f"[{function}] {name}: expected three non-empty dimensions "
                f"[heads, tokens, head_dim], got {described(array)}"
            )
    num_q_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, _ = k.shape
    if k.shape[2] != head_dim:
        raise ShapeError(
            f"[{function}] k: expected [num_kv_heads, kv_len, head_dim={head_dim}], got {k.shape}"
        )
    if num_q_heads % num_kv_heads:
        raise ShapeError(
            f"[{function}] q: expected a multiple of num_kv_heads={num_kv_heads} query heads, "
            f"got {num_q_heads}"
        )
    if q_len > kv_len:
        raise ShapeError(
            f"[{function}] q: expected at most kv_len={kv_len} queries (the last query is the "
            f"last token of k), got {q_len}"
        )
    return AttentionShape(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
    )


def check_values_like_keys(function: str, v: AnyArray, k: AnyArray) -> None:
    """ShapeError unless `v` has one value of the same size for each key."""
    if _rank(v) != 3 or v.shape != k.shape:
        raise ShapeError(f"[{function}] v: expected the shape of k, {k.shape}, got {described(v)}")


def as_float(function: str, name: str, array: AnyArray, *, dtype: Any = np.float32) -> AnyArray:
    """A C-contiguous copy or view of a float array as `dtype`, every value finite."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise ShapeError(f"[{function}] {name}: expected a float array, got {described(array)}")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite: caught below
        converted = np.ascontiguousarray(array, dtype=dtype)
    if not np.isfinite(converted).all():
        raise NumericalError(
            f"[{function}] {name}: expected finite {np.dtype(dtype)} values, got NaN or infinity"
        )
    return converted


def softmax_scale(function: str, scale: float | None, head_dim: int) -> float:
    """`scale`, or the usual ``1 / sqrt(head_dim)``."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not math.isfinite(scale):
        raise ConfigError(f"[{function}] scale: expected a finite number, got {scale!r}")
    return float(scale)


def check_positive(function: str, name: str, value: object) -> None:
    """ConfigError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"[{function}] {name}: expected a positive integer, got {value!r}")


def described(value: object) -> str:
    """What came, for an error message: dtype and shape, or the type's name."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return type(value).__name__


def _rank(array: object) -> int:
    return array.ndim if isinstance(array, np.ndarray) else -1
