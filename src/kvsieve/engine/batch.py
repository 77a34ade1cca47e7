"""What one pass through the model works on, as a value."""

from dataclasses import dataclass
from typing import Literal

from kvsieve.engine.sequence import Sequence

LogitRows = Literal["none", "last", "all"]


@dataclass(frozen=True, kw_only=True)
class SequenceStep:
    """The rows one sequence contributes: a chunk of its prompt, or one token to decode."""

    sequence: Sequence
    start: int
    q_len: int
    is_prefill: bool
    logit_rows: LogitRows

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.q_len


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Steps of different sequences that share one pass. Their order changes no result."""

    steps: tuple[SequenceStep, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the pass, all sequences together."""
        return sum(step.q_len for step in self.steps)
