from copy import deepcopy
from typing import Any

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError
from kvsieve.integrations.paged.host import make_host, sparse_settings


def made(**changes: Any):
    asked = {
        "sparse": None,
        "cache_type": "q8_0",
        "backend": "reference",
        "threads": None,
        "keep_masks": False,
    }
    return make_host(**(asked | changes))


def test_settings() -> None:
    sparse = SparseAttention(k=3)
    host = made(sparse=sparse, cache_type=("q8_0", "f16"), keep_masks=True)
    assert host.settings.cache_types == ("q8_0", "f16")
    assert host.settings.sparse is sparse
    assert host.settings.backend.name == "reference"
    assert host.recorder.keep_masks
    assert made().settings.cache_types == ("q8_0", "q8_0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse": 32}, "sparse: expected SparseAttention or None"),
        ({"cache_type": "q8"}, "cache_type: expected one of f32, f16, q8_0, q4_0"),
        ({"cache_type": ("f16",)}, "cache_type"),
        ({"backend": "cuda"}, "backend: expected one of native, reference"),
        ({"threads": 0}, "threads: expected at least 1"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**changes)


def test_a_copy_is_the_host_itself() -> None:
    host = made()
    assert deepcopy(host) is host


def test_settings_as_a_value_or_as_fields() -> None:
    given = SparseAttention(k=5)
    assert sparse_settings(given, {}) is given
    assert sparse_settings(None, {"k": 7, "selector": "even"}) == SparseAttention(
        k=7, selector="even"
    )
    assert sparse_settings(None, {}) == SparseAttention()


@pytest.mark.parametrize(
    ("given", "fields", "message"),
    [
        (SparseAttention(), {"k": 3}, "got both"),
        (None, {"top_k": 3}, "top_k: expected one of k, block_size"),
        (None, {"k": 0}, "k: expected an integer of at least 1"),
    ],
)
def test_bad_fields_are_refused(given: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sparse_settings(given, fields)
