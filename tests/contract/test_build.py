"""The build: its version, and the C++ core as it was built here, whichever compiler built it."""

import importlib.util
import platform
import re
from pathlib import Path

import pytest

from kvsieve.version import __version__
from tests.contract.project import ROOT, pyproject

NEEDS = {
    "x86_64": {
        "avx2": {"avx2", "fma", "f16c"},
        "avx-vnni": {"avx2", "fma", "f16c", "avx_vnni"},
        "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512-vnni": {
            *("avx2", "fma", "f16c"),
            *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
        },
        "scalar": set[str](),
    },
    "aarch64": {"neon-dotprod": {"asimddp"}, "scalar": set[str]()},
}
"""Instruction sets of the core by machine, and the flags, in Linux's words, that each needs."""

CPUINFO = Path("/proc/cpuinfo")


def test_the_build_and_the_package_name_the_same_version() -> None:
    assert pyproject()["project"]["version"] == __version__


@pytest.mark.skipif(
    platform.machine() not in NEEDS or importlib.util.find_spec("kvsieve._native") is None,
    reason="needs the core on a processor of x86-64 or ARM",
)
def test_the_core_offers_what_the_processor_has() -> None:
    """Some compilers' own way to ask the processor finds nothing, and all would run scalar code."""
    from kvsieve.kernels.native import supported_isas

    line = next(
        line
        for line in CPUINFO.read_text(encoding="ascii").splitlines()
        if line.startswith(("flags", "Features"))
    )
    flags = set(line.split(":", 1)[1].split())
    expected = {name: needs <= flags for name, needs in NEEDS[platform.machine()].items()}
    assert supported_isas() == expected


def test_the_readme_lists_the_instruction_sets() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("### Instruction sets")[1]
    listed = re.findall(r"^\| `([^`]+)` \|", section.split("\n## ")[0], re.MULTILINE)
    assert sorted(listed) == sorted({name for needs in NEEDS.values() for name in needs})
