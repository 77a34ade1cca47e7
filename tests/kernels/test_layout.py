"""Sizes that the design states, and refusals."""

import pytest

from kvsieve.errors import ConfigError
from kvsieve.kernels.layout import IndexLayout, PageLayout


def test_q8_bytes_per_token_and_layer_at_the_shape_of_the_original():
    # 8 KV heads of 128: 2 x 8 x (128 + 4) bytes per token.
    layout = PageLayout(k_type="q8_0", v_type="q8_0", head_dim=128)
    assert 8 * layout.page_bytes == 32 * 2112


def test_parts_of_a_page_follow_each_other():
    layout = PageLayout(k_type="q4_0", v_type="f16", head_dim=64)
    assert layout.k_scale_offset == 32 * 64 // 2
    assert layout.v_offset == layout.k_scale_offset + 2 * 32 * 4
    assert layout.v_scale_offset == layout.v_offset + 2 * 32 * 64
    assert layout.page_bytes % 64 == 0


@pytest.mark.parametrize(("block_size", "probes", "entries"), [(32, 8, 8), (32, 3, 4), (64, 8, 8)])
def test_index_entries(block_size, probes, entries):
    layout = IndexLayout(head_dim=64, block_size=block_size, num_probes=probes)
    assert layout.entries == entries
    # 8 of 32 keys: 17 bytes per token at head_dim 64.
    if (block_size, probes) == (32, 8):
        assert layout.record_bytes / (16 * 32) == 17


def test_bad_types_and_head_dims_are_named():
    with pytest.raises(ConfigError, match=r"k_type: expected one of .* got 'q5_1'"):
        PageLayout(k_type="q5_1", v_type="f16", head_dim=64)
    with pytest.raises(ConfigError, match="multiple of 32 for a q4_0 cache, got 80"):
        PageLayout(k_type="q8_0", v_type="q4_0", head_dim=80)
    with pytest.raises(ConfigError, match="multiple of 16"):
        PageLayout(k_type="q8_0", v_type="q8_0", head_dim=0)
