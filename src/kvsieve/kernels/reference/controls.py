"""Selectors for evaluation only: the true block masses, and blocks drawn at random.

``oracle`` reads all keys, so it says what a perfect estimate would choose. ``random`` looks at
nothing, so whatever it finds, any rule finds. Source: docs/selection.md, section 4.
"""

import numpy as np
from numpy.typing import NDArray

from kvsieve.kernels.backend import Segment
from kvsieve.kernels.reference.arithmetic import exp
from kvsieve.kernels.reference.logits import logits
from kvsieve.kernels.reference.pages import block_positions, read_keys
from kvsieve.kernels.reference.quantize import Rows
from kvsieve.types import BLOCK_SIZE, F32, I64

_U64 = NDArray[np.uint64]


def true_masses(
    segment: Segment, layer: int, kv_head: int, *, q: Rows, positions: I64
) -> tuple[F32, F32]:
    """Attention mass of each block up to the rows' own; as `anchors.block_masses` gives them.

    Parameters
    ----------
    q : Rows ``[R, D]``, folded, all in one block
    positions : i64 ``[R]``

    Returns
    -------
    masses : f32 ``[R, N]``, in units of ``exp(top)``; sums run over ascending tokens
    top : f32 ``[R]``, the largest visible logit
    """
    blocks = np.arange(int(positions[0]) // BLOCK_SIZE + 1, dtype=np.int32)
    found = logits(q, read_keys(segment, layer, kv_head, blocks))
    hidden = block_positions(blocks)[None] > positions[:, None]
    found = np.where(hidden, np.float32(-np.inf), found)
    top = found.max(axis=1)
    weights = exp(found - top[:, None]).reshape(len(found), len(blocks), BLOCK_SIZE)
    masses: F32 = np.add.accumulate(weights, axis=2)[:, :, -1]
    return masses, top


def random_scores(*, seed: int, layer: int, head: int, position: int, num_blocks: int) -> F32:
    """A number from 0 to 1 for each block, the same wherever and whenever it is drawn.

    ``key = mix(mix(mix(mix(seed) ^ layer) ^ head) ^ position)``; the score of block b is the upper
    24 bits of ``mix(key ^ b)``, as a fraction: f32 ``[num_blocks]``.
    """
    key = np.zeros(1, np.uint64)
    for number in (seed, layer, head, position):
        key = _mix(key ^ np.uint64(number))
    bits = _mix(key ^ np.arange(num_blocks, dtype=np.uint64)) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)


def _mix(x: _U64) -> _U64:
    """Spreads 64 bits over 64 bits, one to one; constants as in the generator SplitMix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
