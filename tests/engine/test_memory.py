from pathlib import Path
from typing import Any

import pytest

from kvsieve.engine.memory import (
    MemoryNeed,
    available_memory,
    cgroup_room,
    check_memory,
    weights_bytes,
)
from kvsieve.errors import CapacityError
from kvsieve.models.model_file import open_model_file, read_config
from tests.checkpoints import write_folder
from tests.tiny_model import write_tiny_gguf

MIB = 2**20


def bytes_of(path: Path, mode: str = "auto") -> int:
    file = open_model_file(path)
    return weights_bytes(file.tensors, read_config(file), mode)  # type: ignore[arg-type]


# A layer of the tiny model: 7 matrices of 24,576 + 6,144 values, 2 norms; then the last norm.
MATRICES = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
VECTORS = 4 * (2 * 2 * 64 + 64)
TABLE = 288 * 64


@pytest.mark.parametrize(
    ("kind", "mode", "layer_bits", "table_bits"),
    [
        ("Q4_0", "auto", 4.5, 4.5),
        ("Q4_1", "auto", 5, 5),
        ("Q8_0", "auto", 8.5, 8.5),
        ("F32", "auto", 8.5, 8.5),
        ("BF16", "q8", 8.5, 8.5),
        ("BF16", "q4", 4.5, 8.5),
        ("Q4_1", "q4", 5, 5),
        ("Q4_0", "q8", 8.5, 8.5),
        ("Q8_0", "f32", 32, 32),
    ],
)
def test_packed_bytes(tmp_path: Path, kind: Any, mode: str, layer_bits: float, table_bits: float):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=kind)
    want = MATRICES * layer_bits / 8 + TABLE * table_bits / 8 + VECTORS
    assert bytes_of(path, mode) == want


def test_the_embedding_is_packed_only_as_the_output_matrix(tmp_path: Path):
    tied = write_tiny_gguf(tmp_path / "tied.gguf", weight_type="Q8_0")
    own = write_tiny_gguf(tmp_path / "own.gguf", weight_type="Q8_0", tie=False)
    assert bytes_of(tied) == bytes_of(own)


def test_a_folder_that_has_both_counts_one(tmp_path: Path):
    folder = write_folder(tmp_path / "folder", "llama")
    untied = bytes_of(folder)
    tied = write_folder(tmp_path / "tied", "llama", changes={"tie_word_embeddings": True})
    assert bytes_of(tied) == untied


def need(weights: int, cache: int) -> MemoryNeed:
    return MemoryNeed(
        weights_bytes=weights * MIB, cache_bytes=cache * MIB, scratch_bytes=10 * MIB, ctx_size=8192
    )


def test_what_just_fits_passes():
    check_memory(need(100, 50), available_bytes=160 * MIB)


def test_weights_that_do_not_fit_give_both_numbers():
    with pytest.raises(CapacityError, match="fit in the 109 MiB available, got 110 MiB of weights"):
        check_memory(need(100, 50), available_bytes=109 * MIB)


def test_a_cache_that_does_not_fit_names_the_context():
    expected = r"cache of at most 49 MiB \(159 MiB .* 110 MiB .* got 50 MiB for 8192 tokens.*-c"
    with pytest.raises(CapacityError, match=expected):
        check_memory(need(100, 50), available_bytes=159 * MIB)


def files(root: Path, entries: dict[str, str]) -> Path:
    for name, text in entries.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_v2_limits_of_the_group_and_its_parents(tmp_path: Path):
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box/job\n",
            "sys/fs/cgroup/box/job/memory.max": "max\n",
            "sys/fs/cgroup/box/job/memory.current": "100\n",
            "sys/fs/cgroup/box/memory.max": "5000\n",
            "sys/fs/cgroup/box/memory.current": "4000\n",
            "sys/fs/cgroup/box/memory.stat": "anon 3000\ninactive_file 600\nactive_file 150\n",
        },
    )
    assert cgroup_room(root) == [5000 - 4000 + 600 + 150]


def test_cgroup_v2_inside_a_container_uses_the_mounts_root(tmp_path: Path):
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/not/mounted/here\n",
            "sys/fs/cgroup/memory.max": "5000\n",
            "sys/fs/cgroup/memory.current": "4000\n",
        },
    )
    assert cgroup_room(root) == [1000]


def test_cgroup_v1(tmp_path: Path):
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/box\n4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "5600\n",
            "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 400\n"
            "total_active_file 50\ninactive_file 1\n",
        },
    )
    assert cgroup_room(root) == [0]


def test_no_cgroups_is_no_limit(tmp_path: Path):
    assert cgroup_room(tmp_path) == []


def test_this_machine_has_some_memory():
    assert available_memory() > 64 * MIB
