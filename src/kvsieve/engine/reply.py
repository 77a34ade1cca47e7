"""What one sequence says: sampling, text, stop strings and times; everything but the loop."""

from dataclasses import dataclass, field
from time import perf_counter_ns

from kvsieve.engine.batch import SequenceStep
from kvsieve.engine.constraint import ConstraintCompiler
from kvsieve.engine.detokenizer import Detokenizer
from kvsieve.engine.logprobs import token_logprobs
from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.engine.outputs import (
    AttentionReport,
    Completion,
    EngineInfo,
    FinishReason,
    StreamEvent,
    Timings,
    TokenLogprobs,
    TokenTiming,
)
from kvsieve.engine.plan import why_exact
from kvsieve.engine.runner import Runner
from kvsieve.engine.sampling import Sampler, SamplingParams
from kvsieve.engine.scheduler import Scheduler
from kvsieve.engine.sequence import Sequence
from kvsieve.engine.stop import StopMatcher
from kvsieve.kernels.backend import StepStats
from kvsieve.types import F32


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What every generation of one loaded model shares."""

    scheduler: Scheduler
    runner: Runner
    tokenizer: AnyTokenizer
    info: EngineInfo
    compiler: ConstraintCompiler = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiler", ConstraintCompiler(self.tokenizer))


class Reply:
    """The reply to one prompt as it grows, fed with the logits of its own steps.

    `max_new_tokens` is what the parameters and the context allow.
    """

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        *,
        engine: Engine,
        max_new_tokens: int,
    ) -> None:
        self.sequence = sequence
        self.max_new_tokens = max_new_tokens
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._engine = engine
        self._end_ids = engine.tokenizer.eos_ids
        constraint = params.constraint
        self._sampler = Sampler(
            params,
            prompt_ids=sequence.prompt_ids.tolist() if params.penalizes else (),
            end_ids=self._end_ids,
            matcher=None if constraint is None else engine.compiler.matcher(constraint),
        )
        self._detokenizer = Detokenizer(engine.tokenizer)
        self._stops = StopMatcher(params.stop)
        self._texts: list[str] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._timings: list[TokenTiming] = []

    def take(
        self, step: SequenceStep, logits: F32 | None, *, stats: StepStats, began_ns: int
    ) -> StreamEvent | None:
        """Go on after a step that began at `began_ns`; `logits` are f32 ``[rows, vocab]`` or None.

        A chunk before the prompt's last has no logits, and gives no event.
        """
        sequence = self.sequence
        if step.is_prefill:
            self._score(step, logits)
        ran = perf_counter_ns()
        if step.is_prefill:
            sequence.prefill.total_ns += ran - began_ns
            if step.end < sequence.prompt_len:
                return None
            if self.max_new_tokens == 0:
                self.finish_reason = "length"
                return None
        assert logits is not None  # a decode step and a prompt's last chunk ask for one row
        row = logits[-1]
        token = self._sampler.sample(row)
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = token_logprobs(row, token, top=self._params.logprobs)
        text = self._accept(token)
        now = perf_counter_ns()
        sequence.decode.total_ns += now - (ran if step.is_prefill else began_ns)
        timing = None
        if not step.is_prefill:
            timing = _timing(stats, sequence.cache.num_tokens, now - began_ns)
            self._timings.append(timing)
        return StreamEvent(text=text, token_id=token, logprobs=logprobs, timing=timing)

    def _score(self, step: SequenceStep, logits: F32 | None) -> None:
        """Note how probable the prompt's tokens were after the rows of a chunk."""
        top = self._params.prompt_logprobs
        if top is None or logits is None:
            return
        following = self.sequence.prompt_ids[step.start + 1 : step.end + 1].tolist()
        self.prompt_logprobs += [
            token_logprobs(row, token, top=top)
            for row, token in zip(logits, following, strict=False)  # the last row has none yet
        ]

    def end(self) -> StreamEvent:
        """The last event, with the text that was held back; the cache still has its tokens."""
        rest = self._flush()
        self._texts.append(rest)
        return StreamEvent(text=rest, completion=self._completion())

    def _accept(self, token: int) -> str:
        """Take a sampled token in; returns the text that is now certain."""
        self.sequence.output_ids.append(token)
        if token in self._end_ids:
            self.finish_reason = "stop"
            return ""
        self._sampler.accept(token)
        text, stopped = self._stops.push(self._detokenizer.push(token))
        if stopped or self._sampler.is_done:
            self.finish_reason = "stop"
        elif len(self.sequence.output_ids) >= self.max_new_tokens:
            self.finish_reason = "length"
        self._texts.append(text)
        return text

    def _flush(self) -> str:
        """Text that was held back: half a character, and what might have begun a stop string."""
        if self._stops.found is not None:
            return ""
        text, stopped = self._stops.push(self._detokenizer.flush())
        if stopped:
            self.finish_reason = "stop"
            return text
        return text + self._stops.flush()

    def _completion(self) -> Completion:
        sequence = self.sequence
        assert self.finish_reason is not None
        unscored = self._params.prompt_logprobs is None
        return Completion(
            text="".join(self._texts),
            token_ids=list(sequence.output_ids),
            prompt_tokens=sequence.prompt_len,
            finish_reason=self.finish_reason,
            timings=_totals(sequence),
            attention=attention_report(sequence),
            tokens=self._timings,
            seed=self._sampler.seed,
            engine=self._engine.info,
            stop_string=self._stops.found,
            prompt_logprobs=None if unscored else tuple(self.prompt_logprobs),
        )


def _sparse_layers(sequence: Sequence) -> tuple[int, ...]:
    exact = sequence.sparse.exact_layers if sequence.sparse else ()
    return tuple(layer for layer in sequence.full_layers if layer not in exact)


def _why_no_layer(sequence: Sequence) -> str:
    if sequence.full_layers:
        return "exact_layers are all layers of the model that could be sparse"
    return "every layer of the model reads a window, and windows are exact"


def attention_report(sequence: Sequence) -> AttentionReport:
    """What attention read for `sequence` so far, while its cache still holds its tokens."""
    sparse = sequence.sparse
    because = None
    if sparse is not None:
        because = why_exact(
            sparse, prompt_len=sequence.prompt_len, num_tokens=sequence.cache.num_tokens
        )
        if not _sparse_layers(sequence):
            because = because or _why_no_layer(sequence)
    is_sparse = sparse is not None and because is None
    return AttentionReport(
        mode="sparse" if is_sparse else "exact",
        selector=sparse.selector_name if sparse else None,
        share=sparse.sharing if sparse else None,
        k=sparse.largest_budget if sparse else None,
        block_size=sparse.block_size if sparse else None,
        prefill=sequence.prefill.reads,
        decode=sequence.decode.reads,
        exact_because=because,
        sparse_layers=_sparse_layers(sequence) if is_sparse else (),
        mass=sparse.mass if sparse else None,
        exact_layers=sparse.exact_layers if sparse else (),
        layer_k=sparse.layer_budgets if sparse else (),
        profile=(sparse.profile or None) if sparse else None,
        kept_mass=sequence.decode.kept,
        warn_mass=sparse.warn_mass if sparse else 0.0,
    )


def _timing(stats: StepStats, num_tokens: int, total_ns: int) -> TokenTiming:
    return TokenTiming(
        num_tokens=num_tokens,
        total_ms=total_ns / 1e6,
        attention_ms=stats.attention_ns / 1e6,
        select_ms=stats.select_ns / 1e6,
        dense_ms=stats.dense_ns / 1e6,
    )


def _totals(sequence: Sequence) -> Timings:
    prefill, decode = sequence.prefill, sequence.decode
    cached = sequence.num_cached
    return Timings(
        cache_n=cached,
        prompt_n=min(sequence.prompt_len, sequence.cache.num_tokens) - cached,
        prompt_ms=prefill.total_ns / 1e6,
        prompt_attention_ms=prefill.attention_ns / 1e6,
        prompt_select_ms=prefill.select_ns / 1e6,
        prompt_dense_ms=prefill.dense_ns / 1e6,
        predicted_n=len(sequence.output_ids),
        predicted_ms=decode.total_ns / 1e6,
        predicted_attention_ms=decode.attention_ns / 1e6,
        predicted_select_ms=decode.select_ns / 1e6,
        predicted_dense_ms=decode.dense_ns / 1e6,
    )
