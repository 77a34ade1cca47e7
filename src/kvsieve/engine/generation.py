"""The loop that takes one prompt to its completion, one event per token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from kvsieve.engine.detokenizer import Detokenizer
from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.engine.outputs import (
    AttentionReport,
    Completion,
    EngineInfo,
    FinishReason,
    StreamEvent,
    Timings,
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

Progress = Callable[[int, int], None]
"""Called after each chunk of a prompt with the tokens read so far, and all of them."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What every generation of one loaded model shares."""

    scheduler: Scheduler
    runner: Runner
    tokenizer: AnyTokenizer
    info: EngineInfo


class _CancelledError(Exception):
    """Raised between two layers when the caller wants no more; never leaves this module."""


class Generation:
    """One prompt on its way. `max_new_tokens` is what the parameters and the context allow."""

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        *,
        engine: Engine,
        max_new_tokens: int,
        on_progress: Progress | None = None,
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.sequence = sequence
        self.params = params
        self.engine = engine
        self.max_new_tokens = max_new_tokens
        self.on_progress = on_progress
        self.should_cancel = should_cancel
        self.sampler = Sampler(params)
        self.detokenizer = Detokenizer(engine.tokenizer)
        self.stops = StopMatcher(params.stop)
        self.end_ids = engine.tokenizer.eos_ids
        self.texts: list[str] = []
        self.timings: list[TokenTiming] = []
        self.finish_reason: FinishReason | None = None
        self.stop_matched = False

    def events(self) -> Iterator[StreamEvent]:
        """Run to the end. However it ends, Ctrl-C included, the pages go back to the pool."""
        try:
            while self.finish_reason is None:
                try:
                    event = self._step()
                except _CancelledError:
                    self.finish_reason = "cancelled"
                    break
                if event is not None:
                    yield event
            yield self._last_event()
        finally:
            self.sequence.cache.release()

    def _step(self) -> StreamEvent | None:
        """One pass through the model; a chunk before the prompt's last gives no event."""
        began = perf_counter_ns()
        sequence = self.sequence
        batch = self.engine.scheduler.next_batch([sequence])
        is_prefill = batch.steps[0].is_prefill
        (logits,), stats = self.engine.runner.forward(batch, on_layer=self._check_cancelled)
        ran = perf_counter_ns()
        if is_prefill:
            sequence.prefill.total_ns += ran - began
            if self.on_progress is not None:
                self.on_progress(sequence.cache.num_tokens, sequence.prompt_len)
            if logits is None:
                return None
            if self.max_new_tokens == 0:
                self.finish_reason = "length"
                return None
            ran = perf_counter_ns()
        assert logits is not None  # a decode step and a prompt's last chunk ask for one row
        token = self._sample(logits[0])
        text = self._accept(token)
        now = perf_counter_ns()
        sequence.decode.total_ns += now - (ran if is_prefill else began)
        timing = None if is_prefill else _timing(stats, sequence.cache.num_tokens, now - began)
        if timing is not None:
            self.timings.append(timing)
        return StreamEvent(text=text, token_id=token, timing=timing)

    def _check_cancelled(self) -> None:
        if self.should_cancel is not None and self.should_cancel():
            raise _CancelledError

    def _sample(self, logits: F32) -> int:
        if self.params.ignore_eos and self.end_ids:
            # As in llama.cpp, the end tokens are never drawn, rather than drawn and passed over.
            logits = logits.copy()
            logits[list(self.end_ids)] = -np.inf
        return self.sampler.sample(logits)

    def _accept(self, token: int) -> str:
        """Take a sampled token in; returns the text that is now certain."""
        self.sequence.output_ids.append(token)
        if token in self.end_ids:
            self.finish_reason = "stop"
            return ""
        text, self.stop_matched = self.stops.push(self.detokenizer.push(token))
        if self.stop_matched:
            self.finish_reason = "stop"
        elif len(self.sequence.output_ids) >= self.max_new_tokens:
            self.finish_reason = "length"
        self.texts.append(text)
        return text

    def _last_event(self) -> StreamEvent:
        rest = self._flush()
        self.texts.append(rest)
        return StreamEvent(text=rest, completion=self._completion())

    def _flush(self) -> str:
        """Text that was held back: half a character, and what might have begun a stop string."""
        if self.stop_matched:
            return ""
        text, self.stop_matched = self.stops.push(self.detokenizer.flush())
        if self.stop_matched:
            self.finish_reason = "stop"
            return text
        return text + self.stops.flush()

    def _completion(self) -> Completion:
        sequence = self.sequence
        assert self.finish_reason is not None
        return Completion(
            text="".join(self.texts),
            token_ids=list(sequence.output_ids),
            prompt_tokens=sequence.prompt_len,
            finish_reason=self.finish_reason,
            timings=_totals(sequence),
            attention=attention_report(sequence),
            tokens=self.timings,
            seed=self.sampler.seed,
            engine=self.engine.info,
            stop_string=self.stops.found,
        )


def attention_report(sequence: Sequence) -> AttentionReport:
    """What attention read for `sequence` so far, while its cache still holds its tokens."""
    sparse = sequence.sparse
    because = None
    if sparse is not None:
        because = why_exact(
            sparse, prompt_len=sequence.prompt_len, num_tokens=sequence.cache.num_tokens
        )
    return AttentionReport(
        mode="exact" if sparse is None or because is not None else "sparse",
        selector=sparse.selector if sparse else None,
        share=sparse.share if sparse else None,
        k=sparse.k if sparse else None,
        block_size=sparse.block_size if sparse else None,
        prefill=sequence.prefill.reads,
        decode=sequence.decode.reads,
        exact_because=because,
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
    return Timings(
        prompt_n=min(sequence.prompt_len, sequence.cache.num_tokens),
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
