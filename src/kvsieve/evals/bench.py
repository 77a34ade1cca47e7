"""Speed by depth: reading a prompt of so many tokens, then decoding after it, arms alternating."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.engine.no_vocabulary import NoVocabulary
from kvsieve.engine.outputs import Completion
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals.arms import Arm
from kvsieve.evals.corpus import filler_tokens, random_tokens


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Medians over the rounds: of the whole prompt for ``pp``, per token for ``tg``.

    ``attention_ms`` leaves out ``select_ms``; ``dense_ms`` is the rest of the layers and the
    output matrix. ``density``: blocks read / causal blocks of that phase; 1 where all was read.
    """

    test: str
    attn: str
    cache_type: str
    threads: int
    ms: float
    ms_stddev: float
    tokens_per_second: float
    attention_ms: float
    select_ms: float
    dense_ms: float
    density: float | None


@dataclass(frozen=True, kw_only=True)
class DepthResult:
    """The two rows of one arm at one depth."""

    depth: int
    arm: Arm
    prefill: BenchRow
    decode: BenchRow


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Milliseconds of one round: in all, and where they went."""

    ms: float
    attention_ms: float
    select_ms: float
    dense_ms: float


def run_bench(
    llm: LLM,
    *,
    arms: Sequence[Arm],
    depths: Sequence[int],
    decode_tokens: int,
    rounds: int = 5,
    on_run: Callable[[str], None] | None = None,
    on_progress: Progress | None = None,
) -> Iterator[DepthResult]:
    """Time every depth in every arm; the results of a depth come when its rounds are done.

    Within a round the arms follow one another on the same prompt, so that a machine that slows
    down slows all of them. One short run per arm goes before and is not counted.
    A model without a vocabulary reads random token ids, others filler text.
    """
    _check(llm, arms=arms, depths=depths, decode_tokens=decode_tokens, rounds=rounds)
    for arm in arms:
        _run(llm, min(depths), arm=arm, decode_tokens=1)
    for depth in depths:
        completions: dict[str, list[Completion]] = {arm.label: [] for arm in arms}
        for i in range(rounds):
            for arm in arms:
                if on_run is not None:
                    on_run(f"{depth} tokens, round {i + 1} of {rounds}, {arm.label}")
                run = _run(
                    llm, depth, arm=arm, decode_tokens=decode_tokens, on_progress=on_progress
                )
                completions[arm.label].append(run)
        for arm in arms:
            yield DepthResult(
                depth=depth,
                arm=arm,
                prefill=_prefill_row(llm, depth, arm=arm, runs=completions[arm.label]),
                decode=_decode_row(llm, depth, arm=arm, runs=completions[arm.label]),
            )


def _check(
    llm: LLM, *, arms: Sequence[Arm], depths: Sequence[int], decode_tokens: int, rounds: int
) -> None:
    if not arms or not depths or min(depths) < 1:
        raise ConfigError(f"[bench] depths: expected one or more, from 1 token on, got {depths}")
    if decode_tokens < 1 or rounds < 1:
        raise ConfigError(
            f"[bench] expected at least one token to decode and one round, "
            f"got {decode_tokens} and {rounds}"
        )
    if max(depths) + decode_tokens > llm.ctx_size:
        raise CapacityError(
            f"[bench] depths: expected at most {llm.ctx_size - decode_tokens} tokens beside "
            f"{decode_tokens} decoded ones in a context of {llm.ctx_size}, got {max(depths)}"
        )


def _run(
    llm: LLM, depth: int, *, arm: Arm, decode_tokens: int, on_progress: Progress | None = None
) -> Completion:
    # The first token comes with the prompt: one more than the steps that are timed.
    params = SamplingParams(max_tokens=decode_tokens + 1, ignore_eos=True)
    prompt = _prompt(llm, depth)
    return llm.generate(prompt, params, sparse=arm.sparse, on_progress=on_progress)


def _prompt(llm: LLM, depth: int) -> list[int]:
    if isinstance(llm.tokenizer, NoVocabulary):
        return random_tokens(llm.tokenizer.vocab_size, depth)
    return filler_tokens(llm.tokenizer, depth)


def _prefill_row(llm: LLM, depth: int, *, arm: Arm, runs: Sequence[Completion]) -> BenchRow:
    samples = [
        _Sample(
            ms=run.timings.prompt_ms,
            attention_ms=run.timings.prompt_attention_ms,
            select_ms=run.timings.prompt_select_ms,
            dense_ms=run.timings.prompt_dense_ms,
        )
        for run in runs
    ]
    density = runs[0].attention.prefill.density
    return _row(llm, f"pp{depth}", arm=arm, samples=samples, tokens=depth, density=density)


def _decode_row(llm: LLM, depth: int, *, arm: Arm, runs: Sequence[Completion]) -> BenchRow:
    samples = [
        _Sample(
            ms=mean(step.total_ms for step in run.tokens),
            attention_ms=mean(step.attention_ms for step in run.tokens),
            select_ms=mean(step.select_ms for step in run.tokens),
            dense_ms=mean(step.dense_ms for step in run.tokens),
        )
        for run in runs
    ]
    test = f"tg{len(runs[0].tokens)} @ d{depth}"
    density = runs[0].attention.decode.density
    return _row(llm, test, arm=arm, samples=samples, tokens=1, density=density)


def _row(
    llm: LLM,
    test: str,
    *,
    arm: Arm,
    samples: Sequence[_Sample],
    tokens: int,
    density: float | None,
) -> BenchRow:
    ms = median(sample.ms for sample in samples)
    k_type, v_type = llm.cache_types
    return BenchRow(
        test=test,
        attn=arm.label,
        cache_type=k_type if k_type == v_type else f"{k_type}/{v_type}",
        threads=llm.info.threads,
        ms=round(ms, 4),
        ms_stddev=round(stdev(sample.ms for sample in samples), 4) if len(samples) > 1 else 0.0,
        tokens_per_second=round(tokens / ms * 1e3, 3),
        attention_ms=round(median(sample.attention_ms for sample in samples), 4),
        select_ms=round(median(sample.select_ms for sample in samples), 4),
        dense_ms=round(median(sample.dense_ms for sample in samples), 4),
        density=density,
    )
