"""What the figures were measured on."""

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

READ_BYTES = 256 << 20
"""Per thread: several times the last cache of most processors."""


def machine(*, isa: str, threads: int) -> dict[str, str]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "?"
    return {
        "processor": cpu_model(Path("/proc/cpuinfo")),
        "cores": f"{os.cpu_count()} ({allowed} for this process)",
        "instruction set of kvsieve": isa,
        "streaming read": f"{read_bandwidth(threads):.1f} GB/s by NumPy on {threads} threads",
        "load before the run": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def read_bandwidth(threads: int, *, num_bytes: int = READ_BYTES, rounds: int = 5) -> float:
    """GB/s of the best pass over memory, a part per thread; NumPy may not reach all there is."""
    parts = [np.ones(num_bytes // 8, np.int64) for _ in range(threads)]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return threads * num_bytes / min(seconds) / 1e9
