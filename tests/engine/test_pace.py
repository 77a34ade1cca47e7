import pytest

from kvsieve.engine.pace import STALL_NS, PromptPace

DECODE_NS, ROW_NS = 8_000_000, 600_000


def run(pace: PromptPace, steps: int) -> tuple[float, list[int]]:
    """A machine of fixed speed with one reply running; share of the prompt, and its rows."""
    prompt_ns = total_ns = 0
    rows_of_steps = []
    for _ in range(steps):
        rows = pace.rows(num_decoding=1, num_reading=1)
        step_ns = DECODE_NS + rows * ROW_NS
        pace.ran(prompt_rows=rows, num_decoding=1, step_ns=step_ns)
        prompt_ns += rows * ROW_NS
        total_ns += step_ns
        rows_of_steps.append(rows)
    return prompt_ns / total_ns, rows_of_steps


def warm(max_share: float = 0.5, chunk: int = 512) -> PromptPace:
    pace = PromptPace(max_share=max_share, chunk=chunk)
    pace.ran(prompt_rows=0, num_decoding=1, step_ns=DECODE_NS)
    pace.rows(num_decoding=1, num_reading=0)
    return pace


def test_alone_a_prompt_gets_whole_chunks():
    pace = warm()
    assert pace.rows(num_decoding=0, num_reading=2) == 512
    assert pace.rows(num_decoding=3, num_reading=0) == 0


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_share_is_kept_in_the_long_run(share: float):
    found, rows = run(warm(share), 2000)
    assert found == pytest.approx(share, abs=0.02)
    assert 0 in rows
    # No step takes much longer than was allowed: 50 ms are 83 rows, so 64.
    assert set(rows) <= {0, 32, 64}


def test_a_share_of_one_never_pauses_the_prompt():
    assert min(run(warm(1.0), 50)[1]) >= 32


def test_a_slow_model_still_gets_a_block():
    pace = warm()
    for _ in range(20):
        pace.ran(prompt_rows=32, num_decoding=0, step_ns=32 * STALL_NS)
    assert pace.rows(num_decoding=1, num_reading=1) == 32


def test_a_prompt_does_not_live_on_time_from_before_it_came():
    pace = warm(0.5)
    for _ in range(10_000):
        pace.ran(prompt_rows=0, num_decoding=1, step_ns=DECODE_NS)
        pace.rows(num_decoding=1, num_reading=0)
    found, _ = run(pace, 300)
    assert found == pytest.approx(0.5, abs=0.06)
