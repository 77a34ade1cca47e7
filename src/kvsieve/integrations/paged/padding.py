"""What a host's attention mask says about each row: which tokens are real, and what is unusual.

Source: docs/transformers.md, "Masks".
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.errors import ConfigError, ShapeError
from kvsieve.types import AnyArray, Bool

_HIDDEN = -1e4
"""A number added to a logit that is at most this hides the token (float16's lowest is -65504)."""


@dataclass(frozen=True, kw_only=True)
class RowMask:
    """One row of a batch.

    real    ``bool [kv_len]``: False for padding, wherever it stands
    tokens  ``bool [real queries, real tokens]`` where the queries read anything but the real
            tokens up to their own; None: causal
    """

    real: Bool
    tokens: Bool | None = None


def read_mask(mask: AnyArray | None, *, past: Bool, q_len: int) -> list[RowMask]:
    """Take a mask apart by rows.

    Parameters
    ----------
    mask : None, ``[B, past + q_len]`` or ``[B or 1, 1, q_len, past + q_len]``
        None: causal without padding. Two axes: causal, True (or not 0) for a real token. Four
        axes: what each query reads, as bool or as numbers to be added to the logits, of which
        only 0 and very large negative ones are understood.
    past : bool ``[B, past]``
        Which of the tokens before these `q_len` are real.

    Raises
    ------
    ShapeError
        The mask has other axes, is shorter than the tokens, or differs between heads.
    ConfigError
        It holds other numbers, a token that is read does not read itself, or it says something
        else about earlier tokens than `past`.
    """
    num_rows, num_past = past.shape
    kv_len = num_past + q_len
    if mask is None:
        mask = np.ones((num_rows, kv_len), np.bool_)
    if mask.shape == (num_rows, kv_len):
        real = np.asarray(mask != 0)
        if not np.array_equal(real[:, :num_past], past):
            raise ConfigError(
                "[kvsieve attention] attention_mask: expected the same padding among earlier "
                "tokens as when they came, got another"
            )
        return [RowMask(real=row) for row in real]
    if mask.ndim != 4 or mask.shape[0] not in (1, num_rows) or mask.shape[1:] != (1, q_len, kv_len):
        raise ShapeError(
            f"[kvsieve attention] attention_mask: expected ({num_rows}, {kv_len}) or "
            f"({num_rows}, 1, {q_len}, {kv_len}), got {mask.shape}"
        )
    seen = _visible(mask)[:, 0]
    return [_read_tokens(seen[row % len(seen)], past[row]) for row in range(num_rows)]


def _visible(mask: AnyArray) -> Bool:
    if mask.dtype == np.bool_:
        return mask
    hidden = mask <= np.float32(_HIDDEN)
    if not (hidden | (mask == 0)).all():
        raise ConfigError(
            "[kvsieve attention] attention_mask: expected True and False, or 0 and very large "
            "negative numbers, got a bias between them"
        )
    return np.asarray(~hidden)


def _read_tokens(seen: Bool, past: Bool) -> RowMask:
    """`seen [q_len, kv_len]`. A token that neither reads itself nor is read is padding."""
    num_past = len(past)
    reads_itself = seen.diagonal(num_past)
    if (seen[:, num_past:].any(axis=0) & ~reads_itself).any():
        raise ConfigError(
            "[kvsieve attention] attention_mask: expected every token that is read to read itself"
        )
    if (seen[:, :num_past].any(axis=0) & ~past).any():
        raise ConfigError(
            "[kvsieve attention] attention_mask: expected padding among earlier tokens to stay "
            "hidden, got a query that reads it"
        )
    real = np.concatenate([past, reads_itself])
    tokens = seen[reads_itself][:, real]
    causal = np.tri(len(tokens), tokens.shape[1], int(past.sum()), dtype=np.bool_)
    return RowMask(real=real, tokens=None if np.array_equal(tokens, causal) else tokens)
