"""The safetensors header: what the library writes is read alike, and nothing wrong passes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from kvsieve.errors import ModelFileError
from kvsieve.models.safetensors import SafetensorsFile


def write(path: Path, entries: Any, data: bytes = bytes(64), *, length: int | None = None) -> Path:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + data)
    return path


def entry(dtype: str = "F32", shape: Any = (4, 4), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_files_of_the_library_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b.weight": rng.standard_normal((7, 2)).astype(np.float16),
        "scalar": np.array(3.0, np.float32),
        "empty": np.empty((0, 4), np.float32),
        "ids": np.arange(6, dtype=np.int64),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile.open(path)
    with safe_open(path, framework="numpy") as oracle:
        assert set(file.tensors) == set(oracle.keys())
        for name, info in file.tensors.items():
            want = oracle.get_tensor(name)
            assert info.shape == want.shape
            assert file.raw(name).tobytes() == want.tobytes()
            assert not file.raw(name).flags.writeable
    assert {info.ggml_type for info in file.tensors.values()} == {"F32", "F16", "I64"}
    file.close()
    with pytest.raises(ModelFileError, match="got a closed one"):
        file.raw("a")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (b"[1]", "header: expected a JSON object, got \\[1\\]"),
        (b"{", "header: expected a JSON object"),
        (b"\xff", "header: expected a JSON object"),
        (b'{"a": 1, "a": 1}', "header: expected a JSON object, got: 'a' twice"),
        (b"[" * 100_000, "header: expected a JSON object"),
        ({"a": 3}, "tensor 'a': expected an object, got 3"),
        ({"a": entry("F33")}, "tensor 'a': expected one of F64, .*got 'F33'"),
        ({"a": entry(shape=[4, -4])}, "tensor 'a': expected a shape"),
        ({"a": entry(shape=[4, 4.0])}, "tensor 'a': expected a shape"),
        ({"a": entry(shape=[1] * 9)}, "tensor 'a': expected a shape"),
        ({"a": entry(offsets=[0])}, "tensor 'a': expected two data_offsets"),
        ({"a": entry(offsets=[-64, 0])}, "tensor 'a': expected data_offsets within the 64 bytes"),
        ({"a": entry(offsets=[64, 0])}, "tensor 'a': expected data_offsets within the 64 bytes"),
        ({"a": entry(offsets=[4, 68])}, "tensor 'a': expected data_offsets within the 64 bytes"),
        ({"a": entry(shape=[4, 3])}, r"tensor 'a': expected 48 bytes for F32 \[4, 3\], got 64"),
        ({"a": entry(shape=[2**40, 2**40])}, "tensor 'a': expected .* bytes for F32"),
        (
            {"a": entry(shape=[4], offsets=[0, 16]), "b": entry(shape=[4], offsets=[12, 28])},
            "tensor 'b': expected bytes of its own, got those of 'a'",
        ),
    ],
)
def test_wrong_headers_are_refused(tmp_path: Path, entries: Any, words: str) -> None:
    path = write(tmp_path / "bad.safetensors", entries)
    with pytest.raises(ModelFileError, match=rf"bad\.safetensors: {words}"):
        SafetensorsFile.open(path)


def test_a_name_given_twice_among_very_many_is_found_soon(tmp_path: Path) -> None:
    """Comparing each of 50,000 names with all others would take half a minute."""
    names = [f'"{number}": 0' for number in range(50_000)]
    path = write(tmp_path / "many", f"{{{', '.join([*names, names[-1]])}}}".encode())
    with pytest.raises(ModelFileError, match=r"many: header: .* got: '49999' twice"):
        SafetensorsFile.open(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.touch()
    short.write_bytes(b"1234567")
    long = write(tmp_path / "long", {}, length=1 << 63)
    for path, words in (
        (empty, "got 0 bytes"),
        (short, "expected a header, got 7 bytes"),
        (long, "header: expected at most 66 bytes, got 9223372036854775808"),
        (tmp_path, "got another kind"),
        (tmp_path / "absent", "No such file"),
    ):
        with pytest.raises(ModelFileError, match=words):
            SafetensorsFile.open(path)


@pytest.mark.parametrize("size", [*range(0, 120, 3), 120])
def test_a_file_cut_anywhere_is_one_error(tmp_path: Path, size: int) -> None:
    whole = write(tmp_path / "whole", {"a": entry()}).read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[: min(size, len(whole) - 1)])
    with pytest.raises(ModelFileError, match="cut"):
        SafetensorsFile.open(cut)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 200))
def test_no_bytes_get_beyond_the_header(tmp_path_factory: Any, noise: bytes, length: int) -> None:
    path = tmp_path_factory.mktemp("noise") / "noise"
    path.write_bytes(length.to_bytes(8, "little") + noise)
    try:
        file = SafetensorsFile.open(path)
    except ModelFileError:
        return
    for info in file.tensors.values():
        assert info.offset + info.nbytes <= 8 + len(noise)
    file.close()
