"""Parts of a layer that only some architectures have: biases, further norms, gelu, a window."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import ConfigError, ShapeError
from kvsieve.kernels.backend import LayerShape, LayerWeights, WeightSource
from kvsieve.kernels.reference import ReferenceBackend
from kvsieve.kernels.reference.selection import causal_blocks
from tests.kernels.reference.caches import empty_segment, plan, rows

BACKEND = ReferenceBackend()
HIDDEN, FFN, HEADS, KV_HEADS, DIM = 64, 96, 4, 2, 32
TOKENS = 100
EPS = 1e-6


def shape_of(**changes) -> LayerShape:
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_q_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_interleaved": False,
        "rope_dim": DIM,
        "attention_scale": 0.2,
    }
    return LayerShape(**(settings | changes))


def weights_of(shape, vectors=(), seed=0):
    """f32 arrays by field: all matrices, the two norms there always are, and `vectors`."""
    rng = np.random.default_rng(seed)
    values = {
        name: (rng.standard_normal(size) / np.sqrt(size[1])).astype(np.float32)
        for name, size in shape.matrix_shapes.items()
    }
    for name, length in shape.vector_lengths.items():
        vector = rng.uniform(0.5, 1.5, length).astype(np.float32)
        if name in ("attn_norm", "ffn_norm", *vectors):
            values[name] = vector
    return values


def layer_of(shape, values):
    packed = {
        name: BACKEND.pack_weight(
            WeightSource(data=values[name], format="f32", rows=size[0], cols=size[1]), kind="f32"
        )
        for name, size in shape.matrix_shapes.items()
    }
    return BACKEND.build_layer(shape, LayerWeights(**(values | packed)))


def angles(start, stop):
    turns = np.arange(start, stop)[:, None] * 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def hidden_rows(seed=1):
    return np.random.default_rng(seed).standard_normal((TOKENS, HIDDEN), dtype=np.float32)


def run(layer, hidden, segment, *, index=0):
    out = hidden.copy()
    step = BACKEND.begin_step([segment], *angles(segment.start, segment.start + segment.q_len))
    BACKEND.run_layer(layer, index, out, step)
    return out, BACKEND.step_stats(step).segments[0]


def oracle(shape, values, hidden):
    """The layer in float64, one loop per head."""
    w = {name: value.astype(np.float64) for name, value in values.items()}
    turns = np.arange(len(hidden))[:, None] * 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))

    def norm(x, name):
        if name not in w:
            return x
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * w[name]

    def heads(x, which, number):
        y = x @ w[f"{which}_proj"].T + w.get(f"{which}_bias", 0)
        return y.reshape(len(x), number, DIM)

    def rotate(x):
        half = DIM // 2
        turned = (x[:, :, :half] + 1j * x[:, :, half:]) * np.exp(1j * turns)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=2)

    x = norm(hidden.astype(np.float64), "attn_norm")
    q = rotate(norm(heads(x, "q", HEADS), "q_norm"))
    k = rotate(norm(heads(x, "k", KV_HEADS), "k_norm"))
    v = heads(x, "v", KV_HEADS)
    position = np.arange(len(x))
    visible = position <= position[:, None]
    if shape.window:
        visible &= position > position[:, None] - shape.window
    out = np.empty_like(q)
    for head in range(HEADS):
        logits = q[:, head] @ k[:, head // 2].T * shape.attention_scale
        p = np.exp(np.where(visible, logits, -np.inf) - logits.max(axis=1, keepdims=True))
        out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, head // 2]
    mid = hidden + norm(out.reshape(len(x), -1) @ w["o_proj"].T, "attn_post_norm")
    x = norm(mid, "ffn_norm")
    gate = x @ w["gate_proj"].T
    if shape.gate == "gelu":
        active = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        active = gate / (1 + np.exp(-gate))
    return mid + norm((active * (x @ w["up_proj"].T)) @ w["down_proj"].T, "ffn_post_norm")


QWEN2 = ("q_bias", "k_bias", "v_bias")
GEMMA = ("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm")


@pytest.mark.parametrize(
    ("changes", "vectors"),
    [
        ({}, QWEN2),
        ({}, ("k_bias",)),
        ({"gate": "gelu"}, GEMMA),
        ({"gate": "gelu", "window": 40}, GEMMA),
        ({}, ("ffn_post_norm",)),
        *(({"window": window}, ()) for window in (1, 31, 32, 33, 65, 99, 100, 5000)),
    ],
)
def test_against_float64(changes, vectors) -> None:
    shape = shape_of(**changes)
    values, hidden = weights_of(shape, vectors), hidden_rows()
    out, _ = run(layer_of(shape, values), hidden, empty_segment(TOKENS))
    np.testing.assert_allclose(out, oracle(shape, values, hidden), atol=2e-5)


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_a_window_gives_the_same_bits_in_any_chunks_read_or_generated(cache_type) -> None:
    shape = shape_of(window=40)
    layer, hidden = layer_of(shape, weights_of(shape)), hidden_rows()
    want, _ = run(layer, hidden, empty_segment(TOKENS, k_type=cache_type))
    cache = empty_segment(TOKENS, k_type=cache_type)
    for start, stop in ((0, 37), (37, 64), (64, 98)):
        got, _ = run(layer, hidden[start:stop], rows(cache, start, stop))
        assert np.array_equal(got, want[start:stop])
    for position in (98, 99):
        one = replace(cache, start=position, q_len=1, is_prefill=False)
        got, _ = run(layer, hidden[position : position + 1], one)
        assert np.array_equal(got[0], want[position])


def test_a_window_is_read_exactly_whatever_the_plan_and_counts_as_such() -> None:
    sparse = plan(k=1)
    hidden = hidden_rows()
    plain, windowed = shape_of(), shape_of(window=33)
    _, stats = run(layer_of(plain, weights_of(plain)), hidden, empty_segment(TOKENS, sparse=sparse))
    assert stats.pairs_attended < stats.pairs_causal
    layer = layer_of(windowed, weights_of(windowed))
    want, _ = run(layer, hidden, empty_segment(TOKENS))
    got, stats = run(layer, hidden, empty_segment(TOKENS, sparse=sparse))
    assert np.array_equal(got, want)
    # Tiles of 32, 32, 32 and 4 rows; the first row's window meets 1, 2, 2 and 2 blocks.
    assert stats.pairs_attended == stats.pairs_causal == KV_HEADS * (32 + 64 + 64 + 8)


@pytest.mark.parametrize(
    ("tile", "window", "blocks"),
    [
        (0, 1, [0]),
        (1, 1, [1]),
        (1, 2, [0, 1]),
        (2, 33, [1, 2]),
        (2, 34, [0, 1, 2]),
        (2, 0, [0, 1, 2]),
    ],
)
def test_blocks_of_a_window_by_hand(tile, window, blocks) -> None:
    """The tile's first row is 32 * tile; it reads back to 32 * tile - window + 1."""
    assert causal_blocks(tile, window=window).tolist() == blocks


def test_layer_errors() -> None:
    shape = shape_of()
    values = weights_of(shape, QWEN2)
    for changes, message in (
        ({"gate": "relu"}, "gate: expected one of silu, gelu, got 'relu'"),
        ({"window": -1}, "window: expected 0 tokens or more, got -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            layer_of(shape_of(**changes), values)
    values["k_bias"] = values["k_bias"][:-1]
    with pytest.raises(ShapeError, match=r"k_bias: expected C-contiguous float32 \(64\)"):
        layer_of(shape, values)
