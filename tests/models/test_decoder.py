"""The whole forward pass against a float64 Llama, and how the decoder drives its backend."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsieve.errors import ConfigError, ModelFileError, NumericalError, ShapeError
from kvsieve.kernels.backend import Backend, Segment, StepStats
from kvsieve.kernels.layout import PageLayout
from kvsieve.kernels.reference.backend import ReferenceBackend
from kvsieve.models.config import ModelConfig
from kvsieve.models.decoder import Decoder
from kvsieve.models.gguf import GgufFile
from kvsieve.types import CacheType
from tests.models.llama_oracle import LlamaOracle
from tests.tiny_model import write_tiny_gguf

SMAPS = Path("/proc/self/smaps")
IDS = np.random.default_rng(5).integers(0, 288, 70).astype(np.int32)


def build(path: Path, *, backend: Backend | None = None, weights: Any = "f32") -> Decoder:
    file = GgufFile.open(path)
    config = ModelConfig.from_gguf(file)
    return Decoder(config, backend or ReferenceBackend(), file, weights=weights)


class Cache:
    """Pages of one sequence, filled with noise before use, in a scattered order."""

    def __init__(self, config: ModelConfig, *, tokens: int = 96, kind: CacheType = "f32") -> None:
        self.layout = PageLayout(k_type=kind, v_type=kind, head_dim=config.head_dim)
        blocks = -(-tokens // 32)
        shape = (config.num_layers, blocks, config.num_kv_heads, self.layout.page_bytes)
        self.pages = np.full(shape, 0x5A, np.uint8)  # 1.5e16 as f32
        self.table = np.arange(blocks, dtype=np.int32)[::-1].copy()

    def segment(self, start: int, length: int, *, is_prefill: bool = True) -> Segment:
        return Segment(
            start=start,
            q_len=length,
            is_prefill=is_prefill,
            layout=self.layout,
            pages=self.pages,
            block_table=self.table,
        )


def logits_of(
    decoder: Decoder, ids: np.ndarray, *, cuts: Sequence[int] = (), kind: CacheType = "f32"
) -> np.ndarray:
    """Logits of every position, the ids given in pieces that end at `cuts`."""
    cache = Cache(decoder.config, kind=kind)
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        segment = cache.segment(start, stop - start, is_prefill=stop - start > 1)
        logits, _ = decoder.forward(ids[start:stop], [segment], logit_rows=range(stop - start))
        assert logits is not None
        parts.append(logits)
    return np.concatenate(parts)


VARIANTS: dict[str, dict[str, Any]] = {
    "f32": {},
    "untied": {"tie": False},
    "one kv head": {"kv_heads": 1, "layers": 3},
    "wide heads": {"head_dim": 32},
    "partial rope": {"head_dim": 32, "llama.rope.dimension_count": 16},
    "rope factors": {"rope_factors": [1.0, 1.0, 2.0, 3.5, 8.0, 8.0, 8.0, 8.0]},
    "f16": {"weight_type": "F16"},
    "bf16": {"weight_type": "BF16"},
    "q8_0": {"weight_type": "Q8_0"},
    "q4_0": {"weight_type": "Q4_0", "tie": False},
    "q4_1": {"weight_type": "Q4_1", "embedding_type": "Q8_0"},
    "q6_k": {"weight_type": "Q6_K", "hidden": 256, "heads": 8, "ffn": 256, "layers": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_a_float64_llama(tmp_path: Path, variant: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **VARIANTS[variant])
    got = logits_of(build(path), IDS)
    want = LlamaOracle(path).logits(IDS)
    assert got.dtype == np.float32
    assert want.std() > 0.3
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_row_order_of_queries_and_keys_matters_after_position_0(tmp_path: Path) -> None:
    # Shows that the comparison above can see a wrong pairing of rotated dimensions.
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    wrong = LlamaOracle(path, restore_rows=False).logits(IDS)
    got = logits_of(build(path), IDS)
    np.testing.assert_allclose(got[0], wrong[0], rtol=0, atol=1e-4)
    assert np.abs(got[1:] - wrong[1:]).max(axis=1).min() > 1e-2


@pytest.mark.parametrize("weight_type", ["F32", "Q8_0", "Q4_0", "Q4_1"])
def test_packed_weights_stay_near_the_oracle(tmp_path: Path, weight_type: Any) -> None:
    # The oracle reads the quantised weights, so what is left is the rounding of activations.
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=weight_type)
    got = logits_of(build(path, weights="auto"), IDS)
    want = LlamaOracle(path).logits(IDS)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 1e-4 < error < 0.03


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_pieces_of_a_prompt_and_single_tokens_give_the_same_bits(
    tmp_path: Path, kind: CacheType
) -> None:
    decoder = build(write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1"), weights="auto")
    whole = logits_of(decoder, IDS, kind=kind)
    for cuts in ((32,), (32, 64), (64, 65, 66, 67)):
        assert logits_of(decoder, IDS, cuts=cuts, kind=kind).tobytes() == whole.tobytes()


def test_rows_of_two_sequences_do_not_meet(tmp_path: Path) -> None:
    decoder = build(write_tiny_gguf(tmp_path / "tiny.gguf"))
    first, second = IDS[:40], IDS[40:]
    caches = [Cache(decoder.config), Cache(decoder.config)]
    segments = [caches[0].segment(0, 40), caches[1].segment(0, 30)]
    logits, stats = decoder.forward(IDS, segments, logit_rows=[39, 69, 0])
    assert logits is not None
    assert len(stats.segments) == 2
    assert logits[0].tobytes() == logits_of(decoder, first)[39].tobytes()
    assert logits[1].tobytes() == logits_of(decoder, second)[29].tobytes()
    assert logits[2].tobytes() == logits_of(decoder, first)[0].tobytes()


def test_given_positions_are_used(tmp_path: Path) -> None:
    decoder = build(write_tiny_gguf(tmp_path / "tiny.gguf"))

    def at(positions: np.ndarray | None) -> bytes:
        segment = Cache(decoder.config).segment(0, 3)
        logits, _ = decoder.forward(IDS[:3], [segment], positions=positions, logit_rows=[2])
        assert logits is not None
        return logits.tobytes()

    assert at(np.array([0, 1, 2])) == at(None)
    assert at(np.array([0, 1, 2], np.int32)) == at(None)
    assert at(np.array([0, 3, 6])) != at(None)


# -- driving the backend ---------------------------------------------------------------------


class Recorder:
    """A backend that computes nothing and writes down what it is asked."""

    name, isa, threads = "recorder", "none", 1

    def __init__(self, *, logit: float = 0.0) -> None:
        self.calls: list[Any] = []
        self.logit = logit

    def pack_weight(self, source: Any, *, kind: Any = None) -> Any:
        self.calls.append((source.format, kind, source.rows, source.cols))
        return source

    def build_layer(self, shape: Any, weights: Any) -> Any:
        return weights

    def begin_step(self, segments: Any, cos: Any, sin: Any) -> Any:
        self.calls = [("begin", cos.shape)]
        return StepStats(dense_ns=1000)

    def run_layer(self, layer: Any, index: int, hidden: Any, step: Any, *, kept: Any) -> None:
        self.calls.append(("layer", index, hidden.shape, kept if kept is None else kept.tolist()))
        hidden += 1

    def step_stats(self, step: Any) -> StepStats:
        return step  # type: ignore[no-any-return]

    def rms_norm(self, x: Any, weight: Any, *, eps: float) -> Any:
        self.calls.append(("norm", x.copy(), eps))
        return x

    def project(self, x: Any, weight: Any) -> Any:
        return np.full((len(x), weight.rows), self.logit, np.float32)


def recorded(path: Path, recorder: Recorder, **options: Any) -> Decoder:
    return build(path, backend=recorder, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("types", "mode", "packed"),
    [
        (("Q4_0", "Q8_0"), "auto", (("q4_0", "q4"), ("q8_0", "q8"))),
        (("Q4_1", "F16"), "auto", (("q4_1", "q4"), ("f32", "q8"))),
        (("F32", "Q4_0"), "auto", (("f32", "q8"), ("q4_0", "q4"))),
        (("Q8_0", "BF16"), "f32", (("f32", "f32"), ("f32", "f32"))),
        (("Q8_0", "Q4_0"), "q8", (("q8_0", "q8"), ("f32", "q8"))),
        # The output matrix, here the embedding's, keeps 8 bits.
        (("F16", "BF16"), "q4", (("f32", "q4"), ("f32", "q8"))),
    ],
)
def test_how_weights_are_packed(tmp_path: Path, types: Any, mode: str, packed: Any) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", weight_type=types[0], embedding_type=types[1], ffn=160
    )
    recorder = Recorder()
    recorded(path, recorder, weights=mode)
    layer, output = packed
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (160, 64), (160, 64), (64, 160)]
    assert recorder.calls == [*((*layer, *shape) for shape in shapes * 2), (*output, 288, 64)]


def test_a_step_goes_through_every_layer_then_the_asked_rows(tmp_path: Path) -> None:
    recorder = Recorder()
    decoder = recorded(write_tiny_gguf(tmp_path / "tiny.gguf", layers=3), recorder)
    done: list[int] = []
    segment = Cache(decoder.config).segment(0, 5)
    logits, stats = decoder.forward(
        IDS[:5], [segment], logit_rows=[4, 1], on_layer=lambda: done.append(len(recorder.calls))
    )
    layers = [("layer", i, (5, 64), None) for i in range(2)]
    layers.append(("layer", 2, (5, 64), [1, 4]))
    assert recorder.calls[:-1] == [("begin", (5, 8)), *layers]
    assert done == [2, 3, 4]
    name, hidden, eps = recorder.calls[-1]
    assert (name, eps) == ("norm", pytest.approx(1e-5))
    embedding = LlamaOracle(tmp_path / "tiny.gguf").weights["token_embd.weight"]
    np.testing.assert_allclose(hidden, embedding[IDS[[4, 1]]] + 3, rtol=1e-6)
    assert logits is not None
    assert logits.shape == (2, 288)
    assert stats.dense_ns > 1000  # the output projection is counted too

    logits, stats = decoder.forward(IDS[:5], [segment])
    assert logits is None
    assert stats.dense_ns == 1000
    assert recorder.calls[-1] == ("layer", 2, (5, 64), [])
    logits, _ = decoder.forward(IDS[:5], [segment], logit_rows=[])
    assert logits is not None
    assert logits.shape == (0, 288)


def test_what_on_layer_raises_ends_the_step(tmp_path: Path) -> None:
    recorder = Recorder()
    decoder = recorded(write_tiny_gguf(tmp_path / "tiny.gguf", layers=3), recorder)

    def stop() -> None:
        if recorder.calls[-1][1] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward(
            IDS[:5], [Cache(decoder.config).segment(0, 5)], logit_rows=[0], on_layer=stop
        )
    assert recorder.calls[-1][:2] == ("layer", 1)


def test_arguments_that_do_not_fit_are_refused_before_anything_runs(tmp_path: Path) -> None:
    recorder = Recorder()
    decoder = recorded(write_tiny_gguf(tmp_path / "tiny.gguf"), recorder)
    recorder.calls.clear()
    segment = Cache(decoder.config).segment(0, 5)
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (ShapeError, "token_ids", IDS[:4], {}),
        (ShapeError, "token_ids", IDS[:5].astype(np.float32), {}),
        (ShapeError, "positions", IDS[:5], {"positions": np.arange(4)}),
        (ShapeError, "positions", IDS[:5], {"positions": np.arange(5.0)}),
        (ShapeError, "positions", IDS[:5], {"positions": np.arange(-1, 4)}),
        (ShapeError, "logit_rows", IDS[:5], {"logit_rows": [5]}),
        (ShapeError, "logit_rows", IDS[:5], {"logit_rows": [-1]}),
        (ConfigError, "below 288, got 288", np.full(5, 288, np.int32), {}),
        (ConfigError, "below 288, got -1", np.full(5, -1, np.int32), {}),
    ]
    for error, words, ids, options in cases:
        with pytest.raises(error, match=words):
            decoder.forward(ids, [segment], **options)
    with pytest.raises(ShapeError, match="segments"):
        decoder.forward(IDS[:0], [])
    assert recorder.calls == []


@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_logits_that_are_no_numbers(tmp_path: Path, logit: float) -> None:
    decoder = recorded(write_tiny_gguf(tmp_path / "tiny.gguf"), Recorder(logit=logit))
    with pytest.raises(NumericalError, match="logits"):
        decoder.forward(IDS[:5], [Cache(decoder.config).segment(0, 5)], logit_rows=[4])


# -- files -----------------------------------------------------------------------------------


def bad(value: float) -> np.ndarray:
    matrix = np.ones((64, 64), np.float32)
    matrix[3, 7] = value
    return matrix


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensors": {"blk.1.attn_q.weight": None}}, "tensor 'blk.1.attn_q.weight', got none"),
        ({"tensors": {"output_norm.weight": None}}, "tensor 'output_norm.weight', got none"),
        ({"tensors": {"blk.0.attn_output.bias": np.ones(64)}}, "also 'blk.0.attn_output.bias'"),
        ({"layers": 3, "llama.block_count": 2}, "2 layers, got also 'blk.2.attn_q.weight'"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_q.weight', got none"),
        (
            {"tensors": {"blk.0.ffn_up.weight": np.ones((64, 96))}},
            r"shape \(96, 64\), got \(64, 96",
        ),
        ({"tensors": {"blk.0.ffn_norm.weight": np.ones(63)}}, r"shape \(64,\), got \(63,\)"),
        (
            {"tensors": {"blk.1.attn_q.weight": bad(np.nan)}},
            r"'blk.1.attn_q.weight'.*row 3, column 7",
        ),
        (
            {"tensors": {"blk.0.attn_output.weight": bad(np.inf)}},
            "'blk.0.attn_output.weight'.*NaN or",
        ),
        ({"tensors": {"output_norm.weight": np.full(64, np.nan)}}, "'output_norm.weight'.*finite"),
        ({"rope_factors": [1.0] * 7}, r"'rope_freqs.weight'.*\(8,\), got \(7,\)"),
        ({"rope_factors": [1.0] * 7 + [0.0]}, "'rope_freqs.weight'.*positive"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_packing(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **options)
    recorder = Recorder()
    with pytest.raises(ModelFileError, match=words):
        recorded(path, recorder)
    assert recorder.calls == []


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells what of a mapping is resident")
def test_a_file_does_not_stay_in_memory_beside_its_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", layers=3, hidden=256, ffn=2048, kv_heads=4)
    seen: list[int] = []
    pack = ReferenceBackend.pack_weight

    def watched(self: ReferenceBackend, source: Any, **options: Any) -> Any:
        seen.append(resident_bytes(path))
        return pack(self, source, **options)

    monkeypatch.setattr(ReferenceBackend, "pack_weight", watched)
    decoder = build(path, weights="auto")
    largest = 3 * 2048 * 256 * 4 + 4 * 256 * 256 * 4  # one layer
    assert path.stat().st_size > 3 * largest
    # Around a page that is asked for, the kernel maps its neighbours too, up to 2 MiB.
    assert 0 < max(seen) < largest + 2**22
    assert resident_bytes(path) == 0
    assert np.isfinite(logits_of(decoder, IDS)).all()


def resident_bytes(path: Path) -> int:
    """What of the mapping of `path` is in this process's memory."""
    inside, total = False, 0
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            total += 1024 * int(line.split()[1])
    return total


def test_unknown_mode_and_fingerprint(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="expected one of auto, q4, q8, f32, got 'q2'"):
        build(path, weights="q2")
    assert recorded(path, Recorder()).fingerprint == GgufFile.open(path).fingerprint()
