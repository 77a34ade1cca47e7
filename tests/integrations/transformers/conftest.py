"""Tests of the Transformers host run where torch and transformers are installed."""

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """The models are tiny: threads would only wait for each other."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
