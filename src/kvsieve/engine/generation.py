"""The loop that takes one prompt to its completion alone, one event per token."""

from collections.abc import Callable, Iterator
from time import perf_counter_ns

from kvsieve.engine.outputs import StreamEvent
from kvsieve.engine.reply import Engine, Reply
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.sequence import Sequence

Progress = Callable[[int, int], None]
"""Called after each chunk of a prompt with the tokens read so far, and all of them."""


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
        self.engine = engine
        self.on_progress = on_progress
        self.should_cancel = should_cancel
        self.reply = Reply(sequence, params, engine=engine, max_new_tokens=max_new_tokens)

    def events(self) -> Iterator[StreamEvent]:
        """Run to the end. However it ends, Ctrl-C included, the pages go back to the pool."""
        try:
            while self.reply.finish_reason is None:
                try:
                    event = self._step()
                except _CancelledError:
                    self.reply.finish_reason = "cancelled"
                    break
                if event is not None:
                    yield event
            yield self.reply.end()
        finally:
            self.sequence.cache.release()

    def _step(self) -> StreamEvent | None:
        """One pass through the model; a chunk before the prompt's last gives no event."""
        began = perf_counter_ns()
        batch = self.engine.scheduler.next_batch([self.sequence])
        (step,) = batch.steps
        (logits,), stats = self.engine.runner.forward(batch, on_layer=self._check_cancelled)
        event = self.reply.take(step, logits, stats=stats, began_ns=began)
        if step.is_prefill and self.on_progress is not None:
            self.on_progress(self.sequence.cache.num_tokens, self.sequence.prompt_len)
        return event

    def _check_cancelled(self) -> None:
        if self.should_cancel is not None and self.should_cancel():
            raise _CancelledError
