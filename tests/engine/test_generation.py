import time

import numpy as np
import pytest

from kvsieve.engine.constraint import Constraint
from kvsieve.engine.outputs import Completion, StreamEvent
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import CapacityError, NumericalError
from tests.engine import scripted
from tests.engine.scripted import ScriptedDecoder, make_generation
from tests.tiny_model import EOS_ID


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return scripted.tiny_tokenizer(tmp_path_factory.mktemp("model"))


def decoder_for(tokenizer: Tokenizer, script: list[int]) -> ScriptedDecoder:
    runner_up = tokenizer.encode("z")[0]
    return ScriptedDecoder(script, vocab_size=tokenizer.vocab_size, runner_up=runner_up)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [ids[bytes([byte])] for byte in data]


def run(generation: object) -> tuple[list[StreamEvent], Completion]:
    events = list(generation.events())  # type: ignore[attr-defined]
    completion = events[-1].completion
    assert completion is not None
    assert "".join(event.text for event in events) == completion.text
    assert all(event.completion is None for event in events[:-1])
    assert [e.token_id for e in events[:-1]] == completion.token_ids
    return events, completion


def test_an_end_token_stops_and_is_counted_but_not_printed(tokenizer: Tokenizer):
    script = [*byte_ids(tokenizer, b"hi"), EOS_ID]
    _, done = run(make_generation(decoder_for(tokenizer, script), tokenizer))
    assert done.text == "hi"
    assert done.token_ids == script
    assert done.completion_tokens == 3
    assert done.finish_reason == "stop"


def test_ignore_eos_draws_the_next_best_token_instead(tokenizer: Tokenizer):
    script = [*byte_ids(tokenizer, b"h"), EOS_ID, *byte_ids(tokenizer, b"i")]
    params = SamplingParams(ignore_eos=True, max_tokens=3)
    _, done = run(make_generation(decoder_for(tokenizer, script), tokenizer, params=params))
    assert done.text == "hzi"
    assert done.finish_reason == "length"


def test_max_tokens_ends_with_length(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"abcdef"))
    _, done = run(make_generation(decoder, tokenizer, params=SamplingParams(max_tokens=4)))
    assert (done.text, done.finish_reason) == ("abcd", "length")
    # The fourth token was never read back: one pass for the prompt, one for each of three.
    assert [len(ids) for ids in decoder.token_ids] == [5, 1, 1, 1]


def test_the_room_in_the_context_binds_as_max_tokens_does(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"abcdef"))
    _, done = run(make_generation(decoder, tokenizer, max_new_tokens=2))
    assert (done.text, done.finish_reason) == ("ab", "length")


def test_no_tokens_asked_for_reads_the_prompt_only(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, [3])
    events, done = run(make_generation(decoder, tokenizer, params=SamplingParams(max_tokens=0)))
    assert len(events) == 1
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "length")
    assert done.timings.prompt_n == 5


def test_a_stop_string_over_tokens_never_leaks(tokenizer: Tokenizer):
    script = byte_ids(tokenizer, b"ab<stop>cd")
    params = SamplingParams(stop=("<stop>",))
    events, done = run(make_generation(decoder_for(tokenizer, script), tokenizer, params=params))
    assert done.text == "ab"
    assert done.finish_reason == "stop"
    assert done.stop_string == "<stop>"
    assert [event.text for event in events[:8]] == ["a", "b", "", "", "", "", "", ""]
    assert done.token_ids == script[:8]


def test_what_might_have_been_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer):
    params = SamplingParams(stop=("<stop>",), max_tokens=4)
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"ab<s"))
    events, done = run(make_generation(decoder, tokenizer, params=params))
    assert done.text == "ab<s"
    assert done.stop_string is None
    assert events[-1].text == "<s"
    assert done.finish_reason == "length"


def test_a_character_over_four_tokens_comes_whole(tokenizer: Tokenizer):
    script = [*byte_ids(tokenizer, "x\U0001f600y".encode()), EOS_ID]
    events, done = run(make_generation(decoder_for(tokenizer, script), tokenizer))
    assert done.text == "x\U0001f600y"
    assert [e.text for e in events[:6]] == ["x", "", "", "", "\U0001f600", "y"]


def test_a_generation_cut_inside_a_character_ends_with_one_replacement(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"x\xf0\x9f"))
    _, done = run(make_generation(decoder, tokenizer, params=SamplingParams(max_tokens=3)))
    assert done.text == "x�"


def test_the_replacement_character_can_complete_a_stop_string(tokenizer: Tokenizer):
    params = SamplingParams(max_tokens=2, stop=("x�",))
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"x\xf0"))
    _, done = run(make_generation(decoder, tokenizer, params=params))
    assert (done.text, done.finish_reason) == ("", "stop")


def test_progress_is_told_after_each_chunk(tokenizer: Tokenizer):
    seen: list[tuple[int, int]] = []
    generation = make_generation(
        decoder_for(tokenizer, [EOS_ID]),
        tokenizer,
        prompt_len=70,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    run(generation)
    assert seen == [(32, 70), (64, 70), (70, 70)]


def test_times_and_counts_add_up_per_phase(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"abc"))
    params = SamplingParams(max_tokens=3)
    events, done = run(make_generation(decoder, tokenizer, params=params, prompt_len=40))
    timings, steps = done.timings, done.tokens
    assert (timings.prompt_n, timings.predicted_n) == (40, 3)
    # Two chunks of the prompt, two decode steps; the stand-in reports fixed times for each.
    assert timings.prompt_attention_ms == pytest.approx(6)
    assert timings.prompt_select_ms == pytest.approx(2)
    assert timings.prompt_dense_ms == pytest.approx(10)
    assert timings.predicted_attention_ms == pytest.approx(6)
    assert timings.predicted_dense_ms == pytest.approx(10)
    assert [step.num_tokens for step in steps] == [41, 42]
    assert [step.attention_ms for step in steps] == [3, 3]
    assert [step.select_ms for step in steps] == [1, 1]
    assert [step.dense_ms for step in steps] == [5, 5]
    assert [event.timing for event in events] == [None, *steps, None]
    assert sum(step.total_ms for step in steps) <= timings.predicted_ms
    attention = done.attention
    assert (attention.prefill.attended, attention.prefill.causal) == (14, 22)
    assert attention.prefill.density == pytest.approx(14 / 22)
    assert attention.prefill.queries == 40 * scripted.NUM_LAYERS * scripted.NUM_KV_HEADS
    assert (attention.decode.attended, attention.decode.causal) == (14, 22)
    assert attention.blocks_read == 28


def test_time_spent_by_the_reader_of_a_stream_is_not_counted(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"abc"))
    generation = make_generation(decoder, tokenizer, params=SamplingParams(max_tokens=3))
    events = []
    for event in generation.events():
        time.sleep(0.02)
        events.append(event)
    completion = events[-1].completion
    assert completion is not None
    assert completion.timings.predicted_ms < 20
    assert all(step.total_ms < 20 for step in completion.tokens)


def test_cancelling_while_decoding_keeps_what_there_is(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"abcdef"))
    generation = make_generation(
        decoder, tokenizer, should_cancel=lambda: len(decoder.token_ids) == 3
    )
    _, done = run(generation)
    assert (done.text, done.finish_reason) == ("abc", "cancelled")
    assert generation.sequence.cache.pool.num_free == 8


def test_cancelling_within_the_prompt(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, [])
    generation = make_generation(
        decoder, tokenizer, prompt_len=70, should_cancel=lambda: len(decoder.token_ids) == 1
    )
    _, done = run(generation)
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "cancelled")
    assert done.timings.prompt_n == 32
    assert done.prompt_tokens == 70


def test_ctrl_c_between_layers_frees_the_pages(tokenizer: Tokenizer):
    def interrupt() -> bool:
        raise KeyboardInterrupt

    generation = make_generation(decoder_for(tokenizer, []), tokenizer, should_cancel=interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(generation.events())
    assert generation.sequence.cache.pool.num_free == 8


def test_a_dropped_stream_frees_the_pages(tokenizer: Tokenizer):
    generation = make_generation(
        decoder_for(tokenizer, byte_ids(tokenizer, b"abc")), tokenizer, prompt_len=40
    )
    events = generation.events()
    next(events)
    assert generation.sequence.cache.pool.num_free == 6
    events.close()  # type: ignore[attr-defined]
    assert generation.sequence.cache.pool.num_free == 8


def test_an_error_frees_the_pages(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, [])
    decoder.script = [0]
    decoder.runner_up = 0

    def broken(*args: object, **kwargs: object) -> object:
        logits, stats = ScriptedDecoder.forward(decoder, *args, **kwargs)  # type: ignore[arg-type]
        assert logits is not None
        return np.full_like(logits, np.nan), stats

    decoder.forward = broken  # type: ignore[method-assign, assignment]
    generation = make_generation(decoder, tokenizer)
    with pytest.raises(NumericalError):
        list(generation.events())
    assert generation.sequence.cache.pool.num_free == 8


def test_a_pool_that_others_filled_is_a_capacity_error(tokenizer: Tokenizer):
    generation = make_generation(decoder_for(tokenizer, []), tokenizer, prompt_len=70)
    pool = generation.sequence.cache.pool
    for _ in range(7):
        pool.allocate()
    with pytest.raises(CapacityError, match="at most 0 more blocks"):
        list(generation.events())
    assert pool.num_free == 1


def test_the_seed_that_was_drawn_is_reported(tokenizer: Tokenizer):
    _, first = run(make_generation(decoder_for(tokenizer, [EOS_ID]), tokenizer))
    params = SamplingParams(seed=first.seed)
    _, second = run(make_generation(decoder_for(tokenizer, [EOS_ID]), tokenizer, params=params))
    assert second.seed == first.seed


def test_the_loops_own_cost_is_small(tokenizer: Tokenizer):
    """Scheduling, sampling and detokenising: under 3 % of a 4 ms token, on a quiet machine."""
    script = byte_ids(tokenizer, b"x" * 200)
    decoder = ScriptedDecoder(script, vocab_size=49_152)
    params = SamplingParams(max_tokens=200, stop=("never",))
    _, done = run(make_generation(decoder, tokenizer, params=params))
    # About 35 us when measured; the bound is twice the 3 %, for a busy machine.
    assert np.median([step.total_ms for step in done.tokens]) < 0.24


def test_a_reply_ends_where_its_constraint_lets_nothing_follow(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"[7]zz"))
    params = SamplingParams(constraint=Constraint.regex(r"\[[0-9]\]"), max_tokens=9)
    _, done = run(make_generation(decoder, tokenizer, params=params))
    assert (done.text, done.finish_reason, done.completion_tokens) == ("[7]", "stop", 3)


def test_a_constraint_overrules_the_model(tokenizer: Tokenizer):
    decoder = decoder_for(tokenizer, byte_ids(tokenizer, b"hello"))
    params = SamplingParams(constraint=Constraint.regex("z{4}"), max_tokens=9)
    _, done = run(make_generation(decoder, tokenizer, params=params))
    assert done.text == "zzzz"


def test_log_probabilities_come_with_each_token(tokenizer: Tokenizer):
    script = byte_ids(tokenizer, b"ab")
    params = SamplingParams(max_tokens=2, logprobs=2, logit_bias={script[0]: -9.0})
    decoder = decoder_for(tokenizer, script)
    events, done = run(make_generation(decoder, tokenizer, params=params))
    assert done.text == "zb"
    # Logits 2, 1 and 0 elsewhere, before the bias; "z" is the stand-in's second choice.
    total = np.log(np.exp(2) + np.exp(1) + tokenizer.vocab_size - 2)
    first = events[0].logprobs
    assert first is not None
    assert first.logprob == pytest.approx(1 - total, abs=1e-6)
    assert [one.token_id for one in first.top] == [script[0], byte_ids(tokenizer, b"z")[0]]
    assert events[-1].logprobs is None
