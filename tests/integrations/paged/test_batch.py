from typing import Any

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ShapeError
from kvsieve.integrations.paged.batch import BatchLayer
from kvsieve.integrations.paged.host import AttentionHost
from kvsieve.integrations.paged.padding import read_mask
from tests.integrations.paged.oracle import host, states

SPARSE = SparseAttention(k=2, first_layer=1, dense_tail=0)
SCALE = 32**-0.5


def layer_of(owner: AttentionHost, num_rows: int) -> BatchLayer:
    return BatchLayer(owner, layer=3, num_rows=num_rows, num_kv_heads=2, head_dim=32)


def step(
    layer: BatchLayer, tensors: list[np.ndarray], mask: Any, *, prompt_len: int | None = None
) -> np.ndarray:
    """One forward pass with q, k, v ``[B, T, H, D]``."""
    q, k, v = tensors
    masks = read_mask(mask, past=layer.real, q_len=q.shape[1])
    layer.append(k, v, masks)
    return layer.attend(q, masks, prompt_len=prompt_len, scale=SCALE)


def tensors(seed: int, num_rows: int, q_len: int) -> list[np.ndarray]:
    return [states(seed + i, num_rows, q_len, heads, 32) for i, heads in enumerate((4, 2, 2))]


def padded(real: np.ndarray, rows: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Each row's tensors spread over its real positions; padding holds large numbers."""
    result = []
    for i, heads in enumerate((4, 2, 2)):
        array = np.full((*real.shape, heads, 32), 1e3, np.float32)
        for row, own in enumerate(rows):
            array[row, real[row]] = own[i][0]
        result.append(array)
    return result


@pytest.mark.parametrize("sparse", [None, SPARSE], ids=["exact", "sparse"])
def test_a_row_is_what_it_is_alone(sparse: SparseAttention | None) -> None:
    """Padding left, in the middle and right; then two decoded tokens. Not one bit differs."""
    real = np.ones((3, 140), np.bool_)
    real[0, :37] = False
    real[1, 50:60] = False
    real[2, 129:] = False
    lengths = real.sum(axis=1).tolist()
    alone = [layer_of(host(sparse), 1) for _ in range(3)]
    together = layer_of(host(sparse), 3)

    prompts = [tensors(10 * row, 1, n) for row, n in enumerate(lengths)]
    out = step(together, padded(real, prompts), real)
    assert not out[~real].any()
    for row in range(3):
        np.testing.assert_array_equal(out[row, real[row]], step(alone[row], prompts[row], None)[0])
    for t in range(2):
        real = np.concatenate([real, np.ones((3, 1), np.bool_)], axis=1)
        new = [tensors(100 + 10 * row + t, 1, 1) for row in range(3)]
        out = step(together, padded(np.ones((3, 1), np.bool_), new), real)
        for row in range(3):
            np.testing.assert_array_equal(out[row], step(alone[row], new[row], None)[0])
    assert together.host.recorder.report().attention.mode == ("sparse" if sparse else "exact")


@pytest.mark.parametrize("sizes", [[150], [64, 64, 22], [32, 118]])
def test_a_prompt_of_known_length_may_come_in_pieces(sizes: list[int]) -> None:
    whole, pieces = (layer_of(host(SPARSE, cache_type="q8_0"), 2) for _ in range(2))
    q, k, v = tensors(0, 2, 150)
    real = np.ones((2, 150), np.bool_)
    real[1, :41] = False
    expected = step(whole, [q, k, v], real, prompt_len=150)
    outs, at = [], 0
    for size in sizes:
        part = [array[:, at : at + size] for array in (q, k, v)]
        outs.append(step(pieces, part, real[:, : at + size], prompt_len=150))
        at += size
    # The second row's tiles do not end where the pieces do: only the first is the same bits.
    np.testing.assert_array_equal(np.concatenate(outs, axis=1)[0], expected[0])
    assert whole.host.recorder.report().attention.mode == "sparse"


def test_several_tokens_behind_a_known_prompt_are_decoded() -> None:
    owner = host(SPARSE, keep_masks=True)
    layer = layer_of(owner, 1)
    step(layer, tensors(0, 1, 98), None, prompt_len=100)
    step(layer, tensors(3, 1, 6), None, prompt_len=100)
    seen = [(read.phase, read.mask.q_len, read.mask.kv_len) for read in owner.recorder.masks]
    assert seen == [
        ("prefill", 98, 98),
        ("prefill", 2, 100),
        ("decode", 1, 101),
        ("decode", 1, 102),
        ("decode", 1, 103),
        ("decode", 1, 104),
    ]
    assert {(read.layer, read.row) for read in owner.recorder.masks} == {(3, 0)}


def test_without_a_known_prompt_one_token_is_decoded_and_several_are_a_prompt() -> None:
    owner = host(SPARSE, keep_masks=True)
    layer = layer_of(owner, 1)
    for i, q_len in enumerate((1, 1, 5)):
        step(layer, tensors(10 * i, 1, q_len), None)
    seen = [(read.phase, read.mask.q_len) for read in owner.recorder.masks]
    assert seen == [("prefill", 1), ("decode", 1), ("prefill", 5)]


def test_the_exact_tail_counts_from_the_end_of_the_known_prompt() -> None:
    """Of 200 positions 160 are real tokens, so tiles from (160 - 32) // 32 = 4 on are exact."""
    owner = host(SparseAttention(k=2, first_layer=1, dense_tail=32), keep_masks=True)
    layer = layer_of(owner, 1)
    real = np.ones((1, 200), np.bool_)
    real[0, :40] = False
    step(layer, tensors(0, 1, 136), real[:, :136], prompt_len=200)
    step(layer, tensors(5, 1, 64), real, prompt_len=200)
    counts = [
        [len(read.mask.blocks(0, tile)) for tile in range(read.mask.num_tiles)]
        for read in owner.recorder.masks
    ]
    assert counts == [[1, 2, 2], [2, 5]]


def test_a_row_of_padding_alone_reads_nothing() -> None:
    layer = layer_of(host(), 2)
    out = step(layer, tensors(0, 2, 5), np.array([[1] * 5, [0] * 5]))
    assert not out[1].any()
    assert out[0].any()
    assert layer.rows.num_tokens(1) == 0


def test_positions_are_taken_back_with_their_padding() -> None:
    layer = layer_of(host(), 2)
    real = np.array([[1] * 6, [0, 0, 1, 1, 1, 0]])
    step(layer, tensors(0, 2, 6), real)
    layer.truncate(4)
    assert [layer.rows.num_tokens(row) for row in range(2)] == [4, 2]
    assert layer.real.astype(int).tolist() == real[:, :4].tolist()


def test_picked_rows_keep_their_padding() -> None:
    layer = layer_of(host(), 2)
    real = np.array([[1, 1, 1], [0, 1, 1]])
    step(layer, tensors(0, 2, 3), real)
    layer.pick([1, 1, 0])
    assert layer.real.astype(int).tolist() == real[[1, 1, 0]].tolist()
    assert [layer.rows.num_tokens(row) for row in range(3)] == [2, 2, 3]


def test_heads_that_do_not_divide_are_refused() -> None:
    """ATT-09: query heads come in whole groups."""
    layer = layer_of(host(), 1)
    q, k, v = states(0, 1, 4, 3, 32), states(1, 1, 4, 2, 32), states(2, 1, 4, 2, 32)
    with pytest.raises(ShapeError, match="query: expected a multiple of 2 KV heads, got 3 heads"):
        step(layer, [q, k, v], None)
