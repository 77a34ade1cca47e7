"""Inputs and comparisons that the parity tests share."""

import numpy as np

from kvsieve.kernels.backend import WeightSource
from kvsieve.kernels.reference import ReferenceBackend

REFERENCE = ReferenceBackend()


def source(matrix, fmt="f32"):
    return WeightSource(data=matrix, format=fmt, rows=matrix.shape[0], cols=matrix.shape[1])


def quantised(fmt, n_rows, n_cols, seed=0):
    """A matrix in GGUF blocks with random codes and moderate scales."""
    rng = np.random.default_rng(seed)
    head = {"q4_0": 1, "q4_1": 2, "q8_0": 1}[fmt]
    scales = rng.uniform(-0.1, 0.1, (n_rows, n_cols // 32, head)).astype(np.float16)
    codes = rng.integers(0, 256, (n_rows, n_cols // 32, 32 if fmt == "q8_0" else 16), np.uint8)
    data = np.concatenate([scales.view(np.uint8), codes], axis=2).reshape(n_rows, -1)
    return WeightSource(data=data, format=fmt, rows=n_rows, cols=n_cols)


def close(a, b, tolerance):
    """Relative to the size of the rows compared."""
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max()
