"""Rows of block numbers in CSR form: the checks behind `BlockMask`."""

import numpy as np

from kvsieve.attention.inputs import described
from kvsieve.errors import ConfigError, ShapeError
from kvsieve.types import I32, I64, AnyArray


def frozen_integers(name: str, array: AnyArray, dtype: type[np.signedinteger]) -> AnyArray:
    """A read-only copy of one-dimensional integers, checked to fit the narrower type."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ShapeError(
            f"[BlockMask] {name}: expected a one-dimensional integer array, got {described(array)}"
        )
    copy = array.astype(dtype)
    if not np.array_equal(copy, array):
        raise ConfigError(f"[BlockMask] {name}: expected values that fit {np.dtype(dtype)}")
    copy.flags.writeable = False
    return copy


def row_of_entry(indptr: I64) -> I64:
    """The row that each entry of ``indices`` belongs to."""
    return np.repeat(np.arange(indptr.size - 1), np.diff(indptr))


def check_rows(
    indptr: I64, indices: I32, *, num_heads: int, num_tiles: int, first_tile: int
) -> None:
    """Raise unless every row ``head * num_tiles + tile`` is non-empty, sorted, unique, causal."""

    def name(row: int) -> str:
        return f"head {row // num_tiles}, tile {row % num_tiles}"

    rows = num_heads * num_tiles
    if indptr.shape != (rows + 1,) or indptr[0] != 0:
        raise ShapeError(
            f"[BlockMask] indptr: expected {rows + 1} offsets that start at 0 "
            f"({num_heads} heads x {num_tiles} tiles), got {indptr.shape}"
        )
    lengths = np.diff(indptr)
    if (lengths < 1).any():
        raise ConfigError(
            f"[BlockMask] indptr: expected at least one block in every row, got none in "
            f"{name(int(np.argmax(lengths < 1)))}"
        )
    if indptr[-1] != len(indices):
        raise ShapeError(
            f"[BlockMask] indices: expected indptr[-1]={indptr[-1]} entries, got {len(indices)}"
        )
    row = row_of_entry(indptr)
    own_tile = row % num_tiles + first_tile
    outside = (indices < 0) | (indices > own_tile)
    if outside.any():
        at = int(np.argmax(outside))
        raise ConfigError(
            f"[BlockMask] indices: expected blocks 0 to {own_tile[at]} in {name(int(row[at]))} "
            f"(causal), got {indices[at]}"
        )
    unordered = (np.diff(indices) <= 0) & (np.diff(row) == 0)
    if unordered.any():
        at = int(np.argmax(unordered))
        raise ConfigError(
            f"[BlockMask] indices: expected ascending, unique blocks in {name(int(row[at]))}, "
            f"got {indices[at]} before {indices[at + 1]}"
        )
