"""Qwen3: the whole forward pass against a float64 one, on both backends, and its files' faults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsieve.errors import ModelFileError
from kvsieve.kernels.backend import Backend
from kvsieve.kernels.backends import make_backend
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import GgufFile
from tests.models.qwen_oracle import QwenOracle
from tests.models.test_decoder import IDS, Recorder, build, logits_of, recorded
from tests.tiny_model import write_tiny_gguf


@pytest.fixture(scope="module", params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "native":
        pytest.importorskip("kvsieve._native", reason="the C++ core is not built")
    return make_backend(request.param, threads=1, isa=None)


def write(tmp_path: Path, **options: Any) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen3", **options)


VARIANTS: dict[str, dict[str, Any]] = {
    "f32": {},
    "untied": {"tie": False},
    "heads wider than the hidden size": {"head_dim": 48, "kv_heads": 1, "layers": 3},
    "partial rope": {"head_dim": 32, "qwen3.rope.dimension_count": 16},
    "large base": {"qwen3.rope.freq_base": 5e6, "qwen3.attention.layer_norm_rms_epsilon": 1e-6},
    "f16": {"weight_type": "F16"},
    "q8_0": {"weight_type": "Q8_0", "head_dim": 32},
    "q4_0": {"weight_type": "Q4_0", "tie": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_a_float64_qwen3(tmp_path: Path, backend: Backend, variant: str) -> None:
    path = write(tmp_path, **VARIANTS[variant])
    got = logits_of(build(path, backend=backend), IDS)
    want = QwenOracle(path).logits(IDS)
    assert want.std() > 0.3
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("weight_type", ["F32", "Q8_0", "Q4_0"])
def test_rows_are_those_of_the_checkpoint(tmp_path: Path, weight_type: Any) -> None:
    """MDL-02: a loader that reorders them as a Llama file's is right at position 0, and only there.

    The oracle above leaves them in place, for quantised rows too.
    """
    path = write(tmp_path, weight_type=weight_type)
    wrong = QwenOracle(path, reorder_rows=True).logits(IDS[:65])
    got = logits_of(build(path), IDS[:65])
    np.testing.assert_allclose(got[0], wrong[0], rtol=0, atol=1e-4)
    assert np.abs(got[1:] - wrong[1:]).max(axis=1).min() > 1e-2


@pytest.mark.parametrize("wrong", [{"head_norms": False}, {"norm_first": False}])
def test_the_comparison_sees_norms_left_out_or_after_rope(
    tmp_path: Path, wrong: dict[str, bool]
) -> None:
    path = write(tmp_path)
    other = QwenOracle(path, **wrong).logits(IDS)
    got = logits_of(build(path), IDS)
    assert np.abs(got[1:] - other[1:]).max(axis=1).min() > 1e-2


@pytest.mark.parametrize("which", ["q", "k"])
def test_each_norm_is_read_from_its_own_tensor(
    tmp_path: Path, backend: Backend, which: str
) -> None:
    name = f"blk.1.attn_{which}_norm.weight"
    path = write(tmp_path, tensors={name: np.linspace(-1, 3, 16, dtype=np.float32)})
    want = QwenOracle(path).logits(IDS)
    got = logits_of(build(path, backend=backend), IDS)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_pieces_of_a_prompt_give_the_same_bits(tmp_path: Path, backend: Backend) -> None:
    path = write(tmp_path, weight_type="Q4_0", head_dim=32)
    decoder = build(path, backend=backend, weights="auto")
    whole = logits_of(decoder, IDS, kind="q8_0")
    for cuts in ((32,), (64, 65, 66, 67)):
        assert logits_of(decoder, IDS, cuts=cuts, kind="q8_0").tobytes() == whole.tobytes()


# -- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.1.attn_q_norm.weight": None}, "tensor 'blk.1.attn_q_norm.weight', got none"),
        ({"blk.0.attn_k_norm.weight": None}, "tensor 'blk.0.attn_k_norm.weight', got none"),
        # One norm over all heads, as other architectures have it, is not one per head.
        ({"blk.0.attn_q_norm.weight": np.ones(64)}, r"attn_q_norm.*\(16,\), got \(64,\)"),
        ({"blk.0.attn_k_norm.weight": np.ones((2, 16))}, r"attn_k_norm.*\(16,\), got \(2, 16\)"),
        ({"blk.1.attn_k_norm.weight": np.full(16, np.nan)}, "'blk.1.attn_k_norm.weight'.*finite"),
        ({"blk.0.attn_output.bias": np.ones(64)}, "qwen3 model of 2 layers, got also 'blk.0.attn"),
        ({"rope_freqs.weight": np.ones(8)}, "qwen3 model of 2 layers, got also 'rope_freqs.weig"),
    ],
)
def test_wrong_tensors_are_refused_before_packing(
    tmp_path: Path, tensors: dict[str, Any], words: str
) -> None:
    recorder = Recorder()
    with pytest.raises(ModelFileError, match=words):
        recorded(write(tmp_path, tensors=tensors), recorder)
    assert recorder.calls == []


def test_a_llama_has_no_head_norms(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16)}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tensors=extra)
    with pytest.raises(ModelFileError, match=r"llama model.*got also 'blk\.0\.attn_q_norm"):
        recorded(path, Recorder())


def test_configuration(tmp_path: Path) -> None:
    options = {"head_dim": 32, "tie": False, "qwen3.rope.freq_base": 5e6}
    config = ModelConfig.from_gguf(GgufFile.open(write(tmp_path, **options)))
    assert (config.architecture, config.rope_interleaved) == ("qwen3", False)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.rope_dim, config.rope_theta, config.tie_embeddings) == (32, 5e6, False)
    assert config.attention_scale == pytest.approx(32**-0.5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen3.final_logit_softcapping", 30.0),
        ("qwen3.expert_count", 8),
        ("qwen3.attention.sliding_window", 256),
        # Positions in three dimensions belong to the models that see.
        ("qwen3.rope.dimension_sections", [24, 20, 20, 0]),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = write(tmp_path, **{key: value})
    with pytest.raises(ModelFileError, match=rf"\[ModelConfig\] {key}.*support"):
        ModelConfig.from_gguf(GgufFile.open(path))


@pytest.mark.parametrize("name", ["qwen2vl", "qwen3moe", "qwen"])
def test_relatives_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, **{"general.architecture": name})
    with pytest.raises(ModelFileError, match=rf"one of .*llama.*, got '{name}'"):
        ModelConfig.from_gguf(GgufFile.open(path))
