"""Backends that pages are read by: the specification, and the core where it has been built."""

import importlib.util

import pytest


@pytest.fixture(params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    core = ("kvsieve._native", "kvsieve.kernels.native")
    if name == "native" and None in map(importlib.util.find_spec, core):
        pytest.skip("the C++ core is not built")
    return name
