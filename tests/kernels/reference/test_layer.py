"""A whole layer: float64 oracle, repeatability, statistics, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import ConfigError, ShapeError
from kvsieve.kernels.backend import LayerShape, LayerWeights, WeightSource
from kvsieve.kernels.reference import ReferenceBackend
from tests.kernels.reference.caches import empty_segment, plan, rows

BACKEND = ReferenceBackend()
SHAPE = LayerShape(
    hidden_size=64,
    intermediate_size=96,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_interleaved=True,
    rope_dim=32,
    attention_scale=32**-0.5,
)
SIZES = {
    "q_proj": (128, 64),
    "k_proj": (64, 64),
    "v_proj": (64, 64),
    "o_proj": (64, 128),
    "gate_proj": (96, 64),
    "up_proj": (96, 64),
    "down_proj": (64, 96),
}


def matrices(seed=0):
    rng = np.random.default_rng(seed)
    norms = {
        name: rng.uniform(0.5, 1.5, 64).astype(np.float32) for name in ("attn_norm", "ffn_norm")
    }
    plain = {
        name: (rng.standard_normal(size) / np.sqrt(size[1])).astype(np.float32)
        for name, size in SIZES.items()
    }
    return norms | plain


def layer_of(values, *, kind="f32", shape=SHAPE):
    packed = {
        name: BACKEND.pack_weight(
            WeightSource(data=matrix, format="f32", rows=matrix.shape[0], cols=matrix.shape[1]),
            kind=kind,
        )
        for name, matrix in values.items()
        if name in SIZES
    }
    norms = {name: values[name] for name in ("attn_norm", "ffn_norm")}
    return BACKEND.build_layer(shape, LayerWeights(**norms, **packed))


def angles(start, stop, pairs=16):
    turns = np.arange(start, stop)[:, None] * 100.0 ** (-np.arange(pairs) / pairs)
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def hidden_rows(tokens, seed=1):
    return np.random.default_rng(seed).standard_normal((tokens, 64), dtype=np.float32)


def oracle(values, hidden):
    """The layer in float64, exact attention, one loop per head."""
    w = {name: value.astype(np.float64) for name, value in values.items()}
    tokens = len(hidden)
    turns = np.arange(tokens)[:, None] * 100.0 ** (-np.arange(16) / 16)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight

    def rotate(x):
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * turns)
        return np.stack([turned.real, turned.imag], axis=2).reshape(tokens, 32)

    x = norm(hidden.astype(np.float64), w["attn_norm"])
    q, k, v = (x @ w[name].T for name in ("q_proj", "k_proj", "v_proj"))
    heads = []
    for head in range(4):
        own, shared = (
            slice(32 * head, 32 * head + 32),
            slice(32 * (head // 2), 32 * (head // 2) + 32),
        )
        logits = rotate(q[:, own]) @ rotate(k[:, shared]).T / np.sqrt(32)
        logits[np.triu_indices(tokens, 1)] = -np.inf
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        heads.append(p / p.sum(axis=1, keepdims=True) @ v[:, shared])
    mid = hidden + np.concatenate(heads, axis=1) @ w["o_proj"].T
    x = norm(mid, w["ffn_norm"])
    gate = x @ w["gate_proj"].T
    return mid + (gate / (1 + np.exp(-gate)) * (x @ w["up_proj"].T)) @ w["down_proj"].T


def run(layer, hidden, segments):
    out = hidden.copy()
    cos, sin = (
        np.concatenate(parts)
        for parts in zip(*(angles(s.start, s.start + s.q_len) for s in segments), strict=True)
    )
    step = BACKEND.begin_step(segments, cos, sin)
    BACKEND.run_layer(layer, 0, out, step)
    return out, BACKEND.step_stats(step)


@pytest.mark.parametrize(
    ("cache_type", "tolerance"), [("f32", 1e-5), ("f16", 5e-3), ("q8_0", 0.05)]
)
def test_against_float64(cache_type, tolerance) -> None:
    values, hidden = matrices(), hidden_rows(70)
    out, _ = run(layer_of(values), hidden, [empty_segment(70, k_type=cache_type)])
    np.testing.assert_allclose(out, oracle(values, hidden), atol=tolerance)


def test_8_bit_weights_come_close() -> None:
    values, hidden = matrices(), hidden_rows(40)
    out, _ = run(layer_of(values, kind="q8"), hidden, [empty_segment(40)])
    np.testing.assert_allclose(out, oracle(values, hidden), atol=0.1)


@pytest.mark.parametrize("kind", ["f32", "q8"])
@pytest.mark.parametrize("cache_type", ["f32", "q8_0", "q4_0"])
def test_the_same_bits_in_any_chunks_read_or_generated(kind, cache_type) -> None:
    layer, hidden = layer_of(matrices(), kind=kind), hidden_rows(75)
    want, _ = run(layer, hidden, [empty_segment(75, k_type=cache_type)])
    segment = empty_segment(75, k_type=cache_type)
    for start, stop in ((0, 32), (32, 64), (64, 73)):
        got, _ = run(layer, hidden[start:stop], [rows(segment, start, stop)])
        assert np.array_equal(got, want[start:stop])
    for position in (73, 74):
        one = replace(segment, start=position, q_len=1, is_prefill=False)
        got, _ = run(layer, hidden[position : position + 1], [one])
        assert np.array_equal(got[0], want[position])


def test_sequences_of_a_batch_do_not_meet() -> None:
    layer = layer_of(matrices(), kind="q8")
    first, second = hidden_rows(40), hidden_rows(33, seed=2)
    alone = [run(layer, x, [empty_segment(len(x), k_type="q8_0")])[0] for x in (first, second)]
    both, _ = run(
        layer,
        np.concatenate([first, second]),
        [empty_segment(40, k_type="q8_0"), empty_segment(33, k_type="q8_0")],
    )
    assert np.array_equal(both, np.concatenate(alone))


def test_a_budget_that_covers_everything_is_exact_bit_for_bit() -> None:
    layer, hidden = layer_of(matrices(), kind="q8"), hidden_rows(130)
    exact, _ = run(layer, hidden, [empty_segment(130, k_type="q8_0")])
    covered, stats = run(layer, hidden, [empty_segment(130, k_type="q8_0", sparse=plan(k=5))])
    assert np.array_equal(exact, covered)
    assert stats.segments[0].pairs_attended == stats.segments[0].pairs_causal
    sparse, stats = run(layer, hidden, [empty_segment(130, k_type="q8_0", sparse=plan(k=2))])
    assert not np.array_equal(exact, sparse)
    assert np.array_equal(exact[:64], sparse[:64])
    assert stats.segments[0].pairs_causal == 2 * (32 * (1 + 2 + 3 + 4) + 2 * 5)
    assert stats.segments[0].pairs_attended == 2 * (32 * (1 + 2 + 2 + 2) + 2 * 2)


def test_statistics_add_up_over_layers() -> None:
    layer, hidden = layer_of(matrices()), hidden_rows(40)
    segment = empty_segment(40, layers=2)
    step = BACKEND.begin_step([segment], *angles(0, 40))
    for index in range(2):
        BACKEND.run_layer(layer, index, hidden, step)
    stats = BACKEND.step_stats(step)
    assert stats.segments[0].pairs_causal == 2 * 2 * (32 + 8 * 2)
    assert stats.dense_ns > 0
    assert stats.attention_ns > 0
    assert stats.select_ns > 0
    assert (segment.pages[1] != 0xFF).any()


def test_importance_is_recorded_in_prefill() -> None:
    segment = replace(
        empty_segment(40, k_type="q8_0"),
        importance=np.zeros((1, 40), dtype=np.int64),
        record_importance=True,
    )
    run(layer_of(matrices()), hidden_rows(40), [segment])
    assert segment.importance.sum() / 2**24 == pytest.approx(4 * 40, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_q_heads": 5}, "num_q_heads: expected a multiple of num_kv_heads=2, got 5"),
        ({"rope_dim": 34}, "rope_dim: expected an even number up to head_dim=32, got 34"),
    ],
)
def test_att_09_shapes_that_cannot_be(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_of(matrices(), shape=replace(SHAPE, **change))


def test_weights_that_do_not_fit() -> None:
    values = matrices()
    values["o_proj"] = values["o_proj"][:, :64].copy()
    with pytest.raises(ShapeError, match=r"o_proj: expected \(64, 128\), got \(64, 64\)"):
        layer_of(values)
    values = matrices()
    values["attn_norm"] = values["attn_norm"][:32].copy()
    with pytest.raises(ShapeError, match="attn_norm"):
        layer_of(values)


def test_step_that_does_not_fit() -> None:
    segment = empty_segment(40)
    with pytest.raises(ShapeError, match=r"\[begin_step\] cos"):
        BACKEND.begin_step([segment], *angles(0, 39))
    short = replace(segment, block_table=segment.block_table[:1])
    with pytest.raises(ShapeError, match="block_table: expected int32 of at least 2 blocks"):
        BACKEND.begin_step([short], *angles(0, 40))
    beyond = replace(segment, block_table=np.array([0, 99], dtype=np.int32))
    with pytest.raises(ShapeError, match="pages 0 to 4, got 0 to 99"):
        BACKEND.begin_step([beyond], *angles(0, 40))
    wide = replace(segment, pages=segment.pages[..., :-64])
    with pytest.raises(ShapeError, match=r"segment.pages: expected uint8"):
        BACKEND.begin_step([wide], *angles(0, 40))
    importance = replace(segment, importance=np.zeros((1, 39), dtype=np.int64))
    with pytest.raises(ShapeError, match=r"segment.importance: expected int64"):
        BACKEND.begin_step([importance], *angles(0, 40))
    step = BACKEND.begin_step([segment], *angles(0, 40))
    with pytest.raises(ShapeError, match=r"\[run_layer\] hidden"):
        BACKEND.run_layer(layer_of(matrices()), 0, hidden_rows(39), step)


def test_index_must_have_room() -> None:
    segment = empty_segment(700, k_type="q8_0", sparse=plan())
    short = replace(segment, index=segment.index[:, :1])
    with pytest.raises(ShapeError, match=r"segment.index: expected uint8"):
        BACKEND.begin_step([short], *angles(0, 700))
    with pytest.raises(ShapeError, match="expected None without q8_0 keys"):
        BACKEND.begin_step([replace(segment, index_layout=None)], *angles(0, 700))


def test_backend_says_what_it_is() -> None:
    assert (BACKEND.name, BACKEND.isa, BACKEND.threads) == ("reference", "numpy", 1)
    with pytest.raises(ConfigError, match="threads: expected 1, got 2"):
        ReferenceBackend(threads=2)
