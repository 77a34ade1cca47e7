"""Pages and index: every byte against loops written from the layout description."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import NumericalError
from kvsieve.kernels.layout import IndexLayout, PageLayout
from kvsieve.kernels.reference import pages
from kvsieve.kernels.reference.quantize import quantize_q4, quantize_q8
from tests.kernels.reference.caches import POISON, empty_segment, filled_segment, plan

TYPES = ["f32", "f16", "q8_0", "q4_0"]


def random_kv(tokens: int, kv_heads: int, head_dim: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    shape = (2, tokens, kv_heads, head_dim)
    k, v = rng.standard_normal(shape).astype(np.float32)
    return k, v


def expected_page(layout: PageLayout, k: np.ndarray, v: np.ndarray) -> bytes:
    """One page of one head from ``[32, D]`` keys and values, byte by byte."""
    d = layout.head_dim

    def keys() -> bytes:
        if layout.k_type == "q8_0":
            codes = quantize_q8(k).values.astype(int) + 128
            return bytes(
                codes[t, 4 * c + i] for c in range(d // 4) for t in range(32) for i in range(4)
            )
        if layout.k_type == "q4_0":
            codes = quantize_q4(k).values.astype(int) + 8
            return bytes(
                codes[t, 4 * c + i] + 16 * codes[t, 4 * (c + d // 8) + i]
                for c in range(d // 8)
                for t in range(32)
                for i in range(4)
            )
        dtype = np.float16 if layout.k_type == "f16" else np.float32
        return k.T.astype(dtype).tobytes()

    def values() -> bytes:
        if layout.v_type == "q8_0":
            codes = quantize_q8(v).values.astype(int) & 0xFF
            return bytes(codes[4 * a + i, c] for a in range(8) for c in range(d) for i in range(4))
        if layout.v_type == "q4_0":
            codes = quantize_q4(v).values.astype(int) + 8
            return bytes(
                codes[4 * a + i, c] + 16 * codes[4 * (a + 4) + i, c]
                for a in range(4)
                for c in range(d)
                for i in range(4)
            )
        return v.astype(np.float16 if layout.v_type == "f16" else np.float32).tobytes()

    def scales(x: np.ndarray, cache_type: str) -> bytes:
        if cache_type in ("f32", "f16"):
            return b""
        quantize = quantize_q8 if cache_type == "q8_0" else quantize_q4
        return quantize(x).scales.T.astype("<f4").tobytes()

    return keys() + scales(k, layout.k_type) + values() + scales(v, layout.v_type)


@pytest.mark.parametrize("v_type", TYPES)
@pytest.mark.parametrize("k_type", TYPES)
def test_every_byte_of_a_page(k_type, v_type) -> None:
    k, v = random_kv(64, 2, 64)
    segment = filled_segment(k, v, k_type=k_type, v_type=v_type)
    for block in range(2):
        for head in range(2):
            got = segment.pages[0, segment.block_table[block], head].tobytes()
            rows = slice(32 * block, 32 * block + 32)
            want = expected_page(segment.layout, k[rows, head], v[rows, head])
            assert got[: len(want)] == want
            assert set(got[len(want) :]) <= {POISON}, "padding is not written"


@pytest.mark.parametrize("cache_type", TYPES)
def test_append_touches_only_its_own_slots(cache_type) -> None:
    k, v = random_kv(40, 1, 32)
    segment = filled_segment(k, v, k_type=cache_type)
    unused = np.setdiff1d(np.arange(segment.pages.shape[1]), segment.block_table)
    assert (segment.pages[0, unused] == POISON).all()
    # Tokens 8.. of the open block stay poisoned: what is read there is blanked first.
    blocks = np.array([1])
    for read in (pages.read_keys, pages.read_values):
        rows = read(segment, 0, 0, blocks)
        assert rows.values[:8].any()
        assert not rows.values[8:].any()
        assert rows.scales is None or not rows.scales[8:].any()


@pytest.mark.parametrize("cache_type", TYPES)
def test_pieces_give_the_bytes_of_one_append(cache_type) -> None:
    k, v = random_kv(70, 2, 32)
    whole = filled_segment(k, v, k_type=cache_type, sparse=plan())
    pieces = empty_segment(70, k_type=cache_type, sparse=plan())
    for start, stop in ((0, 33), (33, 34), (34, 64), (64, 70)):
        part = replace(pieces, start=start, q_len=stop - start)
        pages.append(part, 0, k[start:stop], v[start:stop])
    assert np.array_equal(whole.pages, pieces.pages)
    assert whole.index is None or np.array_equal(whole.index, pieces.index)


def test_read_back() -> None:
    k, v = random_kv(50, 2, 64)
    segment = filled_segment(k, v, k_type="q8_0", v_type="q4_0")
    blocks = np.array([1, 0])
    order = np.r_[32:50, 0:32]
    keys = pages.read_keys(segment, 0, 1, blocks)
    values = pages.read_values(segment, 0, 1, blocks)
    written = pages.block_positions(blocks) < 50
    want_k, want_v = quantize_q8(k[order, 1]), quantize_q4(v[order, 1])
    assert np.array_equal(keys.values[written], want_k.values)
    assert np.array_equal(keys.scales[written], want_k.scales)
    assert np.array_equal(values.values[written], want_v.values)
    assert np.array_equal(values.scales[written], want_v.scales)


@pytest.mark.parametrize(("block_size", "num_probes"), [(32, 8), (64, 8), (32, 5), (32, 32)])
def test_every_byte_of_the_index(block_size, num_probes) -> None:
    tokens, heads, dim = block_size * 17 + 5, 2, 32
    k, v = random_kv(tokens, heads, dim)
    sparse = plan(block_size=block_size, num_probes=num_probes)
    segment = filled_segment(k, v, k_type="q8_0", sparse=sparse)
    layout = IndexLayout(head_dim=dim, block_size=block_size, num_probes=num_probes)
    want = np.full((2, heads, layout.record_bytes), POISON, dtype=np.uint8)
    rows = quantize_q8(k)
    code_bytes = layout.entries * (dim // 4) * 16 * 4
    for position in range(tokens):
        block, offset = divmod(position, block_size)
        if offset % layout.step:
            continue
        entry, lane = offset // layout.step, block % 16
        for head in range(heads):
            record = want[block // 16, head]
            for d in range(dim):
                at = ((entry * (dim // 4) + d // 4) * 16 + lane) * 4 + d % 4
                record[at] = int(rows.values[position, head, d]) + 128
            at = code_bytes + 4 * (entry * 16 + lane)
            record[at : at + 4] = rows.scales[position, head].view(np.uint8)
    assert np.array_equal(segment.index[0], want)


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_refused_append_changes_nothing(side) -> None:
    k, v = random_kv(40, 2, 32)
    segment = empty_segment(40, k_type="q8_0", sparse=plan())
    {"k": k, "v": v}[side][39, 1, 3] = np.nan
    with pytest.raises(NumericalError, match=rf"\[append\] {side}"):
        pages.append(segment, 0, k, v)
    assert (segment.pages == POISON).all()
    assert (segment.index == POISON).all()


@pytest.mark.parametrize("cache_type", TYPES)
def test_a_token_can_be_written_again(cache_type) -> None:
    """q4_0 tokens share bytes: writing one leaves its neighbours alone, before and after it."""
    k, v = random_kv(32, 2, 32)
    segment = filled_segment(k, v, k_type=cache_type)
    before = segment.pages.copy()
    for token in (3, 19):
        pages.append(replace(segment, start=token, q_len=1), 0, v[:1], k[:1])
        assert not np.array_equal(segment.pages, before)
        pages.append(replace(segment, start=token, q_len=1), 0, k[token:][:1], v[token:][:1])
        assert np.array_equal(segment.pages, before)


def test_layers_are_apart() -> None:
    k, v = random_kv(32, 2, 32)
    segment = empty_segment(32, k_type="q8_0", layers=3)
    pages.append(segment, 1, k, v)
    assert (segment.pages[[0, 2]] == POISON).all()
    assert not (segment.pages[1] == POISON).all()
