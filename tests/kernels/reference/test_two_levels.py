"""The rule for long contexts of docs/selection.md, 4, against one that takes a block at a time."""

import numpy as np
import pytest

from kvsieve.kernels.reference import two_levels
from kvsieve.kernels.reference.selection import probe_positions


def naive_candidates(coarse: np.ndarray, k: int) -> set[int]:
    """Section 4: blocks that one list's heads `coarse` [G][num_full] keep, one block at a time."""
    num_super = -(-coarse.shape[1] // 16)
    wanted = max(16, 2 * -(-k // 16))
    if num_super <= wanted:
        return set(range(coarse.shape[1]))
    members = [range(16 * s, min(16 * s + 16, coarse.shape[1])) for s in range(num_super)]
    value = [
        max(max(head[b] for b in blocks) - head.max() for head in coarse) for blocks in members
    ]
    middle = sorted(range(1, num_super - 1), key=lambda s: (-value[s], s))
    kept = [0, num_super - 1, *middle[: wanted - 2]]
    return {b for s in kept for b in members[s]}


@pytest.mark.parametrize("num_open", [0, 1])
@pytest.mark.parametrize(("num_full", "k"), [(250, 32), (256, 32), (257, 32), (700, 9), (700, 190)])
def test_first_level_keeps_the_best_super_blocks(num_full: int, k: int, num_open: int) -> None:
    rng = np.random.default_rng(num_full)
    scores = rng.normal(size=(2, 3, num_full + num_open)).astype(np.float32)
    coarse = np.round(2 * scores[..., :num_full]) / np.float32(2)  # with ties
    kept = two_levels.keep_candidates(scores, coarse, k)
    for own, before, level in zip(kept, scores, coarse, strict=True):
        blocks = naive_candidates(level, k) | set(range(num_full, num_full + num_open))
        expected = np.full_like(before, -np.inf)
        expected[:, sorted(blocks)] = before[:, sorted(blocks)]
        assert np.array_equal(own, expected)


def test_up_to_16_super_blocks_there_is_one_level() -> None:
    scores = np.zeros((1, 1, 256), np.float32)
    assert two_levels.keep_candidates(scores, scores, 32) is scores


@pytest.mark.parametrize(
    ("block_size", "num_probes", "offsets"),
    [(32, 8, [0, 16]), (32, 1, [0]), (32, 2, [0, 16]), (32, 3, [0, 20]), (64, 8, [0, 32])],
)
def test_coarse_keys_are_two_of_the_sampled_ones(block_size, num_probes, offsets) -> None:
    got = two_levels.coarse_positions(3, block_size=block_size, num_probes=num_probes)
    assert got.tolist() == [[block_size * b + o for o in offsets] for b in range(3)]
    sampled, _ = probe_positions(3 * block_size, block_size=block_size, num_probes=num_probes)
    assert set(got.ravel().tolist()) <= set(sampled.tolist())
