"""Models whose layers read windows: only the others are ever sparse, and every reply says so."""

from pathlib import Path

import numpy as np
import pytest

from kvsieve import LLM, SamplingParams, SparseAttention
from tests.checkpoints import token_ids, write_folder, write_gguf

SPARSE = SparseAttention(k=2, selector="even", dense_tail=0)
PROMPT = [int(token) for token in token_ids("gemma3")]


@pytest.mark.parametrize("write", [write_folder, write_gguf])
def test_a_reply_says_which_layers_were_sparse(tmp_path: Path, write) -> None:
    with LLM(write(tmp_path / "model", "gemma3")) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        sparse = llm.generate(PROMPT, params, sparse=SPARSE).attention
        exact = llm.generate(PROMPT, params, sparse=None).attention
        short = llm.generate(PROMPT[:40], params, sparse=SPARSE).attention
    assert (sparse.mode, sparse.sparse_layers) == ("sparse", (5,))
    assert sparse.to_json()["sparse_layers"] == [5]
    assert (exact.mode, exact.sparse_layers) == ("exact", ())
    assert (short.mode, short.sparse_layers) == ("exact", ())
    # Six of seven layers read a window of 40, which is 3 blocks here, exactly: of the 7 blocks of a
    # decoded token the full layer reads 2.
    assert exact.decode.density == 1.0
    assert sparse.decode.attended == 2 * (6 * 3 + 2)
    assert exact.decode.attended == 2 * (6 * 3 + 7)


def test_a_model_of_windows_alone_stays_exact_and_says_why(tmp_path: Path) -> None:
    with LLM(write_folder(tmp_path / "model", "mistral")) as llm:
        assert llm.config.full_layers == ()
        exact = llm.logits(PROMPT, sparse=None)
        assert np.array_equal(llm.logits(PROMPT, sparse=SPARSE), exact)
        report = llm.generate(PROMPT, SamplingParams(max_tokens=2), sparse=SPARSE).attention
    assert report.mode == "exact"
    assert report.exact_because is not None
    assert "every layer of the model reads a window" in report.exact_because


def test_a_llama_is_sparse_in_every_layer(tmp_path: Path) -> None:
    with LLM(write_folder(tmp_path / "model", "llama")) as llm:
        report = llm.generate(PROMPT, SamplingParams(max_tokens=2), sparse=SPARSE).attention
    assert report.sparse_layers == (0, 1)
