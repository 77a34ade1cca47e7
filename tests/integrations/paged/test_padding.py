import numpy as np
import pytest

from kvsieve.errors import ConfigError, ShapeError
from kvsieve.integrations.paged.padding import RowMask, read_mask

NO_PAST = np.zeros((2, 0), np.bool_)


def token_mask(real: list[list[int]]) -> np.ndarray:
    """``[B, 1, T, T]`` as Transformers makes it: causal, columns of padding hidden."""
    rows = np.array(real, np.bool_)
    return np.tri(rows.shape[1], dtype=np.bool_)[None, None] & rows[:, None, None, :]


def flags(masks: list[RowMask]) -> list[list[int]]:
    return [mask.real.astype(int).tolist() for mask in masks]


def test_no_mask_is_causal_without_padding() -> None:
    masks = read_mask(None, past=np.ones((2, 3), np.bool_), q_len=2)
    assert flags(masks) == [[1, 1, 1, 1, 1]] * 2
    assert all(mask.tokens is None for mask in masks)


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32])
def test_padding_may_stand_anywhere(dtype: type) -> None:
    real = [[0, 0, 1, 1], [1, 0, 1, 0]]
    masks = read_mask(np.array(real, dtype), past=NO_PAST, q_len=4)
    assert flags(masks) == real


def test_padding_of_earlier_tokens_stays() -> None:
    past = np.array([[True, True], [False, True]])
    assert flags(read_mask(np.array([[1, 1, 1], [0, 1, 1]]), past=past, q_len=1)) == [
        [1, 1, 1],
        [0, 1, 1],
    ]
    for other in (None, np.array([[1, 1, 1], [1, 0, 1]])):
        with pytest.raises(ConfigError, match=r"attention_mask: expected the same padding"):
            read_mask(other, past=past, q_len=1)


@pytest.mark.parametrize("hidden", [None, -np.inf, np.finfo(np.float32).min, -65504.0])
def test_a_causal_token_mask_is_causal(hidden: float | None) -> None:
    """A row of padding on the left reads nothing, one on the right reads tokens: both padding."""
    real = [[0, 0, 1, 1], [1, 1, 1, 0]]
    mask = token_mask(real)
    if hidden is not None:
        mask = np.where(mask, 0.0, hidden).astype(np.float32)
    masks = read_mask(mask, past=NO_PAST, q_len=4)
    assert flags(masks) == real
    assert all(one.tokens is None for one in masks)


def test_a_causal_token_mask_after_a_past() -> None:
    past = np.array([[False, True], [True, True]])
    seen = np.array([[[0, 1, 1, 0], [0, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]], np.bool_)
    masks = read_mask(seen[:, None], past=past, q_len=2)
    assert flags(masks) == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert all(one.tokens is None for one in masks)


def test_tokens_that_see_each_other() -> None:
    """One row of padding, then an image of two tokens, then text."""
    mask = token_mask([[0, 1, 1, 1]])
    mask[0, 0, 1, 2] = True
    (row,) = read_mask(mask, past=NO_PAST[:1], q_len=4)
    assert row.real.tolist() == [False, True, True, True]
    assert row.tokens is not None
    assert row.tokens.astype(int).tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]


def test_one_token_mask_serves_every_row() -> None:
    window = np.tri(3, dtype=np.bool_) & ~np.tri(3, k=-2, dtype=np.bool_)
    masks = read_mask(window[None, None], past=NO_PAST, q_len=3)
    assert len(masks) == 2
    for row in masks:
        assert row.tokens is not None
        assert row.tokens.astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_a_window_that_has_left_tokens_behind_makes_no_padding_of_them() -> None:
    past = np.ones((1, 2), np.bool_)
    (row,) = read_mask(np.array([[[[False, False, True]]]]), past=past, q_len=1)
    assert row.real.all()
    assert row.tokens is not None
    assert row.tokens.tolist() == [[False, False, True]]


@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (3, 4), (2, 2, 4, 4), (2, 1, 3, 4), (2, 4, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"attention_mask: expected \(2, 4\) or \(2, 1, 4, 4\)"):
        read_mask(np.ones(shape, np.bool_), past=NO_PAST, q_len=4)


def test_a_bias_is_refused() -> None:
    mask = np.where(token_mask([[1, 1, 1]]), 0.0, -np.inf).astype(np.float32)
    mask[0, 0, 2, 0] = -0.5
    with pytest.raises(ConfigError, match="got a bias"):
        read_mask(mask, past=NO_PAST[:1], q_len=3)


def test_a_token_that_does_not_read_itself_is_refused() -> None:
    mask = token_mask([[1, 1, 1]])
    mask[0, 0, 1, 1] = False
    with pytest.raises(ConfigError, match="to read itself"):
        read_mask(mask, past=NO_PAST[:1], q_len=3)


def test_earlier_padding_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="padding among earlier tokens"):
        read_mask(np.ones((1, 1, 1, 3), np.bool_), past=np.array([[False, True]]), q_len=1)
