"""Tiny models of every architecture against the logits of the Transformers library.

Frozen by benchmarks/golden/make_transformers_golden.py. 200 positions: beyond the windows (40 and
50 tokens) of the models that have one, and over several blocks and tiles.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvsieve.kernels.backend import Segment
from kvsieve.kernels.layout import PageLayout
from kvsieve.kernels.native import NativeBackend
from kvsieve.kernels.reference.backend import ReferenceBackend
from kvsieve.models import decoder
from kvsieve.models.decoder import Decoder
from kvsieve.models.model_file import open_model_file, read_config
from kvsieve.types import CacheType
from tests.checkpoints import (
    CONFIGS,
    KEPT,
    LONG,
    NOT_IN_A_GGUF,
    token_ids,
    write_folder,
    write_gguf,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
IN_A_GGUF = [name for name in CONFIGS if name not in NOT_IN_A_GGUF]


def logits_of(
    path: Path, name: str, *, count: int | None = None, backend=None, cache_type: CacheType = "f32"
) -> np.ndarray:
    """Logits of the first positions, f32 weights: a prompt in two parts, then tokens."""
    file = open_model_file(path)
    model = Decoder(read_config(file), backend or NativeBackend(threads=2), file, weights="f32")
    config = model.config
    ids = token_ids(name).astype(np.int32)
    count = count or len(ids)
    layout = PageLayout(k_type=cache_type, v_type=cache_type, head_dim=config.head_dim)
    blocks = -(-count // 32)
    pages = np.full(
        (config.num_layers, blocks, config.num_kv_heads, layout.page_bytes), 0x5A, np.uint8
    )
    table = np.arange(blocks, dtype=np.int32)[::-1].copy()
    tail = max(1, count - 8)
    found = []
    for start, stop in (
        (0, tail // 2),
        (tail // 2, tail),
        *((i, i + 1) for i in range(tail, count)),
    ):
        if start == stop:
            continue
        segment = Segment(
            start=start,
            q_len=stop - start,
            is_prefill=start < tail,
            layout=layout,
            pages=pages,
            block_table=table,
        )
        logits, _ = model.forward(ids[start:stop], [segment], logit_rows=range(stop - start))
        found.append(logits)
    file.close()
    rows = np.concatenate(found)
    return rows[-KEPT:] if name == LONG else rows


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    want = np.load(GOLDEN / f"{name}.npy")
    assert want.std() > 0.3
    got = logits_of(write_folder(tmp_path / name, name), name)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", IN_A_GGUF)
def test_a_gguf_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    got = logits_of(write_gguf(tmp_path / "tiny.gguf", name), name)
    np.testing.assert_allclose(got, np.load(GOLDEN / f"{name}.npy"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "qwen2"])
def test_the_specification_gives_them_too(tmp_path: Path, name: str) -> None:
    got = logits_of(write_folder(tmp_path / name, name), name, count=72, backend=ReferenceBackend())
    np.testing.assert_allclose(got, np.load(GOLDEN / f"{name}.npy")[:72], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_large_channels_of_keys_do_not_cost_the_others_their_bits(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms are balanced: the same bits in float32, and much less of an error in 8 bits."""
    file = write_folder(tmp_path / name, name) / "model.safetensors"
    tensors = load_file(file)
    for key in tensors:
        if key.endswith("k_norm.weight"):
            tensors[key][[3, 19]] = 25.0
    save_file(tensors, file)

    def found(cache_type: CacheType) -> np.ndarray:
        return logits_of(file.parent, name, count=96, cache_type=cache_type)

    balanced = {kind: found(kind) for kind in ("f32", "q8_0")}
    monkeypatch.setattr(decoder, "balanced_norms", lambda q, k, **_: (q, k))
    plain = {kind: found(kind) for kind in ("f32", "q8_0")}
    np.testing.assert_array_equal(balanced["f32"], plain["f32"])
    error, before = (np.abs(one["q8_0"] - one["f32"]).mean() for one in (balanced, plain))
    assert error < 0.6 * before


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("weight_type", ["F32", "F16", "Q8_0"])
def test_mdl_02_only_llama_has_its_rows_of_queries_and_keys_in_another_order(
    tmp_path: Path, name: str, weight_type: str
) -> None:
    """The wrong order agrees at position 0, where nothing rotates, and nowhere else."""
    right = logits_of(
        write_gguf(tmp_path / "r.gguf", name, weight_type=weight_type), name, count=65
    )
    folder = logits_of(write_folder(tmp_path / "folder", name), name, count=65)
    tolerance = {"F32": 1e-5, "F16": 0.02, "Q8_0": 0.2}[weight_type]
    np.testing.assert_allclose(right, folder, rtol=0, atol=tolerance)
    wrong = logits_of(
        write_gguf(tmp_path / "w.gguf", name, weight_type=weight_type, permute=False),
        name,
        count=65,
    )
    if name == "llama":
        np.testing.assert_allclose(wrong[0], right[0], rtol=0, atol=1e-5)
        assert np.abs(wrong[1:] - right[1:]).max(axis=1).min() > 0.02
    else:
        assert np.array_equal(wrong, right)
