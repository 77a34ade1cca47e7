from pathlib import Path

import pytest

from kvsieve.engine.memory import (
    MemoryNeed,
    available_memory,
    cgroup_room,
    check_memory,
    packed_bytes,
)
from kvsieve.errors import CapacityError
from kvsieve.models.gguf import TensorInfo

MIB = 2**20


def tensor(name: str, ggml_type: str, *shape: int) -> TensorInfo:
    return TensorInfo(name=name, shape=shape, ggml_type=ggml_type, offset=0, nbytes=0)


@pytest.mark.parametrize(
    ("ggml_type", "per_32"),
    [("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34), ("F32", 34), ("BF16", 34), ("Q6_K", 34)],
)
def test_packed_bytes_of_a_matrix(ggml_type: str, per_32: int):
    tensors = [tensor("blk.0.attn_q.weight", ggml_type, 64, 96)]
    assert packed_bytes(tensors, tied=True) == 64 * 96 // 32 * per_32


def test_vectors_stay_f32():
    assert packed_bytes([tensor("output_norm.weight", "F32", 576)], tied=True) == 4 * 576


def test_the_embedding_is_packed_only_as_the_output_matrix():
    tensors = [tensor("token_embd.weight", "Q8_0", 320, 64)]
    assert packed_bytes(tensors, tied=True) == 320 * 2 * 34
    assert packed_bytes(tensors, tied=False) == 0


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
