"""The bounded header reader: what it accepts equals what was written; everything else is named."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.errors import ModelFileError
from kvsieve.models.gguf_header import GGML_TYPES, Header, read_header
from tests.models import gguf_bytes as g
from tests.tiny_model import write_tiny_gguf

KINDS = {
    g.U8: st.integers(0, 2**8 - 1),
    g.I8: st.integers(-(2**7), 2**7 - 1),
    g.U16: st.integers(0, 2**16 - 1),
    g.I16: st.integers(-(2**15), 2**15 - 1),
    g.U32: st.integers(0, 2**32 - 1),
    g.I32: st.integers(-(2**31), 2**31 - 1),
    g.F32: st.floats(width=32, allow_nan=False),
    g.BOOL: st.booleans(),
    g.STRING: st.text(max_size=8),
    g.U64: st.integers(0, 2**64 - 1),
    g.I64: st.integers(-(2**63), 2**63 - 1),
    g.F64: st.floats(allow_nan=False),
}


def parse(data: bytes) -> Header:
    return read_header(data, source="x.gguf")


def refused(data: bytes, *words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        parse(data)
    message = str(caught.value)
    assert message.startswith("[GgufFile] x.gguf: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def label(value: object) -> str:
    """Test ids: the words that are looked for, never raw bytes."""
    return " ".join(value) if isinstance(value, tuple) else "file"


def sample_file() -> bytes:
    """Every kind of value, and tensors of three types; the header ends off the alignment."""
    keys = [
        g.key("general.architecture", g.STRING, "llama"),
        g.key("u8", g.U8, 200),
        g.key("i16", g.I16, -3),
        g.key("u32", g.U32, 7),
        g.key("f32", g.F32, 0.5),
        g.key("yes", g.BOOL, 1),
        g.key("u64", g.U64, 2**40),
        g.array("floats", g.F32, [1.0, 2.0, 3.0]),
        g.array("bools", g.BOOL, [0, 1]),
        g.array("words", g.STRING, ["a", "", "déjà", "x" * 300]),
    ]
    tensors = [
        g.tensor("matrix", [64, 3], kind=8, offset=0),  # Q8_0: 3 rows of 2 blocks of 34 bytes
        g.tensor("vector", [5], kind=0, offset=224),
        g.tensor("cube", [2, 3, 4], kind=1, offset=256),
    ]
    return g.gguf_file(keys, tensors, data=bytes(range(256)) + b"\1" * 48)


def test_values_shapes_and_places_of_a_sample() -> None:
    data = sample_file()
    header = parse(data)
    metadata = header.metadata
    assert metadata["general.architecture"] == "llama"
    assert [metadata[name] for name in ("u8", "i16", "u32", "f32")] == [200, -3, 7, 0.5]
    assert metadata["yes"] is True
    assert metadata["u64"] == 2**40
    np.testing.assert_array_equal(metadata["floats"], np.array([1, 2, 3], np.float32))
    assert metadata["floats"].dtype == np.float32
    np.testing.assert_array_equal(metadata["bools"], [False, True])
    assert metadata["bools"].dtype == np.bool_
    assert metadata["words"] == ["a", "", "déjà", "x" * 300]

    start = len(data) - 256 - 48
    assert header.data_start == start
    assert start % 32 == 0
    assert start - 32 < header.header_bytes < start
    matrix, vector, cube = header.tensors.values()
    assert (matrix.name, matrix.shape, matrix.ggml_type) == ("matrix", (3, 64), "Q8_0")
    assert (matrix.offset, matrix.nbytes) == (start, 3 * 2 * 34)
    assert (vector.shape, vector.offset, vector.nbytes) == ((5,), start + 224, 20)
    assert (cube.shape, cube.ggml_type, cube.nbytes) == ((4, 3, 2), "F16", 48)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "general.alignment"),
        st.sampled_from(sorted(KINDS)).flatmap(
            lambda kind: st.tuples(
                st.just(kind), st.one_of(KINDS[kind], st.lists(KINDS[kind], max_size=5))
            )
        ),
        max_size=6,
    )
)
def test_any_metadata_comes_back(metadata: dict[str, tuple[int, object]]) -> None:
    keys = [
        g.array(name, kind, value) if isinstance(value, list) else g.key(name, kind, value)
        for name, (kind, value) in metadata.items()
    ]
    found = parse(g.gguf_file(keys)).metadata
    assert list(found) == list(metadata)
    for name, (kind, value) in metadata.items():
        got = found[name]
        if isinstance(value, list):
            assert list(got) == value
            assert isinstance(got, list) == (kind == g.STRING)
        else:
            assert type(got) is type(value)
            assert got == value


def test_type_table_equals_the_gguf_packages() -> None:
    # The package may know types that are newer than our table.
    for type_id, (name, values, size) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (values, size)


def test_agrees_with_the_gguf_packages_reader(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1", tie=False)
    header = parse(path.read_bytes())
    oracle = gguf.GGUFReader(path)
    fields = {name: f for name, f in oracle.fields.items() if not name.startswith("GGUF.")}
    assert set(header.metadata) == set(fields)
    for name, field in fields.items():
        got = header.metadata[name]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == field.contents()
    assert list(header.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert info.ggml_type == tensor.tensor_type.name
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)


# -- GGF-01: files cut short, changed, or of another kind (the rest is in test_gguf.py) --------


def test_cut_at_every_byte_of_the_header_and_in_the_data() -> None:
    data = sample_file()
    header_bytes = parse(data).header_bytes
    for size in range(header_bytes + 1):
        with pytest.raises(ModelFileError, match=r"^\[GgufFile\] x.gguf: "):
            parse(data[:size])
    for size in np.linspace(header_bytes, len(data) - 1, 40).astype(int):
        refused(data[:size], "tensor '", "truncated", "bytes")


def test_any_changed_byte_of_the_header_is_refused_or_harmless() -> None:
    data = sample_file()
    header_bytes = parse(data).header_bytes
    outcomes = {"refused": 0, "read": 0}
    for place in range(header_bytes):
        for value in {0, 0xFF, data[place] ^ 0x80, data[place] ^ 1, (data[place] + 7) & 0xFF}:
            changed = data[:place] + bytes([value]) + data[place + 1 :]
            try:
                header = parse(changed)
            except ModelFileError:
                outcomes["refused"] += 1
                continue
            outcomes["read"] += 1
            ends = header.data_start
            for info in sorted(header.tensors.values(), key=lambda info: info.offset):
                assert info.offset >= ends
                ends = info.offset + info.nbytes
                assert ends <= len(data)
    assert min(outcomes.values()) > 1000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_noise_after_the_magic_is_refused_or_read(noise: bytes) -> None:
    for start in (b"", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + struct.pack("<QQ", 1, 2)):
        try:
            parse(start + noise)
        except ModelFileError:
            continue


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ("an empty file",)),
        (b"GGU", ("GGUF",)),
        (b"GGML" + b"\0" * 60, ("b'GGML'",)),
        (b"GGUX" + b"\0" * 60, ("b'GGUX'",)),
        (b"<!DOCTYPE html>", ("b'<!DO'",)),
        (b"FUGG\0\0\0\3" + b"\0" * 60, ("b'FUGG'",)),
        (g.gguf_file(version=struct.pack("<I", 1)), ("version", "2 or 3", "got 1")),
        (g.gguf_file(version=struct.pack("<I", 4)), ("version", "got 4")),
        (g.gguf_file(version=struct.pack(">I", 3)), ("version", "big-endian 3")),
    ],
    ids=label,
)
def test_files_of_another_kind(data: bytes, words: tuple[str, ...]) -> None:
    refused(data, *words)


def test_version_2_is_read_like_version_3() -> None:
    assert parse(g.gguf_file([g.key("a", g.U8, 1)], version=struct.pack("<I", 2))).version == 2


# -- counts and lengths beyond the file ------------------------------------------------------

HUGE = (2**31, 2**40, 2**61 + 1, 2**63, 2**64 - 1)


@pytest.mark.parametrize("huge", HUGE)
def test_huge_counts_are_refused_before_anything_is_allocated(huge: int) -> None:
    length = struct.pack("<Q", huge)
    cases = {
        "number of tensors": g.gguf_file(num_tensors=huge),
        "number of keys": g.gguf_file([g.key("a", g.U8, 1)], num_keys=huge),
        "length of a key": g.gguf_file([length + b"abc"]),
        "length of value of 'a'": g.gguf_file(
            [g.text("a") + struct.pack("<I", g.STRING) + length + b"abc"]
        ),
        "length of value of 'numbers'": g.gguf_file([g.array("numbers", g.U8, [1], count=huge)]),
        "length of value of 'wide'": g.gguf_file([g.array("wide", g.F64, [1], count=huge)]),
        "length of value of 'words'": g.gguf_file([g.array("words", g.STRING, ["a"], count=huge)]),
        "length of entry 1 of value of 'words'": g.gguf_file(
            [g.array("words", g.STRING, ["a"], count=2) + length + b"abc"]
        ),
        "length of a tensor name": g.gguf_file(tensors=[length + b"abc" * 20]),
    }
    for what, data in cases.items():
        tracemalloc.start()
        refused(data, what, str(huge))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20, what


def test_a_count_just_beyond_the_file_is_refused() -> None:
    # 8 values would fit in 64 bytes of data; 9 would not.
    def with_count(count: int) -> bytes:
        return g.gguf_file([g.array("n", g.U64, [0] * 8, count=count)], alignment=1)

    assert len(parse(with_count(8)).metadata["n"]) == 8
    refused(with_count(9), "at most 8")
    fitting = g.gguf_file([g.array("w", g.STRING, [""] * 3, count=3)], alignment=1)
    assert parse(fitting).metadata["w"] == ["", "", ""]
    refused(g.gguf_file([g.array("w", g.STRING, [""] * 3, count=4)], alignment=1), "at most 3")


# -- keys and values -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [13, 255, 2**31, 2**32 - 1])
def test_unknown_value_types(kind: int) -> None:
    refused(g.gguf_file([g.text("a") + struct.pack("<I", kind) + b"\0" * 64]), "'a'", str(kind))
    nested = g.text("a") + struct.pack("<II", g.ARRAY, kind) + b"\0" * 64
    refused(g.gguf_file([nested]), "element type of value of 'a'", str(kind))


def test_arrays_of_arrays_are_refused() -> None:
    inner = struct.pack("<IIQ", g.ARRAY, g.ARRAY, 1) + struct.pack("<IQ", g.U8, 1) + b"\1"
    refused(g.gguf_file([g.text("a") + inner]), "an array inside an array")


def test_keys_must_be_named_once_in_utf8() -> None:
    refused(g.gguf_file([g.key("", g.U8, 1)]), "a key", "empty")
    refused(g.gguf_file([g.key("a", g.U8, 1), g.key("a", g.U8, 2)]), "'a'", "twice")
    refused(g.gguf_file([g.key(b"\xff", g.U8, 1)]), "a key", "UTF-8")
    refused(g.gguf_file([g.key("a", g.STRING, b"ok\xff")]), "value of 'a'", "UTF-8")
    refused(g.gguf_file([g.array("a", g.STRING, ["ok", b"\xc3"])]), "entry 1 of value of 'a'")


def test_bools_must_be_0_or_1() -> None:
    refused(g.gguf_file([g.key("flag", g.BOOL, 2)]), "value of 'flag'", "got 2")
    refused(g.gguf_file([g.array("flags", g.BOOL, [0, 1, 255])]), "value of 'flags'", "255")


# -- GGF-03: alignment ------------------------------------------------------------------------


@pytest.mark.parametrize(("alignment", "start"), [(16, 48), (None, 64), (64, 64)])
def test_data_starts_at_the_next_multiple_of_the_alignment(
    alignment: int | None, start: int
) -> None:
    keys = [] if alignment is None else [g.key("general.alignment", g.U32, alignment)]
    step = alignment or 32
    tensors = [g.tensor(name, [4], offset=i * step) for i, name in enumerate("abc")]
    bare = len(g.gguf_file([*keys, g.key("pad", g.STRING, "")], tensors, alignment=1))
    padding = "p" * ((48 - bare) % 64)
    parts = [name.encode() * 16 + b"\0" * (step - 16) for name in "abc"]
    data = g.gguf_file(
        [*keys, g.key("pad", g.STRING, padding)], tensors, data=b"".join(parts), alignment=step
    )
    header = parse(data)
    assert header.header_bytes % 64 == 48
    assert header.data_start % 64 == start % 64
    for name, info in header.tensors.items():
        assert data[info.offset : info.offset + info.nbytes] == name.encode() * 16


@pytest.mark.parametrize("value", [0, 1, 3, 4, 24, 2**17, 2**31, 2**32 - 1])
def test_alignment_must_be_a_usable_power_of_two(value: int) -> None:
    refused(
        g.gguf_file([g.key("general.alignment", g.U32, value)]), "general.alignment", str(value)
    )


@pytest.mark.parametrize(
    "key",
    [
        g.key("general.alignment", g.I32, -32),
        g.key("general.alignment", g.I32, 32),
        g.key("general.alignment", g.U64, 32),
        g.key("general.alignment", g.F32, 32.0),
        g.key("general.alignment", g.BOOL, 1),
        g.key("general.alignment", g.STRING, "32"),
        g.array("general.alignment", g.U32, [32]),
    ],
    ids=label,
)
def test_alignment_must_be_a_u32(key: bytes) -> None:
    refused(g.gguf_file([key]), "general.alignment", "u32")


# -- tensors ---------------------------------------------------------------------------------


def one_tensor(entry: bytes, *, data_bytes: int = 64) -> bytes:
    return g.gguf_file(tensors=[entry], data=b"\0" * data_bytes)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (g.tensor("", [4]), ("a tensor name", "empty")),
        (g.tensor("n" * 65, [4]), ("length of a tensor name", "64")),
        (g.tensor(b"\xfe", [4]), ("a tensor name", "UTF-8")),
        (g.tensor("t", [], dims=0), ("dimensions of tensor 't'", "got 0")),
        (g.tensor("t", [1] * 5), ("dimensions of tensor 't'", "got 5")),
        (g.tensor("t", [1], dims=2**32 - 1), ("dimensions of tensor 't'",)),
        (g.tensor("t", [4, 0]), ("sizes of tensor 't'", "positive")),
        (g.tensor("t", [-4]), ("sizes of tensor 't'", "positive")),
        (g.tensor("t", [2**42 + 1, 2**42 + 1]), ("tensor 't'", "truncated")),
        (g.tensor("t", [2**62, 2**62, 2**62, 4]), ("tensor 't'",)),
        (g.tensor("t", [2**32, 2**30]), ("tensor 't'", str(2**64))),  # 0 in 64 bits
        (g.tensor("t", [16], kind=4), ("type of tensor 't'", "got 4")),
        (g.tensor("t", [16], kind=2**31), ("type of tensor 't'",)),
        (g.tensor("t", [33], kind=8), ("row of tensor 't'", "multiple of 32", "33")),
        (g.tensor("t", [128], kind=12), ("row of tensor 't'", "multiple of 256", "128")),
        (g.tensor("t", [4], offset=4), ("offset of tensor 't'", "multiple of 32")),
        (g.tensor("t", [4], offset=64), ("tensor 't'", "16 bytes at offset 64")),
        (g.tensor("t", [4], offset=2**64 - 32), ("tensor 't'",)),  # offset + size wraps
        (g.tensor("t", [17]), ("tensor 't'", "68 bytes", "64 bytes")),
    ],
    ids=label,
)
def test_tensor_entries_that_do_not_fit(entry: bytes, words: tuple[str, ...]) -> None:
    refused(one_tensor(entry), *words)


def test_a_tensor_may_end_exactly_with_the_file() -> None:
    assert parse(one_tensor(g.tensor("t", [16]))).tensors["t"].nbytes == 64
    assert parse(one_tensor(g.tensor("t", [8], offset=32))).tensors["t"].nbytes == 32


def test_tensors_may_not_overlap_or_share_a_name() -> None:
    both = [g.tensor("a", [9], offset=0), g.tensor("b", [4], offset=32)]
    refused(g.gguf_file(tensors=both, data=b"\0" * 64), "tensor 'b'", "'a'", "4 bytes")
    same = [g.tensor("a", [8], offset=32), g.tensor("b", [8], offset=32)]
    refused(g.gguf_file(tensors=same, data=b"\0" * 64), "overlap of 32 bytes")
    twice = [g.tensor("a", [8], offset=0), g.tensor("a", [8], offset=32)]
    refused(g.gguf_file(tensors=twice, data=b"\0" * 64), "'a'", "twice")
