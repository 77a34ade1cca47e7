"""Counts against hand values and against the grid of a `BlockMask`."""

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.integrations.paged.layer_rows import Read
from kvsieve.integrations.paged.recorder import (
    NOT_CAUSAL,
    Recorder,
    block_mask,
    causal_pairs,
    listed_pairs,
)
from kvsieve.kernels.backend import BlockLists
from tests.kernels.reference.caches import empty_segment


def segment(start: int, q_len: int, *, is_prefill: bool = True):
    whole = empty_segment(start + q_len)
    fields = whole.__dict__ | {"start": start, "q_len": q_len, "is_prefill": is_prefill}
    return type(whole)(**fields)


def lists(rows: list[list[int]], *, num_heads: int) -> BlockLists:
    return BlockLists(
        num_heads=num_heads,
        num_tiles=len(rows) // num_heads,
        indptr=np.cumsum([0, *map(len, rows)]),
        indices=np.concatenate(rows).astype(np.int32),
    )


@pytest.mark.parametrize(
    ("start", "q_len", "per_head"),
    [(0, 1, 1), (0, 32, 32), (0, 33, 34), (31, 2, 1 + 2), (40, 60, 24 * 2 + 32 * 3 + 4 * 4)],
)
def test_pairs_of_exact_attention(start: int, q_len: int, per_head: int) -> None:
    assert causal_pairs(segment(start, q_len)) == 2 * per_head


def test_pairs_of_a_prompt() -> None:
    """Positions 40 to 99: 24 rows of tile 1, 32 of tile 2, 4 of tile 3; two KV heads."""
    some = lists([[0, 1], [2], [0, 3], [1], [0, 1, 2], [3]], num_heads=2)
    expected = 24 * 2 + 32 * 1 + 4 * 2 + 24 * 1 + 32 * 3 + 4 * 1
    assert listed_pairs(segment(40, 60), some) == expected
    assert block_mask(segment(40, 60), some).pairs_attended == expected


def test_pairs_of_a_token_count_a_block_once_per_kv_head() -> None:
    some = lists([[0, 3], [1, 3], [2, 3], [2, 3]], num_heads=4)
    assert listed_pairs(segment(100, 1, is_prefill=False), some) == 3 + 2


def test_a_report_in_the_words_of_the_engine() -> None:
    recorder = Recorder(sparse=SparseAttention(k=2))
    recorder.count(Read(segment=segment(0, 100), lists=None), layer=1, row=0, prompt_len=100)
    some = lists([[0, 3], [1, 3], [2, 3], [2, 3]], num_heads=4)
    decode = segment(100, 1, is_prefill=False)
    recorder.count(Read(segment=decode, lists=some), layer=1, row=0, prompt_len=100)
    recorder.count(Read(segment=decode, lists=None), layer=0, row=0, prompt_len=100)
    recorder.host_layer(2, "a window")
    recorder.note("something")
    recorder.note("something")
    report = recorder.report()
    assert report.attention.mode == "sparse"
    assert report.attention.exact_because is None
    assert report.attention.prefill.density == 1.0
    assert report.attention.prefill.queries == 200
    assert report.attention.decode.density == (5 + 8) / 16
    assert report.attention.decode.blocks_per_query == 13 / 4
    assert report.sparse_layers == (1,)
    assert report.exact_layers == (0,)
    assert report.to_json() | {"density": None} == {
        "mode": "sparse",
        "selector": "anchors",
        "share": "head",
        "k": 2,
        "block_size": 32,
        "blocks_read": 2 * (32 + 64 + 96 + 16) + 13,
        "density": None,
        "exact_because": None,
        "sparse_layers": [1],
        "exact_layers": [0],
        "layer_k": {},
        "profile": None,
        "host_layers": {"2": "a window"},
        "notes": ["something"],
        "mass": None,
        "kept_mass": None,
        "warning": None,
    }


def test_the_kept_mass_of_all_layers() -> None:
    """Two steps in layers 1 and 4 of two query heads each; exact steps do not count."""
    sparse = SparseAttention(k=2, selector="anchors", mass=0.9, exact_layers=(0,), warn_mass=0.8)
    recorder = Recorder(sparse=sparse)
    some = lists([[0, 3], [1, 3], [2, 3], [2, 3]], num_heads=4)
    decode = segment(100, 1, is_prefill=False)
    for layer, kept in ((1, (0.9, 0.7)), (4, (0.5, 0.3)), (1, (1.0, 0.8)), (4, (0.6, 0.4))):
        mass = np.array(kept, np.float32)
        read = Read(segment=decode, lists=some, kept_mass=mass)
        recorder.count(read, layer=layer, row=0, prompt_len=100)
        exact = Read(segment=decode, lists=None, kept_mass=np.ones(2, np.float32))
        recorder.count(exact, layer=layer, row=0, prompt_len=100)
    attention = recorder.report().attention
    assert attention.kept_mass is not None
    assert attention.kept_mass.mean == pytest.approx(0.65)
    assert attention.kept_mass.worst_layer == 4
    assert attention.kept_mass.worst_layer_mean == pytest.approx(0.45)
    assert (attention.mass, attention.exact_layers) == (0.9, (0,))
    assert attention.warning is not None
    assert "layer 4: 0.450" in attention.warning


def test_an_exact_run_says_why() -> None:
    recorder = Recorder(sparse=SparseAttention(k=8))
    assert recorder.report().attention.exact_because == "no layer of kvsieve has run"
    recorder.count_exact(layer=0, num_tokens=40, q_len=40, num_kv_heads=2)
    assert recorder.report().attention.exact_because == NOT_CAUSAL
    assert recorder.report().attention.prefill.attended == 2 * (32 + 16)
    recorder.count(Read(segment=segment(0, 100), lists=None), layer=0, row=0, prompt_len=100)
    because = recorder.report().attention.exact_because
    assert because == "all 4 blocks fit the budget of 8"


def test_exact_as_asked_needs_no_reason() -> None:
    recorder = Recorder()
    recorder.count(Read(segment=segment(0, 100), lists=None), layer=0, row=0, prompt_len=100)
    assert recorder.report().attention.exact_because is None
    assert recorder.report().attention.mode == "exact"


def test_masks_are_kept_where_asked_for() -> None:
    recorder = Recorder(keep_masks=True)
    recorder.count(Read(segment=segment(64, 40), lists=None), layer=4, row=1, prompt_len=104)
    (read,) = recorder.masks
    assert (read.layer, read.row, read.phase) == (4, 1, "prefill")
    assert [read.mask.blocks(1, tile).tolist() for tile in range(2)] == [[0, 1, 2], [0, 1, 2, 3]]
