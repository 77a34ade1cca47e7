"""A whole layer: native == reference; one arithmetic for prompts, tokens, chunks, threads."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import NumericalError, ShapeError
from kvsieve.kernels.backend import LayerShape, LayerWeights
from kvsieve.kernels.native import NativeBackend
from tests.kernels.parity import REFERENCE, close, source
from tests.kernels.reference.caches import dense_oracle, empty_segment, plan, stored

TOKENS = 150


def layer_shape(**changes):
    settings = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_q_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_interleaved": True,
        "rope_dim": 32,
        "attention_scale": 32**-0.5,
    }
    return LayerShape(**(settings | changes))


QWEN2 = ("q_bias", "k_bias", "v_bias")
GEMMA = ("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm")


def build(backend, shape, *, kind, vectors=()):
    rng = np.random.default_rng(0)
    matrices = {
        name: (rng.standard_normal(size) / np.sqrt(size[1])).astype(np.float32)
        for name, size in shape.matrix_shapes.items()
    }
    norms = {
        name: ones(rng, length)
        for name, length in shape.vector_lengths.items()
        if name in ("attn_norm", "ffn_norm", *vectors)
    }
    packed = {name: backend.pack_weight(source(m), kind=kind) for name, m in matrices.items()}
    return backend.build_layer(shape, LayerWeights(**packed, **norms))


def ones(rng, size):
    return rng.uniform(0.5, 1.5, size).astype(np.float32)


def angles(shape, start, count):
    at = np.arange(start, start + count)[:, None] / 10 ** np.linspace(0, 3, shape.rope_dim // 2)
    return np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)


def run(backend, shape, steps, *, kind="q8", sparse=None, vectors=(), k_type="q8_0", tokens=TOKENS):
    """Hidden rows after the layer, and the last step's pair counts; steps are (start, stop)."""
    layer = build(backend, shape, kind=kind, vectors=vectors)
    hidden = np.random.default_rng(1).standard_normal((tokens, shape.hidden_size), np.float32)
    cache = replace(
        empty_segment(
            tokens,
            k_type=k_type,
            head_dim=shape.head_dim,
            kv_heads=shape.num_kv_heads,
            sparse=sparse,
        ),
        importance=np.zeros((1, tokens), np.int64),
        record_importance=True,
    )
    for start, stop in steps:
        segment = replace(cache, start=start, q_len=stop - start, is_prefill=stop - start > 1)
        step = backend.begin_step([segment], *angles(shape, start, stop - start))
        rows = hidden[start:stop].copy()
        backend.run_layer(layer, 0, rows, step)
        hidden[start:stop] = rows
    return hidden, backend.step_stats(step).segments[0]


@pytest.mark.parametrize("kept", [[], [3], [84], [0, 17, 40, 41, 83], [*range(1, 80)]])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_kept_rows_are_as_if_all_were_computed(native, backend, kept):
    backend = native if backend == "native" else REFERENCE
    shape, tokens = layer_shape(), 85
    results = []
    for rows in (None, np.array(kept, np.int32)):
        layer = build(backend, shape, kind="q8")
        segment = empty_segment(
            tokens, k_type="q8_0", head_dim=shape.head_dim, kv_heads=shape.num_kv_heads
        )
        before = np.random.default_rng(1).standard_normal((tokens, shape.hidden_size), np.float32)
        hidden = before.copy()
        step = backend.begin_step([segment], *angles(shape, 0, tokens))
        backend.run_layer(layer, 0, hidden, step, kept=rows)
        results.append((hidden, segment.pages))
    (whole, pages), (got, got_pages) = results
    assert np.array_equal(got[kept], whole[kept]) or backend is REFERENCE
    np.testing.assert_allclose(got[kept], whole[kept], rtol=1e-5, atol=1e-6)
    others = np.setdiff1d(np.arange(tokens), kept)
    assert np.array_equal(got[others], before[others])
    assert np.array_equal(got_pages, pages)


@pytest.mark.parametrize(
    "kept",
    [
        np.array([2, 1], np.int32),
        np.array([1, 1], np.int32),
        np.array([64], np.int32),
        np.array([-1], np.int32),
        np.array([1], np.int64),
    ],
)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_bad_kept_rows_are_refused(native, backend, kept):
    backend = native if backend == "native" else REFERENCE
    shape = layer_shape()
    layer = build(backend, shape, kind="q8")
    segment = empty_segment(64, k_type="q8_0", head_dim=shape.head_dim, kv_heads=shape.num_kv_heads)
    step = backend.begin_step([segment], *angles(shape, 0, 64))
    with pytest.raises(ShapeError, match=r"\[run_layer\] kept: expected"):
        backend.run_layer(layer, 0, np.zeros((64, shape.hidden_size), np.float32), step, kept=kept)


@pytest.mark.parametrize("kind", ["q8", "f32"])
@pytest.mark.parametrize("vectors", [(), ("q_norm", "k_norm")])
@pytest.mark.parametrize("rope", [{}, {"rope_interleaved": False}, {"rope_dim": 16}])
@pytest.mark.parametrize("sparse", [None, plan(k=2, selector="probe"), plan(k=2, share="group")])
def test_a_layer_computes_what_the_specification_says(native, kind, vectors, rope, sparse):
    shape = layer_shape(**rope)
    steps = [(0, 64), (64, 149), (149, 150)]
    options = {"kind": kind, "sparse": sparse, "vectors": vectors}
    want, want_stats = run(REFERENCE, shape, steps, **options)
    got, got_stats = run(native, shape, steps, **options)
    close(got, want, 2e-2)  # a rounding of 8 bits may fall the other way, and then be amplified
    assert np.median(np.abs(got - want)) < 1e-5
    assert got_stats == want_stats


@pytest.mark.parametrize("kind", ["q8", "f32"])
@pytest.mark.parametrize(
    ("changes", "vectors"),
    [
        ({}, QWEN2),
        ({"gate": "gelu", "rope_interleaved": False}, GEMMA),
        *(({"window": window}, GEMMA[2:]) for window in (1, 33, 70)),
    ],
)
def test_parts_of_other_architectures_compute_what_the_specification_says(
    native, kind, changes, vectors
):
    shape = layer_shape(**changes)
    steps = [(0, 64), (64, 149), (149, 150)]
    options = {"kind": kind, "sparse": plan(k=2, selector="probe"), "vectors": vectors}
    want, want_stats = run(REFERENCE, shape, steps, **options)
    got, got_stats = run(native, shape, steps, **options)
    close(got, want, 2e-2)
    assert np.median(np.abs(got - want)) < 1e-5
    assert got_stats == want_stats


@pytest.mark.parametrize("k_type", ["q8_0", "q4_0", "f16", "f32"])
def test_a_window_has_the_same_bits_however_it_is_cut_and_computed(native, k_type):
    """600 tokens, so that a window spans two runs of 16 blocks and does not start with a run."""
    shape = layer_shape(window=530, gate="gelu")
    rest = {"k_type": k_type, "vectors": GEMMA, "tokens": 600}
    scalar = NativeBackend(threads=1, isa="scalar")
    whole, stats = run(scalar, shape, [(0, 600)], **rest)
    assert stats.pairs_attended == stats.pairs_causal < 2 * sum(range(1, 20)) * 32
    pieces = [(0, 37), (37, 544), (544, 590), *((i, i + 1) for i in range(590, 600))]
    for backend in (native, NativeBackend(threads=3, isa=native.isa)):
        split, _ = run(backend, shape, pieces, sparse=plan(k=2), **rest)
        assert np.array_equal(split, whole)


def test_head_norms_change_the_result(native):
    steps = [(0, TOKENS)]
    plain, _ = run(native, layer_shape(), steps)
    normed, _ = run(native, layer_shape(), steps, vectors=("q_norm", "k_norm"))
    assert np.abs(plain - normed).max() > 1e-2


@pytest.mark.parametrize("k_type", ["q8_0", "q4_0", "f16", "f32"])
def test_a_token_has_the_same_bits_in_a_prompt_and_decoded(native, k_type):
    shape = layer_shape()
    whole, _ = run(native, shape, [(0, TOKENS)], k_type=k_type)
    pieces = [(0, 37), (37, 128), *((i, i + 1) for i in range(128, TOKENS))]
    split, _ = run(native, shape, pieces, k_type=k_type)
    assert np.array_equal(whole, split)


@pytest.mark.parametrize("sparse", [None, plan(k=2, selector="probe"), plan(k=2, share="group")])
def test_thread_counts_and_instruction_sets_give_the_same_bits(native, sparse):
    steps = [(0, 96), (96, 149), (149, 150)]
    expected, _ = run(NativeBackend(threads=1, isa="scalar"), layer_shape(), steps, sparse=sparse)
    for threads in (1, 3, 7):
        other = NativeBackend(threads=threads, isa=native.isa)
        got, _ = run(other, layer_shape(), steps, sparse=sparse)
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("kind", ["f32", "q8"])
def test_nan_in_a_layer_is_an_error_that_names_the_layer(native, kind):
    shape = layer_shape()
    layer = build(native, shape, kind=kind)
    segment = empty_segment(4, k_type="q8_0")
    hidden = np.full((4, 96), np.nan, np.float32)
    step = native.begin_step([segment], *angles(shape, 0, 4))
    with pytest.raises(NumericalError, match="layer 0"):
        native.run_layer(layer, 0, hidden, step)


@pytest.mark.parametrize("sparse", [None, plan(k=2), plan(k=2, share="group")])
@pytest.mark.parametrize("k_type", ["f32", "q8_0"])
def test_the_trace_of_a_layer_is_what_attention_ran(native, sparse, k_type):
    shape = layer_shape()
    for backend in (native, REFERENCE):
        layer = build(backend, shape, kind="q8")
        hidden = np.random.default_rng(1).standard_normal((TOKENS, 96), np.float32)
        cache = empty_segment(TOKENS, k_type=k_type, sparse=sparse)
        for start, stop in ((0, TOKENS - 1), (TOKENS - 1, TOKENS)):
            segment = replace(cache, start=start, q_len=stop - start, is_prefill=start == 0)
            step = backend.begin_step([segment], *angles(shape, start, stop - start))
            backend.run_layer(layer, 0, hidden[start:stop].copy(), step)
        trace = backend.last_attention(segment, num_q_heads=6)
        assert trace.q.shape == trace.out.shape == (1, 6, 32)
        assert (trace.lists is None) == (sparse is None)
        for head in range(6):
            read = np.zeros(TOKENS, bool)
            if trace.lists is None:
                read[:] = True
            else:
                row = head * trace.lists.num_heads // 6
                begin, end = trace.lists.indptr[row : row + 2]
                for block in trace.lists.indices[begin:end]:
                    read[32 * block : 32 * block + 32] = True
                assert read.sum() < 65
            keys, values = stored(segment, head // 3, "k"), stored(segment, head // 3, "v")
            want = dense_oracle(trace.q[:, head], keys, values, read[None], scale=1.0)
            # An 8-bit query and 8-bit probabilities; wrong blocks or no scale would be far off.
            close(trace.out[0, head], want[0], 1e-4 if k_type == "f32" else 3e-2)
