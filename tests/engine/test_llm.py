"""The engine from end to end on a tiny model, and what it promises to repeat bit for bit."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.kv_cache import KVCache
from kvsieve.engine.batch import Batch, SequenceStep
from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.sequence import Sequence
from kvsieve.errors import TemplateError
from tests.tiny_model import write_tiny_gguf

CONTEXT = 256
CHUNKS = (1, 31, 32, 33, 64, 130)
SPARSE = {
    "probe": SparseAttention(k=3, selector="probe", dense_tail=32),
    "even-group": SparseAttention(k=2, selector="even", share="group", dense_tail=0),
    "anchors": SparseAttention(k=3, first_layer=1, dense_tail=32),
    "wide-blocks": SparseAttention(
        k=2, selector="probe", block_size=64, num_probes=4, dense_tail=0
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, head_dim=32, weight_type="Q8_0", context=CONTEXT)


@pytest.fixture(scope="module", params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        needs_native()
    return request.param


def needs_native() -> None:
    pytest.importorskip("kvsieve._native", reason="the C++ core is not built")


@pytest.fixture(scope="module")
def llm(model: Path, backend: Any) -> Iterator[LLM]:
    with LLM(model, backend=backend) as llm:
        yield llm


def make_ids(count: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, count).tolist()


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


def free_blocks(llm: LLM) -> int:
    return llm._pool.num_free


# -- what comes back ---------------------------------------------------------------------


def test_a_completion_says_what_happened(llm: LLM):
    done = llm.generate("the pass key is", SamplingParams(max_tokens=6, ignore_eos=True))
    assert done.prompt_tokens == len(llm.tokenizer.encode("the pass key is"))
    assert len(done.token_ids) == 6
    assert done.text == llm.tokenizer.decode(done.token_ids)
    assert done.finish_reason == "length"
    assert done.attention.mode == "exact"
    assert done.attention.exact_because is None
    assert done.attention.prefill.density == 1
    assert done.attention.decode.density == 1
    assert len(done.tokens) == 5
    assert done.engine.model_name == "tiny"
    assert free_blocks(llm) == CONTEXT // 32


def test_greedy_text_is_the_argmax_of_the_logits(llm: LLM):
    prompt = make_ids(50)
    done = llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    logits = llm.logits(prompt + done.token_ids)
    logits[:, sorted(llm.tokenizer.eos_ids)] = -np.inf
    assert done.token_ids == logits[49:-1].argmax(axis=1).tolist()


def test_the_stream_and_the_completion_agree(llm: LLM):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    events = list(llm.stream("the key", params))
    done = llm.generate("the key", params)
    last = events[-1].completion
    assert last is not None
    assert "".join(event.text for event in events) == last.text == done.text
    assert [event.token_id for event in events[:-1]] == done.token_ids


def test_block_reads_of_an_exact_run_are_counted_from_first_principles(llm: LLM):
    done = llm.generate(make_ids(70), SamplingParams(max_tokens=3, ignore_eos=True))
    layers_and_heads = 2 * 2
    # Rows of block 0 read 1 block, of block 1 two, the last six three; then two decoded tokens.
    assert done.attention.prefill.causal == layers_and_heads * (32 * 1 + 32 * 2 + 6 * 3)
    assert done.attention.decode.causal == layers_and_heads * 2 * 3
    assert done.attention.decode.blocks_per_query == 3


# Blocks each of tiles 0..7 reads: all i + 1, or the budget; in `wide-blocks` one group of two
# blocks besides the tile's own group, of which the tile sees one block or two.
TILE_READS = {
    "anchors": [1, 2, 3, 3, 3, 3, 7, 8],
    "probe": [1, 2, 3, 3, 3, 3, 7, 8],  # tokens from 250 - 32 = 218 on, so tile 6 on, are exact
    "even-group": [1, 2, 2, 2, 2, 2, 2, 8],  # the last tile is in part behind the prompt's end
    "wide-blocks": [1, 2, 3, 4, 3, 4, 3, 8],
}


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_run_is_sparse_and_says_so(llm: LLM, name: str):
    sparse = SPARSE[name]
    done = llm.generate(make_ids(250), SamplingParams(max_tokens=4, ignore_eos=True), sparse=sparse)
    report = done.attention
    assert (report.mode, report.exact_because) == ("sparse", None)
    assert (report.selector, report.share, report.k) == (sparse.selector, sparse.sharing, sparse.k)
    layers_and_heads, rows = 2 * 2, [32] * 7 + [26]
    assert report.prefill.attended == layers_and_heads * np.dot(rows, TILE_READS[name])
    assert report.prefill.causal == layers_and_heads * np.dot(rows, range(1, 9))
    heads_apart = 2 if sparse.share == "head" else 1
    per_query = report.decode.blocks_per_query
    assert per_query is not None
    assert per_query <= heads_apart * sparse.k * (sparse.block_size // 32)
    assert per_query < 8


def test_a_call_may_ask_for_exact_attention_of_a_sparse_engine(model: Path, backend: Any):
    llm = LLM(model, backend=backend, sparse=SPARSE["probe"])
    params = SamplingParams(max_tokens=2)
    assert llm.generate(make_ids(200), params).attention.mode == "sparse"
    assert llm.generate(make_ids(200), params, sparse=None).attention.mode == "exact"


def test_sparse_that_never_was_says_why(llm: LLM):
    done = llm.generate(make_ids(100), SamplingParams(max_tokens=2), sparse=SparseAttention(k=4))
    assert done.attention.mode == "exact"
    assert done.attention.exact_because == "all 4 blocks fit the budget of 4"
    assert done.attention.k == 4


# -- the same bits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *SPARSE])
def test_any_prefill_chunk_gives_the_same_logits(model: Path, backend: Any, name: str | None):
    sparse = SPARSE[name] if name else None
    ids = make_ids(168)
    runs = [
        LLM(model, backend=backend, prefill_chunk=chunk).logits(ids, sparse=sparse, prompt_len=165)
        for chunk in CHUNKS
    ]
    for chunk, logits in zip(CHUNKS, runs, strict=True):
        assert same_bits(logits, runs[0]), chunk


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0", "q4_0", ("q8_0", "f16")])
def test_exact_logits_do_not_tell_a_prompt_from_generated_tokens(
    model: Path, backend: Any, cache_type: Any
):
    llm = LLM(model, backend=backend, cache_type=cache_type)
    ids = make_ids(100)
    assert same_bits(llm.logits(ids), llm.logits(ids, prompt_len=60))


@pytest.mark.parametrize("selector", ["probe", "even"])
def test_a_budget_that_holds_every_block_is_exact_bit_for_bit(llm: LLM, selector: Any):
    ids = make_ids(200)
    sparse = SparseAttention(k=7, selector=selector, dense_tail=0)
    exact = llm.logits(ids, prompt_len=190)
    assert same_bits(exact, llm.logits(ids, prompt_len=190, sparse=sparse))
    smaller = SparseAttention(k=3, selector=selector, dense_tail=0)
    assert not same_bits(exact, llm.logits(ids, prompt_len=190, sparse=smaller))


def test_run_after_run(llm: LLM):
    ids = make_ids(180)
    first = llm.logits(ids, prompt_len=170, sparse=SPARSE["probe"])
    llm.logits(make_ids(90, seed=1))  # leaves other bytes in the pages
    assert same_bits(first, llm.logits(ids, prompt_len=170, sparse=SPARSE["probe"]))


def test_a_later_token_changes_nothing_before_it(llm: LLM):
    ids = make_ids(120)
    changed = [*ids[:110], *make_ids(10, seed=3)]
    assert same_bits(llm.logits(ids)[:110], llm.logits(changed)[:110])


def test_threads_change_nothing(model: Path):
    needs_native()
    ids = make_ids(200)
    runs = [
        LLM(model, backend="native", threads=threads).logits(
            ids, prompt_len=195, sparse=SPARSE["probe"]
        )
        for threads in (1, 2, 3, 7)
    ]
    assert all(same_bits(run, runs[0]) for run in runs)


def new_sequence(llm: LLM, ids: list[int]) -> Sequence:
    cache = KVCache(llm._pool, max_tokens=len(ids))
    return Sequence(prompt_ids=np.asarray(ids, np.int32), cache=cache)


def prompt_rows(sequence: Sequence, start: int, end: int) -> SequenceStep:
    return SequenceStep(
        sequence=sequence, start=start, q_len=end - start, is_prefill=True, logit_rows="all"
    )


def test_a_chunk_may_start_off_the_grid(llm: LLM):
    ids = make_ids(130)
    sequence = new_sequence(llm, ids)
    parts = []
    for start, end in ((0, 37), (37, 96), (96, 130)):
        (rows,), _ = llm.engine.runner.forward(Batch(steps=(prompt_rows(sequence, start, end),)))
        parts.append(rows)
    sequence.cache.release()
    assert same_bits(np.concatenate(parts), llm.logits(ids))


def test_sequences_in_one_batch_are_as_alone(llm: LLM):
    first, second = make_ids(70), make_ids(45, seed=1)
    one, two = new_sequence(llm, first), new_sequence(llm, second)
    one.output_ids.append(9)
    runner = llm.engine.runner
    runner.forward(Batch(steps=(prompt_rows(one, 0, 64),)))
    (a, b), _ = runner.forward(Batch(steps=(prompt_rows(one, 64, 70), prompt_rows(two, 0, 45))))
    for sequence in (one, two):
        sequence.cache.release()
    assert a is not None
    assert b is not None
    assert same_bits(a, llm.logits(first)[64:])
    assert same_bits(b, llm.logits(second))


def test_interleaved_streams_are_as_alone(llm: LLM):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    prompts = [make_ids(40), make_ids(66, seed=1)]
    alone = [llm.generate(prompt, params).token_ids for prompt in prompts]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    together: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=False):
        for ids, event in zip(together, pair, strict=True):
            if event.token_id is not None:
                ids.append(event.token_id)
    assert together[0][:5] == alone[0][:5]
    assert together[1][:5] == alone[1][:5]
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    assert free_blocks(llm) == CONTEXT // 32


@pytest.mark.parametrize("chunk", [32, 96, 512])
def test_every_prompt_token_gives_away_one_probability_per_head(
    model: Path, backend: Any, chunk: int
):
    llm = LLM(model, backend=backend, prefill_chunk=chunk)
    ids = np.asarray(make_ids(100), np.int32)
    sequence = llm.preparation.sequence(ids, sparse=SPARSE["probe"], max_tokens=200, pool=llm._pool)
    while sequence.cache.num_tokens < 100:
        llm.engine.runner.forward(llm.engine.scheduler.next_batch([sequence]))
    assert sequence.cache.importance is not None
    per_layer = sequence.cache.importance.sum(axis=1) / 2.0**24
    # 4 heads x 100 rows of probabilities that sum to 1, each rounded to 2**-24.
    np.testing.assert_allclose(per_layer, [400, 400], rtol=1e-5)
    sequence.output_ids.append(5)
    before = sequence.cache.importance.copy()
    llm.engine.runner.forward(llm.engine.scheduler.next_batch([sequence]))
    assert np.array_equal(sequence.cache.importance, before)  # generated tokens give none


@pytest.mark.parametrize(
    ("sparse", "max_tokens", "keeps"),
    [
        (None, 250, set()),
        (SparseAttention(k=3), 250, {"index"}),
        (SparseAttention(k=3, selector="probe"), 250, {"index", "importance"}),
        (SparseAttention(k=3, selector="probe"), 96, set()),  # never outgrows the budget
        (SparseAttention(k=3, selector="probe", phase="prefill"), 250, {"index"}),
        (SparseAttention(k=3, selector="even"), 250, {"index"}),
    ],
)
def test_a_sequence_keeps_only_what_its_selector_reads(
    llm: LLM, sparse: SparseAttention | None, max_tokens: int, keeps: set[str]
):
    ids = np.asarray(make_ids(20), np.int32)
    cache = llm.preparation.sequence(
        ids, sparse=sparse, max_tokens=max_tokens, pool=llm._pool
    ).cache
    assert {name for name in ("index", "importance") if getattr(cache, name) is not None} == keeps


# -- interruptions and bad input ---------------------------------------------------------


@pytest.mark.parametrize("name", [None, "probe"])
def test_after_ctrl_c_the_engine_is_as_before(llm: LLM, name: str | None):
    sparse = SPARSE[name] if name else None
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    before = llm.generate(make_ids(200), params, sparse=sparse)
    calls = 0

    def interrupt() -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:  # after the second layer of the first chunk
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        llm.generate(make_ids(200), params, sparse=sparse, should_cancel=interrupt)
    assert free_blocks(llm) == CONTEXT // 32
    assert llm.generate(make_ids(200), params, sparse=sparse).token_ids == before.token_ids


def test_a_full_context_ends_with_length(llm: LLM):
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    done = llm.generate(make_ids(CONTEXT - 4), params)
    # Four more places, and the last token generated needs none.
    assert (len(done.token_ids), done.finish_reason) == (5, "length")
    full = llm.generate(make_ids(CONTEXT), params)
    assert (len(full.token_ids), full.finish_reason) == (1, "length")


def test_chat(llm: LLM):
    ids = llm.chat_prompt([{"role": "user", "content": "the key <|im_end|>"}])
    text = "".join(llm.tokenizer.token_bytes(i, special=True).decode() for i in ids)
    assert text == "<|im_start|>user\nthe key <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    end = llm.tokenizer.encode("<|im_end|>")[0]
    assert ids.count(end) == 1  # what the user wrote stays plain text


def test_chat_without_a_template(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "m.gguf", **{"tokenizer.chat_template": None})
    with pytest.raises(TemplateError, match="expected a chat template"):
        LLM(path, backend="reference").chat_prompt([])


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, kvsieve; assert 'numpy' not in sys.modules; assert 'LLM' in dir(kvsieve);"
        "from kvsieve import LLM, SamplingParams, SparseAttention, BlockMask, attend, select_blocks"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
