"""From the bytes of a tensor to what the kernels take. The only module that imports `gguf`.

Q4_0, Q4_1, Q8_0 and F32 stay as the file has them: views of the mapping, packed by the backend.
Q5_0 and Q4_K keep their codes in blocks of another type (`models.reblock`). All others become f32
and are packed from there. Everything is read a slice of rows at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np

from kvsieve.errors import ConfigError, ModelFileError
from kvsieve.kernels.backend import WeightFormat, WeightKind, WeightSource
from kvsieve.models.gguf_header import TensorInfo
from kvsieve.models.model_file import TensorFile
from kvsieve.models.reblock import Q4_1_BYTES, Q8_0_BYTES, REBLOCKED
from kvsieve.types import F32, I32, I64, U8, AnyArray

WeightMode = Literal["auto", "q4", "q8", "f32"]
"""``auto``: 4 bits where the file has 4 bits, else 8. ``q4``: 4 bits for the matrices of
layers, ``q8``: 8 bits for all, whatever the file has. ``f32``: everything dequantised."""

GROUP = 32

_SLICE_VALUES = 1 << 20
"""Values looked at or dequantised together: bounds the memory used beside the result (4 MiB)."""


@dataclass(frozen=True, kw_only=True)
class _Encoding:
    """A tensor type: its blocks, where their floats lie, and how the backend takes them.

    ``exponent`` masks the bits of a float (u16 or u32, by ``float_bytes``) that are all set in
    NaN and infinity and in nothing else.
    """

    block_values: int
    block_bytes: int
    float_offsets: tuple[int, ...] = (0,)
    float_bytes: int = 2
    exponent: int = 0x7C00
    packs_as: WeightFormat = "f32"


_ENCODINGS: dict[str, _Encoding] = {
    "F32": _Encoding(block_values=1, block_bytes=4, float_bytes=4, exponent=0x7F800000),
    "F16": _Encoding(block_values=1, block_bytes=2),
    "BF16": _Encoding(block_values=1, block_bytes=2, exponent=0x7F80),
    "Q4_0": _Encoding(block_values=32, block_bytes=18, packs_as="q4_0"),
    "Q4_1": _Encoding(block_values=32, block_bytes=20, float_offsets=(0, 2), packs_as="q4_1"),
    "Q5_0": _Encoding(block_values=32, block_bytes=22, packs_as="q8_0"),
    "Q5_1": _Encoding(block_values=32, block_bytes=24, float_offsets=(0, 2)),
    "Q8_0": _Encoding(block_values=32, block_bytes=34, packs_as="q8_0"),
    "Q4_K": _Encoding(block_values=256, block_bytes=144, float_offsets=(0, 2), packs_as="q4_1"),
    "Q5_K": _Encoding(block_values=256, block_bytes=176, float_offsets=(0, 2)),
    "Q6_K": _Encoding(block_values=256, block_bytes=210, float_offsets=(208,)),
}

_VECTOR_TYPES = ("F32", "F16", "BF16")

_PACKED_KIND: dict[WeightFormat, WeightKind] = {
    "q4_0": "q4",
    "q4_1": "q4",
    "q8_0": "q8",
    "f32": "q8",
}

_PACKED_BLOCK_BYTES: dict[WeightFormat, int] = {
    "q4_0": 18,
    "q4_1": Q4_1_BYTES,
    "q8_0": Q8_0_BYTES,
}


def weight_source(
    file: TensorFile, name: str, *, expect: tuple[int, int], mode: WeightMode = "auto"
) -> WeightSource:
    """A matrix as the backend's `pack_weight` takes it.

    Parameters
    ----------
    file, name : where it is
    expect : ``(rows, cols)`` that the model's configuration asks for
    mode : how it will be packed: blocks that are kept as they are come as they are

    Returns
    -------
    WeightSource
        ``data`` is `ConvertedRows`, ``u8 [rows, row_bytes]`` or ``f32 [rows, cols]``.

    Raises
    ------
    ModelFileError
        If the tensor is missing, or of another shape or an unsupported type. NaN and infinity
        are found by `check_finite`.
    """
    info = check_tensor(file, name, expect=expect)
    rows, cols = expect
    encoding = _ENCODINGS[info.ggml_type]
    raw = file.raw(name).reshape(rows, -1)
    kept = encoding.packs_as
    convert: Callable[[U8], AnyArray] = partial(dequantise, ggml_type=info.ggml_type)
    width: int = cols
    dtype: np.dtype[Any] = np.dtype(np.float32)
    if kept != "f32" and weight_kind(info, mode) == _PACKED_KIND[kept]:
        convert = REBLOCKED.get(info.ggml_type, _as_it_is)
        width, dtype = cols // GROUP * _PACKED_BLOCK_BYTES[kept], np.dtype(np.uint8)
    else:
        kept = "f32"
    data = ConvertedRows(file, raw, convert, width=width, dtype=dtype)
    return WeightSource(data=data, format=kept, rows=rows, cols=cols)


def _as_it_is(raw: U8) -> U8:
    return raw


class ConvertedRows:
    """Rows of a file in the form ``[rows, width]`` that is packed, made slice by slice.

    Where the file has that form they are views of the mapping, whose pages leave memory when the
    next slice is asked for.
    """

    def __init__(
        self,
        file: TensorFile,
        raw: U8,
        convert: Callable[[U8], AnyArray],
        *,
        width: int,
        dtype: "np.dtype[Any]",
    ) -> None:
        self.shape = (len(raw), width)
        self.dtype = dtype
        self._file = file
        self._raw = raw
        self._convert = convert

    def __getitem__(self, rows: slice) -> AnyArray:
        self._file.forget_pages()
        return self._convert(self._raw[rows])


def weight_kind(info: TensorInfo, mode: WeightMode) -> WeightKind:
    """The packing that `mode` asks for a matrix."""
    if mode == "auto":
        return _PACKED_KIND[_encoding(info).packs_as]
    return mode


def packed_bytes(info: TensorInfo, mode: WeightMode) -> int:
    """Bytes of a tensor once packed; f16 scales, and for Q4_1 f16 offsets, included."""
    values = math.prod(info.shape)
    if len(info.shape) < 2 or mode == "f32":
        return 4 * values
    if weight_kind(info, mode) == "q8":
        return values * Q8_0_BYTES // GROUP
    with_minimum = _encoding(info).packs_as == "q4_1"
    return values * _PACKED_BLOCK_BYTES["q4_1" if with_minimum else "q4_0"] // GROUP


def check_mode(function: str, mode: str) -> None:
    """Raise ConfigError unless `mode` is a `WeightMode`."""
    if mode not in get_args(WeightMode):
        raise ConfigError(
            f"[{function}] weights: expected one of {', '.join(get_args(WeightMode))}, got {mode!r}"
        )


def vector(file: TensorFile, name: str, *, length: int, offset: float = 0.0) -> F32:
    """A vector plus `offset` as ``f32 [length]``, copied out of the file (F32, F16 or BF16)."""
    info = check_tensor(file, name, expect=(length,))
    values = np.array(dequantise(file.raw(name)[None], info.ggml_type)[0])
    return values + np.float32(offset) if offset else values


def check_tensor(file: TensorFile, name: str, *, expect: tuple[int, ...]) -> TensorInfo:
    """The tensor's entry, after its shape and type have been checked."""
    info = file.tensors.get(name)
    if info is None:
        raise ModelFileError(f"[weights] {file.path}: expected a tensor {name!r}, got none")
    if info.shape != expect:
        raise _error(file, name, f"shape {expect}", info.shape)
    supported = _VECTOR_TYPES if len(expect) == 1 else tuple(_ENCODINGS)
    if info.ggml_type not in supported:
        raise _error(file, name, f"a type among {', '.join(supported)}", info.ggml_type)
    if len(expect) == 2 and expect[1] % GROUP:
        raise _error(file, name, f"rows of a multiple of {GROUP} values", expect[1])
    return info


def check_finite(file: TensorFile, names: Iterable[str]) -> None:
    """Raise `ModelFileError` naming the first of `names` that holds NaN or infinity.

    Looks at every float of the tensors (values, or the scales of quantised blocks; the value of
    a block with finite scales is finite), in place and a slice at a time.
    """
    for name in names:
        info = file.tensors[name]
        encoding = _encoding(info)
        raw = file.raw(name)
        step = max(1, _SLICE_VALUES // encoding.block_values)
        for floats in _float_columns(raw, encoding):
            for start in range(0, len(floats), step):
                exponents = floats[start : start + step] & encoding.exponent
                bad = np.flatnonzero(exponents == encoding.exponent)
                if bad.size:
                    place = (start + int(bad[0])) * encoding.block_values
                    row, col = divmod(place, info.shape[-1])
                    raise _error(
                        file, name, "finite values", f"NaN or infinity at row {row}, column {col}"
                    )
                file.forget_pages()


def _float_columns(raw: U8, encoding: _Encoding) -> Iterator[AnyArray]:
    """For each float of a block: its bits in every block, as a strided view ``[blocks]``."""
    num_blocks = raw.size // encoding.block_bytes
    for offset in encoding.float_offsets:
        yield np.ndarray(
            (num_blocks,),
            f"<u{encoding.float_bytes}",
            buffer=raw.data,
            offset=offset,
            strides=(encoding.block_bytes,),
        )


def dequantise(raw: U8, ggml_type: str) -> F32:
    """Rows of file bytes as numbers.

    Parameters
    ----------
    raw : u8 [T, row_bytes], C-contiguous
    ggml_type : one of the supported types

    Returns
    -------
    f32 [T, cols]; a view of `raw` for F32
    """
    if ggml_type == "F32":
        return raw.view("<f4")
    if ggml_type == "F16":
        return raw.view("<f2").astype(np.float32)
    if ggml_type == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if ggml_type not in ("Q8_0", "Q4_0", "Q4_1"):
        # Imported here: it takes a tenth of a second, and few files need it.
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return cast(F32, dequantize(raw, GGMLQuantizationType[ggml_type]))
    blocks = raw.reshape(-1, _ENCODINGS[ggml_type].block_bytes)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if ggml_type == "Q8_0":
        values: F32 = blocks[:, 2:].view(np.int8) * scale
    else:
        first_code = 2 if ggml_type == "Q4_0" else 4
        codes = np.empty((len(blocks), GROUP), np.float32)
        np.bitwise_and(blocks[:, first_code:], 15, out=codes[:, : GROUP // 2], casting="unsafe")
        np.right_shift(blocks[:, first_code:], 4, out=codes[:, GROUP // 2 :], casting="unsafe")
        if ggml_type == "Q4_0":
            values = (codes - np.float32(8)) * scale
        else:
            values = codes * scale + blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    return values.reshape(len(raw), -1)


class EmbeddingTable:
    """Rows of the embedding times `scale`, decoded from the mapping as they are asked for."""

    def __init__(
        self, file: TensorFile, name: str, *, expect: tuple[int, int], scale: float = 1.0
    ) -> None:
        self._scale = np.float32(scale)
        info = check_tensor(file, name, expect=expect)
        self.num_rows, self.width = expect
        self._type = info.ggml_type
        self._raw = file.raw(name).reshape(self.num_rows, -1)

    def rows(self, ids: I32 | I64) -> F32:
        """Embeddings ``f32 [T, W]`` (a new array) of token ids ``[T]``.

        Raises
        ------
        ConfigError
            If an id is negative or not below `num_rows`.
        """
        if not ids.size:
            return np.empty((0, self.width), np.float32)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.num_rows:
            bad = ids[(ids < 0) | (ids >= self.num_rows)][0]
            raise ConfigError(
                f"[EmbeddingTable.rows] ids: expected token ids below {self.num_rows}, got {bad}"
            )
        values = dequantise(self._raw[ids], self._type)
        return values * self._scale if self._scale != 1 else values


def _encoding(info: TensorInfo) -> _Encoding:
    if info.ggml_type not in _ENCODINGS:
        raise ModelFileError(
            f"[weights] tensor {info.name!r}: expected a type among {', '.join(_ENCODINGS)}, "
            f"got {info.ggml_type}"
        )
    return _ENCODINGS[info.ggml_type]


def _error(file: TensorFile, name: str, expected: str, got: object) -> ModelFileError:
    return ModelFileError(f"[weights] {file.path}: tensor {name!r}: expected {expected}, got {got}")
