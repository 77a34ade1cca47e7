"""Tensors as the kernels take them, against the `gguf` package's own reader and dequantiser."""

import timeit
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvsieve.errors import ConfigError, ModelFileError
from kvsieve.kernels.backend import WeightKind, WeightSource
from kvsieve.kernels.native import NativeBackend
from kvsieve.kernels.reference.backend import ReferenceBackend
from kvsieve.models.gguf import GgufFile
from kvsieve.models.weights import (
    EmbeddingTable,
    check_finite,
    check_tensor,
    dequantise,
    packed_bytes,
    vector,
    weight_kind,
    weight_source,
)
from tests.models.test_gguf import smollm2
from tests.tiny_model import WeightType, encode_weight

PACKED = ("Q4_0", "Q4_1", "Q8_0")
REBLOCKED = {"Q5_0": "Q8_0", "Q4_K": "Q4_1"}
EXPANDED = ("F16", "BF16", "Q5_1", "Q5_K", "Q6_K")
ALL: tuple[WeightType, ...] = ("F32", *PACKED, *REBLOCKED, *EXPANDED)  # type: ignore[assignment]


def write(path: Path, tensors: dict[str, tuple[np.ndarray, WeightType]]) -> GgufFile:
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, (values, kind) in tensors.items():
        raw = values if values.dtype == np.uint8 else encode_weight(values, kind, seed=len(name))
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


def random_matrix(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(rows * cols).standard_normal((rows, cols), dtype=np.float32)


def one(tmp_path: Path, kind: WeightType, *, rows: int = 37, cols: int = 512) -> GgufFile:
    return write(tmp_path / "one.gguf", {"w": (random_matrix(rows, cols), kind)})


def oracle(file: GgufFile, name: str) -> np.ndarray:
    tensor = next(t for t in gguf.GGUFReader(file.path).tensors if t.name == name)
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def rows_of(source: WeightSource, *, step: int = 37) -> np.ndarray:
    """The matrix, taken as the backends take it."""
    return np.concatenate([source.data[first : first + step] for first in range(0, 37, step)])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("step", [37, 16, 1])
def test_f32_mode_equals_the_gguf_package(tmp_path: Path, kind: WeightType, step: int) -> None:
    file = one(tmp_path, kind)
    source = weight_source(file, "w", expect=(37, 512), mode="f32")
    assert (source.format, source.rows, source.cols) == ("f32", 37, 512)
    assert source.data.dtype == np.float32
    assert source.data.shape == (37, 512)
    got = rows_of(source, step=step)
    np.testing.assert_array_equal(got, oracle(file, "w"))
    assert got.std() > 0.01


@pytest.mark.parametrize("kind", PACKED)
def test_packed_formats_are_views_of_the_file(tmp_path: Path, kind: WeightType) -> None:
    file = one(tmp_path, kind)
    source = weight_source(file, "w", expect=(37, 512))
    assert source.format == kind.lower()
    rows = source.data[5:]
    assert np.shares_memory(rows, file.raw("w"))
    assert not rows.flags.writeable
    assert source.data.dtype == np.uint8
    assert rows_of(source).tobytes() == file.raw("w").tobytes()
    assert source.data.shape == (37, file.tensors["w"].nbytes // 37)


@pytest.mark.parametrize("kind", ["F32", *EXPANDED])
def test_other_types_come_dequantised(tmp_path: Path, kind: WeightType) -> None:
    file = one(tmp_path, kind)
    source = weight_source(file, "w", expect=(37, 512))
    assert source.format == "f32"
    np.testing.assert_array_equal(rows_of(source), oracle(file, "w"))
    assert np.shares_memory(source.data[:], file.raw("w")) == (kind == "F32")


@pytest.mark.parametrize("kind", REBLOCKED)
@pytest.mark.parametrize("step", [37, 16, 1])
def test_codes_are_kept_in_blocks_of_another_type(
    tmp_path: Path, kind: WeightType, step: int
) -> None:
    file = one(tmp_path, kind)
    source = weight_source(file, "w", expect=(37, 512))
    packed = gguf.GGMLQuantizationType[REBLOCKED[kind]]
    assert source.format == REBLOCKED[kind].lower()
    assert source.data.dtype == np.uint8
    blocks = rows_of(source, step=step)
    assert blocks.shape == source.data.shape
    want = oracle(file, "w")
    np.testing.assert_allclose(gguf.dequantize(blocks, packed), want, atol=np.ptp(want) * 2**-11)


@pytest.mark.parametrize("kind", REBLOCKED)
@pytest.mark.parametrize("backend", [NativeBackend(threads=1), ReferenceBackend()])
def test_backends_pack_them_slice_by_slice(
    tmp_path: Path, kind: WeightType, backend: NativeBackend | ReferenceBackend
) -> None:
    """Rows of 127 in one place and 0 elsewhere are exact in 8 bits: each gives one column."""
    file = one(tmp_path, kind)
    source = weight_source(file, "w", expect=(37, 512))
    weight = backend.pack_weight(source, kind=weight_kind(file.tensors["w"], "auto"))
    columns = backend.project(127 * np.eye(512, dtype=np.float32), weight) / 127
    want = oracle(file, "w").T
    np.testing.assert_allclose(columns, want, rtol=0, atol=np.ptp(want) * 2**-11)


def test_kinds() -> None:
    wanted: dict[str, WeightKind] = {"Q4_0": "q4", "Q4_1": "q4", "Q4_K": "q4"}
    bytes_of_256 = {"Q4_0": 144, "Q4_1": 160, "Q4_K": 160}
    from kvsieve.models.gguf import TensorInfo

    for kind in ALL:
        info = TensorInfo(name="w", shape=(1, 256), ggml_type=kind, offset=0, nbytes=1)
        assert weight_kind(info, "auto") == wanted.get(kind, "q8")
        for mode in ("q4", "q8", "f32"):
            assert weight_kind(info, mode) == mode
        assert packed_bytes(info, "auto") == bytes_of_256.get(kind, 272)
        assert packed_bytes(info, "q4") == bytes_of_256.get(kind, 144)
        assert packed_bytes(info, "q8") == 272
        assert packed_bytes(info, "f32") == 1024


def test_a_mode_keeps_blocks_only_where_it_asks_for_their_kind(tmp_path: Path) -> None:
    formats = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0", "Q5_0": "q8_0", "Q4_K": "q4_1"}
    four = {"Q4_0", "Q4_1", "Q4_K"}
    keeps = {"auto": set(formats), "q4": four, "q8": {"Q8_0", "Q5_0"}, "f32": set()}
    for kind in ALL:
        file = one(tmp_path, kind)
        for mode, kept in keeps.items():
            source = weight_source(file, "w", expect=(37, 512), mode=mode)  # type: ignore[arg-type]
            assert source.format == (formats[kind] if kind in kept else "f32")


def test_decoding_by_hand() -> None:
    # d = 2; codes 0..15 in the low nibbles (values 0..15), 15..0 in the high ones.
    low = np.arange(16, dtype=np.uint8)
    codes = low | ((15 - low) << 4)
    d, m = np.array([2.0], "<f2").view(np.uint8), np.array([-0.5], "<f2").view(np.uint8)
    unsigned = np.concatenate([low, 15 - low]).astype(np.float32)
    q4_0 = np.concatenate([d, codes])[None]
    np.testing.assert_array_equal(dequantise(q4_0, "Q4_0")[0], 2 * (unsigned - 8))
    q4_1 = np.concatenate([d, m, codes])[None]
    np.testing.assert_array_equal(dequantise(q4_1, "Q4_1")[0], 2 * unsigned - 0.5)
    signed = np.arange(-16, 16, dtype=np.int8)
    q8_0 = np.concatenate([d, signed.view(np.uint8)])[None]
    np.testing.assert_array_equal(dequantise(q8_0, "Q8_0")[0], 2 * signed.astype(np.float32))
    bf16 = np.array([[0x80, 0x3F, 0x00, 0xC1]], np.uint8)
    np.testing.assert_array_equal(dequantise(bf16, "BF16")[0], [1.0, -8.0])


def test_q6_k_by_hand() -> None:
    # All codes 33 (1 after the offset of 32), scale of sub-block j is j + 1, d = 0.5.
    block = np.zeros(210, np.uint8)
    block[:128] = 0x11  # low four bits 1
    block[128:192] = 0b10101010  # high two bits 2: 2 * 16 + 1 = 33
    block[192:208] = np.arange(1, 17)
    block[208:] = np.array([0.5], "<f2").view(np.uint8)
    want = np.repeat(np.arange(1, 17) * 0.5, 16)
    np.testing.assert_array_equal(dequantise(block[None], "Q6_K")[0], want)


# -- shapes and types ------------------------------------------------------------------------


def test_missing_misshapen_and_unsupported_tensors(tmp_path: Path) -> None:
    odd = np.zeros((4, 40), np.float32)
    unsupported = np.zeros((4, 36), np.uint8)  # two IQ4_NL blocks of 18 bytes a row
    file = write(
        tmp_path / "odd.gguf",
        {
            "w": (random_matrix(4, 64), "F32"),
            "odd": (odd, "F32"),
            "old": (unsupported, "IQ4_NL"),  # type: ignore[dict-item]
            "v": (random_matrix(1, 64)[0][None], "F32"),
        },
    )
    cases = [
        ("absent", (4, 64), "a tensor 'absent', got none"),
        ("w", (64, 4), r"tensor 'w': expected shape \(64, 4\), got \(4, 64\)"),
        ("odd", (4, 40), "tensor 'odd': expected rows of a multiple of 32 values, got 40"),
        ("old", (4, 64), "tensor 'old': expected a type among F32, .*Q6_K, got IQ4_NL"),
    ]
    for name, shape, message in cases:
        with pytest.raises(ModelFileError, match=message) as caught:
            weight_source(file, name, expect=shape)
        assert "odd.gguf" in str(caught.value)
    with pytest.raises(ModelFileError, match="shape"):
        vector(file, "w", length=64)
    assert check_tensor(file, "w", expect=(4, 64)).ggml_type == "F32"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_vectors_are_copies(tmp_path: Path, kind: str) -> None:
    values = np.array([1.5, -2.0, 0.25, 8.0], np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(str(tmp_path / "v.gguf"), "llama")
    if kind == "BF16":
        writer.add_tensor("v", raw.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor("v", raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = vector(GgufFile.open(tmp_path / "v.gguf"), "v", length=4)
    np.testing.assert_array_equal(got, values)
    assert got.flags.owndata
    assert got.flags.writeable


# -- NaN and infinity ------------------------------------------------------------------------

FLOATS: dict[WeightType, list[int]] = {
    # bytes at which a float of a block starts
    "F32": [0], "F16": [0], "BF16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0],
    "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
PATTERNS = {
    "F32": [np.array([v], "<f4") for v in (np.nan, np.inf, -np.inf)],
    "BF16": [np.array([v], "<u2") for v in (0x7FC0, 0x7F80, 0xFF80, 0x7F81)],
}
HALF = [np.array([v], "<f2") for v in (np.nan, np.inf, -np.inf)]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("slice_values", [1 << 20, 300])
def test_one_bad_float_anywhere_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: WeightType, slice_values: int
) -> None:
    monkeypatch.setattr("kvsieve.models.weights._SLICE_VALUES", slice_values)
    good = encode_weight(random_matrix(5, 512), kind)
    check_finite(write(tmp_path / "good.gguf", {"w": (good, kind)}), ["w"])
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for row, block in ((0, 0), (4, 512 // values - 1), (2, 1)):
        for offset in FLOATS[kind]:
            for pattern in PATTERNS.get(kind, HALF):
                raw = good.copy()
                at = block * size + offset
                raw[row, at : at + pattern.nbytes] = pattern.view(np.uint8)
                file = write(tmp_path / "bad.gguf", {"fine": (good, kind), "w": (raw, kind)})
                place = f"row {row}, column {block * values}"
                with pytest.raises(ModelFileError, match=f"'w': expected finite.*{place}$"):
                    check_finite(file, file.tensors)


def test_large_finite_numbers_and_codes_of_any_value_are_fine(tmp_path: Path) -> None:
    f32 = np.full((2, 32), np.finfo(np.float32).max, np.float32)
    raw = np.full((2, 34), 0xFF, np.uint8)  # codes 0xFF, and scales:
    raw[:, :2] = np.array([65504.0], "<f2").view(np.uint8)
    file = write(tmp_path / "large.gguf", {"f": (f32, "F32"), "q": (raw, "Q8_0")})
    check_finite(file, file.tensors)


# -- embedding -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_embedding_rows(tmp_path: Path, kind: WeightType) -> None:
    file = one(tmp_path, kind)
    table = EmbeddingTable(file, "w", expect=(37, 512))
    assert (table.num_rows, table.width) == (37, 512)
    ids = np.array([36, 0, 5, 5, 17], np.int32)
    rows = table.rows(ids)
    assert rows.flags.c_contiguous
    assert rows.flags.writeable
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, oracle(file, "w")[ids])
    rows[:] = 0
    np.testing.assert_array_equal(table.rows(ids), oracle(file, "w")[ids])
    for bad in (37, -1):
        with pytest.raises(ConfigError, match=rf"token ids below 37, got {bad}"):
            table.rows(np.array([0, bad], np.int32))
    assert table.rows(np.array([], np.int32)).shape == (0, 512)


def test_one_row_of_the_real_embedding_is_quick_and_right() -> None:
    file = GgufFile.open(smollm2())
    table = EmbeddingTable(file, "token_embd.weight", expect=(49152, 576))
    ids = np.array([12345], np.int32)
    raw = file.raw("token_embd.weight").reshape(49152, -1)[ids]
    want = gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(table.rows(ids), want)
    # 12 us measured; ten times that still tells a row from the whole table.
    assert min(timeit.repeat(lambda: table.rows(ids), number=50, repeat=10)) / 50 < 120e-6
