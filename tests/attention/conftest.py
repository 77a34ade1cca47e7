"""Backends that `attend` runs on: the specification, and the core where it has been built."""

import importlib.util

import pytest


@pytest.fixture(params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "native" and importlib.util.find_spec("kvsieve._native") is None:
        pytest.skip("the C++ core is not built")
    return name
