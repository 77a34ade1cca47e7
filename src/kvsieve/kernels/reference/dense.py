"""The layers around attention: projections, norm, rotation, gate.

A projection multiplies int8 activations with 4- or 8-bit weights in groups of 32 inputs. Each
group's dot product is an exact integer; groups are added in order with one fused step each,
so a row gives the same bits alone or in a batch. Source: docs/decisions, 3 and 6.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsieve.errors import ConfigError, ModelFileError, ShapeError
from kvsieve.kernels.backend import WeightFormat, WeightKind, WeightSource
from kvsieve.kernels.checks import check_f32
from kvsieve.kernels.layout import GROUP
from kvsieve.kernels.reference.arithmetic import fma, int_dot
from kvsieve.kernels.reference.quantize import Q4_MAX, Q4_MIN, Q8_MAX, quantize_activations
from kvsieve.types import F32, I8, U8

ROW_BYTES: dict[WeightFormat, int] = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
"""Bytes of a GGUF block of 32 values: f16 scale, f16 minimum (q4_1 only), codes."""

GELU_SLOPE = math.sqrt(2 / math.pi)

DEFAULT_KIND: dict[WeightFormat, WeightKind] = {
    "f32": "q8",
    "q4_0": "q4",
    "q4_1": "q4",
    "q8_0": "q8",
}


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A matrix ``W [rows, cols]`` as `project` reads it; ``y = x @ W.T``.

    ``w = d * code + m`` in groups of 32 inputs, G of them per row.

    codes   ``i8 [G, rows, 32]`` for kinds q4 (-8..7, or 0..15 with m) and q8 (-128..127)
    d, m    ``f32 [G, rows]``, values of float16; m is None where there is no minimum
    values  ``f32 [cols, rows]`` for kind f32, transposed
    """

    kind: WeightKind
    rows: int
    cols: int
    codes: I8 | None = None
    d: F32 | None = None
    m: F32 | None = None
    values: F32 | None = None


# -- packing ------------------------------------------------------------------------------------
def pack_weight(source: WeightSource, *, kind: WeightKind | None = None) -> PackedWeight:
    """A matrix of a model file, packed once at load.

    Without `kind`, q4_0 and q4_1 keep their 4 bits, q8_0 its 8, and f32 becomes 8 bits. Kind
    ``f32`` dequantises; kind ``q8`` of a 4-bit source dequantises and quantises again; kind ``q4``
    takes f32 and 4-bit sources.

    Raises
    ------
    ShapeError
        The data does not have the rows and columns that the source says.
    ConfigError
        The kind is unknown, or q4 of a source that is not 4-bit.
    ModelFileError
        A weight or scale is NaN or infinite, or too large for a float16 scale.
    """
    chosen = DEFAULT_KIND[source.format] if kind is None else kind
    _check_source(source)
    if chosen == "f32":
        values = np.ascontiguousarray(_dequantized(source).T)
        return PackedWeight(kind="f32", rows=source.rows, cols=source.cols, values=values)
    if chosen == DEFAULT_KIND[source.format] and source.format != "f32":
        codes, d, m = _blocks(source)
    elif chosen == "q8":
        codes, d = _quantized_to_q8(_dequantized(source))
        m = None
    elif chosen == "q4" and source.format == "f32":
        codes, d = _quantized_to_q4(_dequantized(source))
        m = None
    else:
        raise ConfigError(
            f"[pack_weight] kind: expected f32 or q8 for a {source.format} matrix, got {chosen!r}"
        )
    return PackedWeight(
        kind=chosen,
        rows=source.rows,
        cols=source.cols,
        codes=np.ascontiguousarray(codes.transpose(1, 0, 2)),
        d=np.ascontiguousarray(d.T),
        m=None if m is None else np.ascontiguousarray(m.T),
    )


def unpack_weight(weight: PackedWeight) -> F32:
    """The numbers that a packed matrix stands for: f32 ``[rows, cols]``."""
    if weight.values is not None:
        return np.ascontiguousarray(weight.values.T)
    if weight.codes is None or weight.d is None:
        raise ShapeError("[unpack_weight] weight: expected codes and scales, got none")
    values: F32 = weight.codes * weight.d[:, :, None]
    if weight.m is not None:
        values = values + weight.m[:, :, None]
    matrix: F32 = values.transpose(1, 0, 2).reshape(weight.rows, weight.cols)
    return matrix


def _blocks(source: WeightSource) -> tuple[I8, F32, F32 | None]:
    """GGUF blocks as codes ``i8 [rows, G, 32]``, d and m ``f32 [rows, G]``."""
    data: Any = source.data[:]  # u8: `_check_source` has seen to it
    blocks: U8 = data.reshape(source.rows, -1, ROW_BYTES[source.format])
    d = _halves(blocks[:, :, :2])
    if source.format == "q8_0":
        return blocks[:, :, 2:].view(np.int8), d, None
    packed = blocks[:, :, -GROUP // 2 :]
    codes = np.concatenate([packed & 0x0F, packed >> 4], axis=2).astype(np.int8)
    if source.format == "q4_1":
        return codes, d, _halves(blocks[:, :, 2:4])
    return codes - np.int8(8), d, None


def _halves(raw: U8) -> F32:
    """Little-endian float16 ``u8 [..., 2]`` as float32 ``[...]``."""
    values = np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float32)
    if not np.isfinite(values).all():
        raise ModelFileError("[pack_weight] scales: expected finite numbers, got NaN or infinity")
    return values


def _dequantized(source: WeightSource) -> F32:
    if source.format == "f32":
        values: F32 = source.data[:]
        if not np.isfinite(values).all():
            raise ModelFileError("[pack_weight] data: expected finite numbers, got NaN or infinity")
        return values
    codes, d, m = _blocks(source)
    values = codes * d[:, :, None]
    if m is not None:
        values = values + m[:, :, None]
    return values.reshape(source.rows, source.cols)


def _quantized_to_q8(values: F32) -> tuple[I8, F32]:
    """Per 32 values ``d = f16(amax / 127)``, ``code = clip(rint(w / d), -127, 127)``."""
    groups = values.reshape(len(values), -1, GROUP)
    with np.errstate(over="ignore"):
        d = (np.abs(groups).max(axis=2) / np.float32(Q8_MAX)).astype(np.float16).astype(np.float32)
    if not np.isfinite(d).all():
        raise ModelFileError(
            f"[pack_weight] data: expected magnitudes up to {Q8_MAX * 65504} (8-bit weights have "
            f"float16 scales), got {np.abs(values).max():g}"
        )
    quotient = np.zeros_like(groups)
    np.divide(groups, d[:, :, None], out=quotient, where=d[:, :, None] != 0)
    return np.clip(np.rint(quotient), -Q8_MAX, Q8_MAX).astype(np.int8), d


def _quantized_to_q4(values: F32) -> tuple[I8, F32]:
    """Per 32 values ``d = f16(m / -8)``, m being the one of largest magnitude (the first among
    equals); ``code = clip(rint(w / d), -8, 7)``."""
    groups = values.reshape(len(values), -1, GROUP)
    at = np.abs(groups).argmax(axis=2, keepdims=True)
    extreme = np.take_along_axis(groups, at, axis=2)[..., 0]
    with np.errstate(over="ignore"):
        d = (extreme / np.float32(Q4_MIN)).astype(np.float16).astype(np.float32)
    if not np.isfinite(d).all():
        raise ModelFileError(
            f"[pack_weight] data: expected magnitudes up to {-Q4_MIN * 65504} (4-bit weights have "
            f"float16 scales), got {np.abs(values).max():g}"
        )
    quotient = np.zeros_like(groups)
    np.divide(groups, d[:, :, None], out=quotient, where=d[:, :, None] != 0)
    return np.clip(np.rint(quotient), Q4_MIN, Q4_MAX).astype(np.int8), d


def _check_source(source: WeightSource) -> None:
    if source.cols <= 0 or source.rows <= 0 or source.cols % GROUP:
        raise ShapeError(
            f"[pack_weight] rows, cols: expected positive, cols a multiple of {GROUP}, "
            f"got {source.rows}, {source.cols}"
        )
    width, dtype = source.cols, "float32"
    if source.format != "f32":
        width, dtype = source.cols // GROUP * ROW_BYTES[source.format], "uint8"
    if source.data.dtype != dtype or source.data.shape != (source.rows, width):
        raise ShapeError(
            f"[pack_weight] data: expected {dtype} ({source.rows}, {width}), "
            f"got {source.data.dtype} {source.data.shape}"
        )


# -- kernels ------------------------------------------------------------------------------------
def project(x: F32, weight: PackedWeight) -> F32:
    """``x @ W.T``: f32 ``[T, cols]`` to f32 ``[T, rows]``.

    Quantised weights: activations become int8 per 32 values, and over groups in order
    ``acc = fma(int_dot, d * dx, acc)``, then ``acc = fma(m, sum of x, acc)`` where there is an m.
    Float weights: one fused chain over the columns.

    Raises
    ------
    NumericalError
        x holds NaN or infinity (quantised weights only).
    """
    check_f32("project", "x", x, (None, weight.cols))
    y: F32 = np.zeros((len(x), weight.rows), dtype=np.float32)
    if weight.values is not None:
        for column in range(weight.cols):
            y = fma(x[:, column, None], weight.values[column], y)
        return y
    if weight.codes is None or weight.d is None:
        raise ShapeError("[project] weight: expected codes and scales, got none")
    act = quantize_activations(x)
    for g in range(weight.cols // GROUP):
        scale = weight.d[g] * act.scales[:, g, None]
        y = fma(int_dot(act.values[:, g], weight.codes[g]), scale, y)
        if weight.m is not None:
            y = fma(weight.m[g], act.sums[:, g, None], y)
    return y


def rms_norm(x: F32, weight: F32, *, eps: float) -> F32:
    """``x / sqrt(mean(x**2) + eps) * weight``, row by row; the mean is accumulated in float64.

    Parameters
    ----------
    x : f32 ``[T, W]``
    weight : f32 ``[W]``
    """
    check_f32("rms_norm", "x", x, (None, None))
    check_f32("rms_norm", "weight", weight, (x.shape[1],))
    squares = np.square(x, dtype=np.float64).mean(axis=1, keepdims=True).astype(np.float32)
    root: F32 = np.sqrt(squares + np.float32(eps))
    normed: F32 = x * (np.float32(1) / root) * weight
    return normed


def rope(x: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32:
    """Rotates the first ``2 * P`` channels of every head in pairs, by its token's angles.

    Parameters
    ----------
    x : f32 ``[T, H, D]``; channels from ``2 * P`` on pass through
    cos, sin : f32 ``[T, P]``
    interleaved : pairs are ``(2i, 2i + 1)``; otherwise ``(i, i + P)``
    """
    check_f32("rope", "x", x, (None, None, None))
    check_f32("rope", "cos", cos, (len(x), None))
    check_f32("rope", "sin", sin, cos.shape)
    pairs = cos.shape[1]
    if 2 * pairs > x.shape[2]:
        raise ShapeError(f"[rope] cos: expected up to {x.shape[2] // 2} pairs, got {pairs}")
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = x[:, :, first], x[:, :, second]
    c, s = cos[:, None], sin[:, None]
    out: F32 = x.copy()
    out[:, :, first] = a * c - b * s
    out[:, :, second] = a * s + b * c
    return out


def gelu_mul(gate: F32, up: F32) -> F32:
    """``gelu(gate) * up`` with gelu in its tanh form, elementwise; f32 ``[T, F]``.

    ``gelu(g) = g / (1 + exp(-2 z))``, ``z = sqrt(2 / pi) * (g + 0.044715 * g**3)``: the same as
    ``g / 2 * (1 + tanh(z))``.
    """
    check_f32("gelu_mul", "gate", gate, (None, None))
    check_f32("gelu_mul", "up", up, gate.shape)
    with np.errstate(over="ignore"):  # as in silu_mul
        inner = gate + np.float32(0.044715) * (gate * gate * gate)
        share = np.float32(1) / (np.float32(1) + np.exp(np.float32(-2 * GELU_SLOPE) * inner))
    result: F32 = gate * share * up
    return result


def silu_mul(gate: F32, up: F32) -> F32:
    """``gate * sigmoid(gate) * up``, elementwise; f32 ``[T, F]``."""
    check_f32("silu_mul", "gate", gate, (None, None))
    check_f32("silu_mul", "up", up, gate.shape)
    with np.errstate(over="ignore"):  # e**-gate may be infinite: the sigmoid is then 0
        sigmoid = np.float32(1) / (np.float32(1) + np.exp(-gate))
    result: F32 = gate * sigmoid * up
    return result
