"""A sequence led from outside runs what a generation runs, and shows what attention did."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import CapacityError, ConfigError
from tests.tiny_model import write_tiny_gguf

SPARSE = SparseAttention(k=3, selector="even", dense_tail=0)
IDS = np.random.default_rng(0).integers(3, 259, 200).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    with LLM(write_tiny_gguf(path, head_dim=32, context=256), backend="reference") as llm:
        yield llm


@pytest.mark.parametrize("sparse", [None, SPARSE])
def test_led_greedily_it_says_what_a_generation_says(
    llm: LLM, sparse: SparseAttention | None
) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    completion = llm.generate(IDS, params, sparse=sparse)
    said = []
    with llm.walk(IDS, max_tokens=256, sparse=sparse) as walk:
        logits = walk.read_prompt()
        for _ in range(6):
            logits[sorted(llm.tokenizer.eos_ids)] = -np.inf
            said.append(int(logits.argmax()))
            logits = walk.step(said[-1])
        # The generation's last token did not go through the model.
        assert walk.report.prefill == completion.attention.prefill
        assert walk.report.decode.causal > completion.attention.decode.causal
    assert said == completion.token_ids


def test_a_rewound_walk_repeats_itself_bit_for_bit(llm: LLM) -> None:
    with llm.walk(IDS[:100], max_tokens=200, sparse=SPARSE) as walk:
        walk.read_prompt()
        once = [walk.step(token) for token in IDS[100:140]]
        walk.rewind(105)
        again = [walk.step(token) for token in IDS[105:140]]
    assert all(np.array_equal(a, b) for a, b in zip(once[5:], again, strict=True))


def test_rows_of_a_prompt_are_given_from_where_they_are_wanted(llm: LLM) -> None:
    everything = llm.logits(IDS)
    chunks = LLM(llm._loaded.path, backend="reference", prefill_chunk=64)
    with chunks, chunks.walk(IDS, max_tokens=200) as walk:
        got = list(walk.prompt_logits(start=70))
    assert [(first, len(rows)) for first, rows in got] == [(64, 64), (128, 64), (192, 8)]
    for first, rows in got:
        assert np.array_equal(rows, everything[first : first + len(rows)])


def test_every_layer_of_a_step_is_heard_once_in_order(llm: LLM) -> None:
    heard = []
    with llm.walk(IDS[:150], max_tokens=200, sparse=SPARSE) as walk:
        walk.read_prompt()
        walk.step(IDS[150], on_attention=lambda layer, trace: heard.append((layer, trace)))
    assert [layer for layer, _ in heard] == list(range(llm.config.num_layers))
    for _, trace in heard:
        assert trace.q.shape == (1, llm.config.num_q_heads, llm.config.head_dim)
        assert np.diff(trace.lists.indptr).tolist() == [3] * llm.config.num_q_heads


def test_what_it_cannot_do_is_refused(llm: LLM) -> None:
    with pytest.raises(CapacityError, match=r"expected 100 \(the prompt\) to 256 .* got 300"):
        llm.walk(IDS[:100], max_tokens=300)
    with llm.walk(IDS[:100], max_tokens=200) as walk:
        with pytest.raises(ConfigError, match=r"\[Walk.step\] token"):
            walk.step(5)
        walk.read_prompt()
        with pytest.raises(ConfigError, match="expected 100 to 100, got 99"):
            walk.rewind(99)
    assert llm._pool.num_free == 8
