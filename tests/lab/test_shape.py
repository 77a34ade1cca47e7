import pytest

from kvsieve.errors import ConfigError
from kvsieve.lab.shape import ModelShape


def test_bytes_of_8_kv_heads_of_128_in_8_bits() -> None:
    shape = ModelShape(head_dim=128, num_q_heads=16, num_kv_heads=8, num_layers=28)
    assert shape.layer_bytes_per_token == 2112
    assert 16.9e6 < 8192 * shape.layer_bytes_per_token < 17.4e6
    assert shape.group_size == 2


@pytest.mark.parametrize(
    ("k_type", "v_type", "per_head"),
    [
        ("f32", "f32", 2 * 64 * 4),
        ("f16", "f16", 2 * 64 * 2),
        ("bf16", "bf16", 2 * 64 * 2),
        ("q8_0", "q8_0", 2 * (64 + 4)),
        ("q4_0", "q4_0", 2 * (32 + 2 * 4)),
        ("f16", "q8_0", 128 + 68),
    ],
)
def test_bytes_by_cache_type(k_type: str, v_type: str, per_head: int) -> None:
    shape = ModelShape(head_dim=64, num_kv_heads=1, k_type=k_type, v_type=v_type)
    assert shape.head_bytes_per_token == per_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 0}, "head_dim: expected 1 or more, got 0"),
        ({"num_q_heads": 3, "num_kv_heads": 2}, "num_q_heads: expected a multiple of"),
        ({"k_type": "q5_0"}, "k_type: expected one of .*bf16, got 'q5_0'"),
        ({"v_type": "fp8"}, "v_type: expected one of"),
        ({"num_layers": True}, "num_layers: expected 1 or more, got True"),
        ({"head_dim": 40}, "head_dim: expected a multiple of 16"),
    ],
)
def test_sizes_that_no_cache_has(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape(**({"head_dim": 64} | changes))
