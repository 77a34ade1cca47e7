import numpy as np
import pytest

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache
from kvsieve.engine.batch import SequenceStep
from kvsieve.engine.scheduler import Scheduler
from kvsieve.engine.sequence import Sequence
from kvsieve.errors import ConfigError
from kvsieve.kernels.layout import PageLayout


def make_sequence(prompt_len: int, *, done: int = 0, output: tuple[int, ...] = ()) -> Sequence:
    layout = PageLayout(k_type="f32", v_type="f32", head_dim=16)
    pool = BlockPool(layout, num_layers=1, num_kv_heads=1, num_blocks=8)
    cache = KVCache(pool, max_tokens=256)
    cache.reserve(done)
    cache.commit(done)
    prompt = np.arange(prompt_len, dtype=np.int32)
    return Sequence(prompt_ids=prompt, cache=cache, output_ids=list(output))


def run_prompt(scheduler: Scheduler, sequence: Sequence) -> list[SequenceStep]:
    steps = []
    while sequence.cache.num_tokens < sequence.prompt_len:
        (step,) = scheduler.next_batch([sequence]).steps
        sequence.cache.reserve(step.end)
        sequence.cache.commit(step.end)
        steps.append(step)
    return steps


@pytest.mark.parametrize(("asked", "chunk"), [(1, 32), (31, 32), (32, 32), (33, 64), (130, 160)])
def test_chunk_sizes_are_rounded_up_to_whole_blocks(asked: int, chunk: int):
    assert Scheduler(prefill_chunk=asked).prefill_chunk == chunk


def test_a_prompt_is_cut_on_block_edges_and_asks_for_its_last_row_only():
    steps = run_prompt(Scheduler(prefill_chunk=33), make_sequence(130))
    assert [(s.start, s.end) for s in steps] == [(0, 64), (64, 128), (128, 130)]
    assert [s.logit_rows for s in steps] == ["none", "none", "last"]
    assert all(s.is_prefill for s in steps)


def test_a_prompt_begun_off_the_grid_comes_back_to_it():
    steps = run_prompt(Scheduler(prefill_chunk=64), make_sequence(130, done=37))
    assert [(s.start, s.end) for s in steps] == [(37, 96), (96, 130)]


def test_evaluation_asks_for_every_row():
    scheduler = Scheduler(prefill_chunk=32)
    batch = scheduler.next_batch([make_sequence(40)], prompt_logits="all")
    assert batch.steps[0].logit_rows == "all"


def test_after_the_prompt_one_token_at_a_time():
    (step,) = Scheduler().next_batch([make_sequence(40, done=41, output=(7, 8))]).steps
    assert (step.start, step.q_len, step.is_prefill) == (41, 1, False)
    assert step.logit_rows == "last"
    assert step.sequence.token_ids(step.start, step.end).tolist() == [8]


def test_several_sequences_take_their_own_next_steps():
    reading, decoding = make_sequence(100), make_sequence(40, done=40, output=(5,))
    batch = Scheduler(prefill_chunk=64).next_batch([reading, decoding])
    assert [(s.start, s.q_len, s.is_prefill) for s in batch.steps] == [
        (0, 64, True),
        (40, 1, False),
    ]
    assert batch.num_rows == 65


def test_a_sequence_with_nothing_left_to_run():
    with pytest.raises(ConfigError, match="got 40 of 40 done"):
        Scheduler().next_batch([make_sequence(40, done=40)])


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunk_size_is_at_least_one(chunk: int):
    with pytest.raises(ConfigError, match="prefill_chunk: expected at least 1 token"):
        Scheduler(prefill_chunk=chunk)


def test_token_ids_over_the_edge_of_the_prompt():
    sequence = make_sequence(3, output=(70, 80, 90))
    assert sequence.num_tokens == 6
    assert sequence.token_ids(0, 3).tolist() == [0, 1, 2]
    assert sequence.token_ids(1, 5).tolist() == [1, 2, 70, 80]
    assert sequence.token_ids(5, 6).tolist() == [90]
    assert sequence.token_ids(1, 5).dtype == np.int32


def test_prompts_share_the_rows_of_a_step_in_order():
    decoding = make_sequence(10, done=10, output=(5,))
    reading = [make_sequence(70), make_sequence(250), make_sequence(40)]
    scheduler = Scheduler(prefill_chunk=256)
    batch = scheduler.shared_batch([decoding], reading, prompt_rows=128)
    # 70 rows end the first prompt; the 58 left are rounded up to 64; then nothing is left.
    assert [(step.start, step.q_len) for step in batch.steps] == [(10, 1), (0, 70), (0, 64)]
    assert [step.logit_rows for step in batch.steps] == ["last", "last", "none"]
    none = scheduler.shared_batch([decoding], reading, prompt_rows=0)
    assert [step.q_len for step in none.steps] == [1]


def test_chunks_end_where_snapshots_are_taken():
    sequence = make_sequence(250)
    sequence.snapshots_at = 128
    assert [(s.start, s.end) for s in run_prompt(Scheduler(prefill_chunk=256), sequence)] == [
        (0, 128),
        (128, 224),  # the last multiple of 32 that leaves a token to run
        (224, 250),
    ]
    whole = make_sequence(224)
    whole.snapshots_at = 128
    ends = [step.end for step in run_prompt(Scheduler(prefill_chunk=256), whole)]
    assert ends == [128, 192, 224]
