"""The build: its version, and the C++ core as it was built here, whichever compiler built it."""

import importlib.util
import platform
from pathlib import Path

import pytest

from kvsieve.version import __version__
from tests.contract.project import pyproject

NEEDS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512-vnni": {
        *("avx2", "fma", "f16c"),
        *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    },
    "scalar": set[str](),
}
"""Instruction sets of the core, and the processor flags, in Linux's words, that each needs."""

CPUINFO = Path("/proc/cpuinfo")


def test_the_build_and_the_package_name_the_same_version() -> None:
    assert pyproject()["project"]["version"] == __version__


@pytest.mark.skipif(
    platform.machine() != "x86_64" or importlib.util.find_spec("kvsieve._native") is None,
    reason="needs the core on an x86-64 processor",
)
def test_the_core_offers_what_the_processor_has() -> None:
    """Some compilers' own way to ask the processor finds nothing, and all would run scalar code."""
    from kvsieve.kernels.native import supported_isas

    line = next(
        n for n in CPUINFO.read_text(encoding="ascii").splitlines() if n.startswith("flags")
    )
    flags = set(line.split(":", 1)[1].split())
    assert supported_isas() == {name: needs <= flags for name, needs in NEEDS.items()}
