"""A sequence led from outside: a prompt, then tokens that the caller chooses. For evaluation."""

from collections.abc import Callable, Iterator

import numpy as np

from kvsieve.cache.kv_cache import KVCache
from kvsieve.engine.generation import Progress
from kvsieve.engine.outputs import AttentionReport
from kvsieve.engine.reply import Engine, attention_report
from kvsieve.engine.sequence import PhaseTotals, Sequence
from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import AttentionTrace
from kvsieve.types import F32

OnAttention = Callable[[int, AttentionTrace], None]
"""Called after each layer of a decode step with the layer's number and what its attention ran."""


class Walk:
    """One prompt on the same way as a generation's, but what comes after it is given, not sampled.

    A context manager: leaving it gives the cache back. `LLM.walk` makes one.
    """

    def __init__(self, sequence: Sequence, *, engine: Engine) -> None:
        self._sequence = sequence
        self._engine = engine

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        self._sequence.cache.release()

    @property
    def num_tokens(self) -> int:
        """Tokens that have been through the model."""
        return self._sequence.cache.num_tokens

    @property
    def report(self) -> AttentionReport:
        """What attention read so far, prompt and decoded tokens apart."""
        return attention_report(self._sequence)

    @property
    def totals(self) -> tuple[PhaseTotals, PhaseTotals]:
        """What the prompt and the decoded tokens have cost so far."""
        return self._sequence.prefill, self._sequence.decode

    @property
    def cache(self) -> KVCache:
        """The cache behind it, to be read."""
        return self._sequence.cache

    def read_prompt(self, *, on_progress: Progress | None = None) -> F32:
        """Run the prompt; gives the logits of the token after it, f32 ``[vocab]``."""
        *_, (_, rows) = self.prompt_logits(start=None, on_progress=on_progress)
        return np.asarray(rows[-1])

    def prompt_logits(
        self, *, start: int | None, on_progress: Progress | None = None
    ) -> Iterator[tuple[int, F32]]:
        """Run the prompt chunk by chunk, as (position of the first row, f32 ``[rows, vocab]``).

        Chunks that end at or before position `start` give nothing; None: the last row alone.
        """
        sequence = self._sequence
        while self.num_tokens < sequence.prompt_len:
            batch = self._engine.scheduler.next_batch([sequence])
            if start is not None and batch.steps[0].end > start:
                batch = self._engine.scheduler.next_batch([sequence], prompt_logits="all")
            (rows,), _ = self._engine.runner.forward(batch)
            if on_progress is not None:
                on_progress(self.num_tokens, sequence.prompt_len)
            if rows is not None:
                yield self.num_tokens - len(rows), rows

    def step(self, token: int, *, on_attention: OnAttention | None = None) -> F32:
        """Decode `token`; gives the logits of the token after it, f32 ``[vocab]``."""
        sequence = self._sequence
        if self.num_tokens < sequence.prompt_len:
            raise ConfigError(
                f"[Walk.step] token: expected the prompt of {sequence.prompt_len} tokens to be "
                f"read before one is decoded, got {self.num_tokens} read"
            )
        sequence.output_ids.append(token)
        batch = self._engine.scheduler.next_batch([sequence])
        on_layer = None if on_attention is None else self._listener(on_attention)
        (rows,), _ = self._engine.runner.forward(batch, on_layer=on_layer)
        assert rows is not None  # a decode step asks for one row
        return np.asarray(rows[0])

    def rewind(self, num_tokens: int) -> None:
        """Forget the decoded tokens from position `num_tokens` on."""
        sequence = self._sequence
        if not sequence.prompt_len <= num_tokens <= self.num_tokens:
            raise ConfigError(
                f"[Walk.rewind] num_tokens: expected {sequence.prompt_len} to {self.num_tokens}, "
                f"got {num_tokens}"
            )
        sequence.cache.truncate(num_tokens)
        del sequence.output_ids[num_tokens - sequence.prompt_len :]

    def _listener(self, on_attention: OnAttention) -> Callable[[], None]:
        """Counts layers as they are done, and reads from the backend what each has run."""
        decoder = self._engine.runner.decoder
        layers = iter(range(decoder.config.num_layers))

        def listen() -> None:
            # The step's pages are reserved by now, and its token is not yet counted.
            segment = self.cache.segment(start=self.num_tokens, q_len=1, is_prefill=False)
            trace = decoder.backend.last_attention(segment, num_q_heads=decoder.config.num_q_heads)
            on_attention(next(layers), trace)

        return listen
