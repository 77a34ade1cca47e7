"""Speed of one setting at one length, as a row of a sweep; `kvsieve bench` compares closer."""

from dataclasses import dataclass

from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.evals.bench import run_bench
from kvsieve.evals.settings import Trial

DECODE_TOKENS = 16
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """Medians over the rounds. Rows compare only within one sweep on an otherwise idle machine."""

    attn: str
    setting: str
    length: int
    prefill_tokens_per_second: float
    decode_ms: float
    attention_ms: float
    select_ms: float
    density: float | None
    threads: int
    isa: str


def measure_speed(
    llm: LLM, length: int, *, trial: Trial, on_progress: Progress | None = None
) -> SpeedRow:
    """Read a prompt of `length` tokens of filler, then decode after it."""
    (result,) = run_bench(
        llm,
        arms=[trial.arm],
        depths=[length],
        decode_tokens=DECODE_TOKENS,
        rounds=ROUNDS,
        on_progress=on_progress,
    )
    return SpeedRow(
        attn=trial.arm.label,
        setting=trial.setting,
        length=length,
        prefill_tokens_per_second=result.prefill.tokens_per_second,
        decode_ms=result.decode.ms,
        attention_ms=result.decode.attention_ms,
        select_ms=result.decode.select_ms,
        density=result.decode.density,
        threads=result.decode.threads,
        isa=llm.info.isa,
    )
