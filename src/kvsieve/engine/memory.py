"""Whether a model and its cache fit in memory, asked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from kvsieve.errors import CapacityError
from kvsieve.models.checkpoint_config import OUTPUT as LM_HEAD
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import TensorInfo
from kvsieve.models.tensors import embedding_name, output_name
from kvsieve.models.weights import WeightMode, packed_bytes


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


def weights_bytes(
    tensors: Mapping[str, TensorInfo], config: ModelConfig, mode: WeightMode = "auto"
) -> int:
    """Bytes of the weights once packed for the kernels.

    The embedding is packed only where it is the output matrix too: its rows are read from the
    mapped file, and take nothing. The output matrix keeps 8 bits where layers have 4.
    """
    output = output_name(config)
    total = 0
    for name, tensor in tensors.items():
        if name == output:
            total += packed_bytes(tensor, "auto" if mode == "q4" else mode)
        elif name not in (embedding_name(config), LM_HEAD):
            total += packed_bytes(tensor, mode)
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
