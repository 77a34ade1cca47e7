"""Whether a model and its cache fit in memory, asked before anything is loaded."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from kvsieve.errors import CapacityError
from kvsieve.models.gguf import TensorInfo

_BYTES_PER_32: Mapping[str, int] = {
    "F32": 34,
    "F16": 34,
    "BF16": 34,
    "Q8_0": 34,
    "Q4_K": 34,
    "Q5_K": 34,
    "Q6_K": 34,
    "Q4_0": 18,
    "Q4_1": 20,
}
"""Packed bytes of 32 weights by source type: codes, an f16 scale, and for Q4_1 an f16 offset."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes a loaded model takes, by what they are for. The model file itself is only mapped."""

    weights_bytes: int
    cache_bytes: int
    scratch_bytes: int
    ctx_size: int

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.weights_bytes + self.cache_bytes + self.scratch_bytes


def packed_bytes(tensors: Iterable[TensorInfo], *, tied: bool) -> int:
    """Bytes of the weights once packed for the kernels.

    `tied`: the embedding is also the output matrix, and is packed as that. Otherwise its rows are
    read from the mapped file, and take nothing.
    """
    total = 0
    for tensor in tensors:
        values = math.prod(tensor.shape)
        if tensor.name == "token_embd.weight" and not tied:
            continue
        if len(tensor.shape) < 2:
            total += 4 * values
        else:
            total += -(-values // 32) * _BYTES_PER_32.get(tensor.ggml_type, 34)
    return total


def check_memory(need: MemoryNeed, *, available_bytes: int) -> None:
    """Raise CapacityError, with both numbers, unless `need` fits in `available_bytes`."""
    if need.total_bytes <= available_bytes:
        return
    without_cache = need.weights_bytes + need.scratch_bytes
    if without_cache > available_bytes:
        raise CapacityError(
            f"[LLM] model: expected to fit in the {_mib(available_bytes)} available, "
            f"got {_mib(without_cache)} of weights and working memory"
        )
    raise CapacityError(
        f"[LLM] ctx_size: expected a cache of at most {_mib(available_bytes - without_cache)} "
        f"({_mib(available_bytes)} available, {_mib(without_cache)} for the model), got "
        f"{_mib(need.cache_bytes)} for {need.ctx_size} tokens; "
        "a smaller context (-c, ctx_size) or cache type needs less"
    )


def available_memory() -> int:
    """Bytes this process may still take: what the machine has left and its cgroup allows."""
    return min([int(psutil.virtual_memory().available), *cgroup_room(Path("/"))])


def cgroup_room(root: Path) -> list[int]:
    """Bytes left under each memory limit that applies to this process (cgroup v2 and v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A parent's limit binds its children too. In a container the path may not exist below
        # the mount; the mount's own root then stands for it.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            rooms += _room(folder, limit, usage)
            if folder == base:
                break
    return rooms


def _room(folder: Path, limit: str, usage: str) -> list[int]:
    try:
        allowed = int((folder / limit).read_text())  # "max" is no limit, and no number
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return []
    return [max(0, allowed - used + _reclaimable(folder))]


def _reclaimable(folder: Path) -> int:
    """File pages the kernel would drop before it refuses memory; a mapped model is full of them."""
    try:
        stat = (folder / "memory.stat").read_text().split()
    except OSError:
        return 0
    fields = dict(zip(stat[::2], stat[1::2], strict=False))
    names = ("total_inactive_file", "total_active_file")
    if names[0] not in fields:
        names = ("inactive_file", "active_file")
    return sum(int(fields.get(name, 0)) for name in names)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
