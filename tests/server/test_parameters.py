from dataclasses import replace
from typing import Any

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError
from kvsieve.server.config import RequestLimits, SamplingDefaults, ServerConfig, SparsePolicy
from kvsieve.server.errors import ApiError
from kvsieve.server.parameters import for_choice, reply_limit
from kvsieve.server.protocol import SparseFields
from kvsieve.server.sparse_choice import sparse_attention

DEFAULT = SparseAttention(k=16, selector="even")
OPEN, FIXED = SparsePolicy(), SparsePolicy(per_request=False)
SPARSE = SparsePolicy(default=DEFAULT)
BOUND = SparsePolicy(default=DEFAULT, min_k=8, max_k=64)
TIGHT = SparsePolicy(default=DEFAULT, min_k=3, max_k=4)
WIDE = SparsePolicy(default=DEFAULT, min_k=200)
BY_MASS = SparseAttention(selector="anchors", mass=0.95, warn_mass=0.8)
MASS = SparsePolicy(default=BY_MASS)
RANDOM = SparsePolicy(default=SparseAttention(selector="random", seed=5))
BY_PROFILE = SparseAttention(exact_layers=(1,), layer_k=((2, 5),), profile="p.json")
PROFILED = SparsePolicy(default=BY_PROFILE)
LAYERS = SparsePolicy(default=replace(BY_PROFILE, profile=""))


@pytest.mark.parametrize(
    ("policy", "asked", "expected"),
    [
        (OPEN, None, None),
        (OPEN, {}, None),
        (OPEN, {"enabled": False}, None),
        (OPEN, {"enabled": True}, SparseAttention()),
        (OPEN, {"k": 4}, SparseAttention(k=4)),
        (SPARSE, None, DEFAULT),
        (SPARSE, {}, DEFAULT),
        (SPARSE, {"enabled": True}, DEFAULT),
        (SPARSE, {"enabled": False}, None),
        (SPARSE, {"k": 4}, SparseAttention(k=4, selector="even")),
        (SPARSE, {"selector": "probe"}, SparseAttention(k=16, selector="probe")),
        (SPARSE, {"share": "group"}, SparseAttention(k=16, selector="even", share="group")),
        (OPEN, {"mass": 0.9}, SparseAttention(selector="anchors", mass=0.9)),
        (SPARSE, {"mass": 0.9}, SparseAttention(k=16, selector="anchors", mass=0.9)),
        (BOUND, {"mass": 0.5}, SparseAttention(k=16, selector="anchors", mass=0.5, k_max=64)),
        (TIGHT, {"mass": 0.5}, replace(DEFAULT, selector="anchors", mass=0.5, k_min=4, k_max=4)),
        (WIDE, {"mass": 0.5}, replace(DEFAULT, selector="anchors", mass=0.5, k_min=200, k_max=200)),
        (MASS, {"k": 9}, SparseAttention(selector="anchors", k=9, warn_mass=0.8)),
        (MASS, {"selector": "even"}, SparseAttention(selector="even")),
        (MASS, {"share": "group"}, replace(BY_MASS, share="group")),
        (RANDOM, {"k": 9}, SparseAttention(k=9, selector="random", seed=5)),
        (RANDOM, {"selector": "window"}, SparseAttention(selector="window")),
        (RANDOM, {"selector": "oracle"}, SparseAttention(selector="oracle")),
        (PROFILED, {"enabled": True}, BY_PROFILE),
        (PROFILED, {"k": 9}, SparseAttention(k=9)),
        (LAYERS, {"k": 9}, SparseAttention(k=9, exact_layers=(1,), layer_k=((2, 5),))),
        (LAYERS, {"mass": 0.9}, SparseAttention(selector="anchors", mass=0.9, exact_layers=(1,))),
        (SPARSE, {"selector": "minmax"}, SparseAttention(k=16, selector="minmax")),
        (BOUND, {"k": 64}, SparseAttention(k=64, selector="even")),
        (BOUND, {"k": 8}, SparseAttention(k=8, selector="even")),
        (FIXED, None, None),
        (FIXED, {"enabled": False}, None),
    ],
)
def test_attention_of_a_request(
    policy: SparsePolicy, asked: Any, expected: SparseAttention | None
) -> None:
    fields = None if asked is None else SparseFields(**asked)
    assert sparse_attention(fields, policy) == expected


@pytest.mark.parametrize(
    ("policy", "asked", "status"),
    [
        (OPEN, {"enabled": False, "k": 4}, 400),
        (OPEN, {"k": 0}, 400),
        (OPEN, {"selector": "best"}, 400),
        (OPEN, {"share": "all"}, 400),
        (OPEN, {"mass": 0.0}, 400),
        (OPEN, {"mass": 1.5}, 400),
        (OPEN, {"mass": 0.9, "k": 8}, 400),
        (OPEN, {"mass": 0.9, "selector": "even"}, 400),
        (FIXED, {"mass": 0.9}, 403),
        (BOUND, {"selector": "oracle"}, 403),
        (OPEN, {"selector": "oracle"}, 403),
        (SPARSE, {"selector": "random", "k": 4}, 403),
        (BOUND, {"k": 7}, 400),
        (BOUND, {"k": 65}, 400),
        (BOUND, {"enabled": False}, 403),
        (FIXED, {"k": 4}, 403),
        (FIXED, {"enabled": True}, 403),
    ],
)
def test_what_the_operator_or_the_engine_refuses(
    policy: SparsePolicy, asked: Any, status: int
) -> None:
    with pytest.raises(ApiError) as caught:
        sparse_attention(SparseFields(**asked), policy)
    assert caught.value.status_code == status
    assert str(caught.value.param).startswith("sparse")


def test_of_several_limits_the_first_that_is_given_counts() -> None:
    assert reply_limit({"a": None, "max_tokens": 5, "n_predict": 9}, default=7) == 5
    assert reply_limit({"max_tokens": None, "n_predict": -1}, default=7) == 2**31 - 1
    assert reply_limit({"max_tokens": None}, default=7) == 7
    assert reply_limit({}, default=-1) == 2**31 - 1
    assert reply_limit({"max_tokens": 10**20}, default=7) == 2**31 - 1


def test_each_choice_has_a_seed_of_its_own() -> None:
    from kvsieve.engine.sampling import SamplingParams

    last = SamplingParams(seed=2**64 - 1)
    assert [for_choice(last, choice).seed for choice in range(3)] == [2**64 - 1, 0, 1]
    drawn = SamplingParams(seed=None)
    assert for_choice(drawn, 1) is drawn


@pytest.mark.parametrize(
    "make",
    [
        lambda: RequestLimits(stops=0),
        lambda: SparsePolicy(min_k=0),
        lambda: SparsePolicy(default=DEFAULT, min_k=9, max_k=8),
        lambda: SparsePolicy(max_k=8),
        lambda: SamplingDefaults(temperature=-1),
        lambda: SamplingDefaults(n_predict=-2),
        lambda: ServerConfig(port=-1),
        lambda: ServerConfig(ping_s=0),
        lambda: ServerConfig(drain_s=float("nan")),
        lambda: ServerConfig(api_keys=(" ",)),
        lambda: ServerConfig(ssl_key_file="k"),
        lambda: ServerConfig(cors_origins=("example.org",)),
    ],
)
def test_settings_out_of_range(make: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("a.sock", True), ("0.0.0.0", False)],
)
def test_who_can_connect(host: str, loopback: bool) -> None:
    assert ServerConfig(host=host).is_loopback == loopback
