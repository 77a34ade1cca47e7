"""Blocks of one quantised type as blocks of another that the kernels read, codes unchanged.

A Q5_0 block is a Q8_0 block with smaller codes. Eight groups of a Q4_K block are eight Q4_1 blocks:
the file gives their scales and minima as products of two numbers, which are rounded to float16
here (by at most one part in 2048), where a block of 8 bits would round every weight.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from kvsieve.errors import ModelFileError
from kvsieve.types import F32, I8, U8

Q5_0_BYTES = 22
Q8_0_BYTES = 34
Q4_K_BYTES = 144
Q4_1_BYTES = 20
_Q4_K_GROUPS = 8
_FIFTH_BIT = 4


def q5_0_as_q8_0(raw: U8) -> U8:
    """Rows of Q5_0 blocks as rows of Q8_0 blocks of the same values.

    Parameters
    ----------
    raw : u8 [T, blocks * 22]
        Each block: f16 scale; u32, whose bit i is the fifth of code i; the other four bits of
        codes j and j + 16 in byte j. A weight is ``scale * (code - 16)``.

    Returns
    -------
    u8 [T, blocks * 34]
    """
    blocks = raw.reshape(-1, Q5_0_BYTES)
    found: U8 = np.empty((len(blocks), Q8_0_BYTES), np.uint8)
    found[:, :2] = blocks[:, :2]
    codes: I8 = found[:, 2:].view(np.int8)
    codes[:, :16] = blocks[:, 6:] & 0x0F
    codes[:, 16:] = blocks[:, 6:] >> 4
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    codes += (fifth << _FIFTH_BIT).view(np.int8)
    codes -= 1 << _FIFTH_BIT
    return found.reshape(len(raw), -1)


def q4_k_as_q4_1(raw: U8) -> U8:
    """Rows of Q4_K blocks (256 values) as rows of Q4_1 blocks (32 values) of nearly the same ones.

    Parameters
    ----------
    raw : u8 [T, blocks * 144]
        Each block: f16 d and m; 12 bytes with a scale and a minimum of 6 bits for each of eight
        groups; 128 bytes of codes, byte 32 i + j with those of value j of groups 2 i and 2 i + 1.
        A weight is ``d * scale * code - m * minimum``.

    Returns
    -------
    u8 [T, blocks * 160]

    Raises
    ------
    ModelFileError
        A product is too large for float16.
    """
    blocks = raw.reshape(-1, Q4_K_BYTES)
    d, m = (blocks[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    scales, minima = _six_bit_numbers(blocks[:, 4:16])
    found: U8 = np.empty((len(blocks), _Q4_K_GROUPS, Q4_1_BYTES), np.uint8)
    found[:, :, :2] = _halves(d * scales)
    found[:, :, 2:4] = _halves(-m * minima)
    pairs = blocks[:, 16:].reshape(-1, _Q4_K_GROUPS // 2, 2, 16)
    # Values j and j + 16 of a group share a byte of Q4_1.
    low, high = pairs & 0x0F, pairs >> 4
    found[:, 0::2, 4:] = low[:, :, 0] | low[:, :, 1] << 4
    found[:, 1::2, 4:] = high[:, :, 0] | high[:, :, 1] << 4
    return found.reshape(len(raw), -1)


def _six_bit_numbers(packed: U8) -> tuple[U8, U8]:
    """Scales and minima, u8 ``[blocks, 8]`` each.

    Groups 0 to 3 have theirs in the low six bits of bytes 0-3 and 4-7; groups 4 to 7 have the low
    four bits in the nibbles of bytes 8-11, and the high two in what those bytes left.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales, minima


def _halves(values: F32) -> U8:
    """``f32 [blocks, 8]`` as bytes of float16 ``u8 [blocks, 8, 2]``."""
    with np.errstate(over="ignore"):
        rounded = values.astype("<f2")
    if not np.isfinite(rounded).all():
        raise ModelFileError(
            f"[weights] Q4_K: expected scales and minima up to 65504, got {np.abs(values).max():g}"
        )
    return rounded[..., None].view(np.uint8)


REBLOCKED: Mapping[str, Callable[[U8], U8]] = MappingProxyType(
    {"Q5_0": q5_0_as_q8_0, "Q4_K": q4_k_as_q4_1}
)
"""By the type that a file has: how its rows become those of the type that is packed."""
