"""Which sequences run next, and how many tokens of each."""

from collections.abc import Iterable

from kvsieve.engine.batch import Batch, LogitRows, SequenceStep
from kvsieve.engine.sequence import Sequence
from kvsieve.errors import ConfigError
from kvsieve.types import BLOCK_SIZE


class Scheduler:
    """Cuts prompts into chunks of `prefill_chunk` tokens, rounded up to whole blocks.

    A chunk ends on a multiple of 32, or where the prompt does: prefill tiles are the blocks
    themselves, so every chunking gives the same tiles and the same bits.
    """

    def __init__(self, *, prefill_chunk: int = 512) -> None:
        if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
            raise ConfigError(
                f"[Scheduler] prefill_chunk: expected at least 1 token, got {prefill_chunk!r}"
            )
        self.prefill_chunk = -(-prefill_chunk // BLOCK_SIZE) * BLOCK_SIZE

    def next_batch(
        self, sequences: Iterable[Sequence], *, prompt_logits: LogitRows = "last"
    ) -> Batch:
        """The next step of every sequence.

        `prompt_logits`: the rows of a prompt whose logits are wanted; ``last`` is the prompt's
        last row, ``all`` is for evaluation.
        """
        return Batch(steps=tuple(self._next_step(one, prompt_logits) for one in sequences))

    def shared_batch(
        self, decoding: Iterable[Sequence], reading: Iterable[Sequence], *, prompt_rows: int
    ) -> Batch:
        """One token of every sequence in `decoding`, and `prompt_rows` rows of prompts.

        `reading` is served in order: the next prompt gets what the one before leaves over. Every
        chunk still ends on a multiple of 32 or with its prompt, so the rows may become a few more.
        """
        steps = [self._next_step(one, "last") for one in decoding]
        for sequence in reading:
            if prompt_rows <= 0:
                break
            step = self._next_step(sequence, "last", at_most=prompt_rows)
            steps.append(step)
            prompt_rows -= step.q_len
        return Batch(steps=tuple(steps))

    def _next_step(
        self, sequence: Sequence, prompt_logits: LogitRows, *, at_most: int | None = None
    ) -> SequenceStep:
        start = sequence.cache.num_tokens
        if start >= sequence.num_tokens:
            raise ConfigError(
                "[Scheduler.next_batch] sequences: expected a token that has not been through the "
                f"model, got {start} of {sequence.num_tokens} done"
            )
        if start >= sequence.prompt_len:
            return SequenceStep(
                sequence=sequence, start=start, q_len=1, is_prefill=False, logit_rows="last"
            )
        aligned = start // BLOCK_SIZE * BLOCK_SIZE
        chunk = self.prefill_chunk
        if at_most is not None:
            chunk = min(chunk, -(-at_most // BLOCK_SIZE) * BLOCK_SIZE)
        end = min(sequence.chunk_limit(start), aligned + chunk)
        is_last = end == sequence.prompt_len
        wanted: LogitRows = "all" if sequence.scores_prompt else prompt_logits
        return SequenceStep(
            sequence=sequence,
            start=start,
            q_len=end - start,
            is_prefill=True,
            logit_rows=wanted if is_last or wanted == "all" else "none",
        )
