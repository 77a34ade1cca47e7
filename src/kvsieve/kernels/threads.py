"""How many threads to use when nobody said: what this process may use, one per fast core."""

import math
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def default_threads(*, cpus: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Physical cores in this process's affinity, fast ones only, within the cgroup's CPU quota.

    Hyper-threads share a core's dot-product units, and on ARM boards (four fast cores, four slow)
    the slow ones would hold up every barrier: both are left out.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return max(1, os.cpu_count() or 1)
    capacity = {cpu: _read_int(cpus / f"cpu{cpu}/cpu_capacity", default=1024) for cpu in allowed}
    fast = [cpu for cpu in allowed if 2 * capacity[cpu] >= max(capacity.values())]
    cores = {_siblings(cpus / f"cpu{cpu}/topology/thread_siblings_list", cpu) for cpu in fast}
    return max(1, min(len(cores), _quota(cgroup)))


def _quota(cgroup: Path) -> int:
    """Whole CPUs that a cgroup (version 2, then 1) grants, rounded up; 65,536 without one."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        limit = str(_read_int(cgroup / "cpu/cpu.cfs_quota_us", default=-1))
        period = str(_read_int(cgroup / "cpu/cpu.cfs_period_us", default=100_000))
    if not limit.isdigit() or not period.isdigit() or int(period) == 0:
        return 1 << 16
    return max(1, math.ceil(int(limit) / int(period)))


def _siblings(path: Path, cpu: int) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _read_int(path: Path, *, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
