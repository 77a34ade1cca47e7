"""How many rows of prompts go into a step while other sequences are being generated."""

from kvsieve.errors import ConfigError
from kvsieve.types import BLOCK_SIZE

STALL_NS = 50_000_000
"""What the prompt rows of one step may add to the time between two tokens of a running reply, if
32 rows take no longer: 64 rows of a small model are as fast per row as 512, and take 40 ms."""

_NEWEST = 0.2
"""Weight of the newest measurement in the running means."""


class PromptPace:
    """Keeps the time spent on prompts to `max_share` of all while replies are being generated.

    A step with prompt rows takes longer, so steps without any follow until the share is kept.
    With nobody waiting for a token, prompts get whole chunks. Times decide only what runs when:
    results do not depend on it.
    """

    def __init__(self, *, max_share: float, chunk: int) -> None:
        is_number = isinstance(max_share, (int, float)) and not isinstance(max_share, bool)
        if not is_number or not 0 < max_share <= 1:
            raise ConfigError(
                f"[Service] max_prefill_share: expected above 0 and at most 1, got {max_share!r}"
            )
        self.max_share = float(max_share)
        self.chunk = chunk
        self._row_ns: float | None = None
        self._decode_ns = 0.0
        self._credit_ns = 0.0

    def rows(self, *, num_decoding: int, num_reading: int) -> int:
        """Prompt rows that the next step may have."""
        if not num_reading:
            self._credit_ns = 0.0
            return 0
        if not num_decoding:
            return self.chunk
        if self._credit_ns < 0:
            return 0
        if self._row_ns is None:
            return BLOCK_SIZE
        fitting = int(STALL_NS / self._row_ns) // BLOCK_SIZE * BLOCK_SIZE
        return min(max(fitting, BLOCK_SIZE), self.chunk)

    def ran(self, *, prompt_rows: int, num_decoding: int, step_ns: int) -> None:
        """Learn from a step what it took."""
        if not prompt_rows:
            self._decode_ns = _mean(self._decode_ns or None, step_ns)
            self._credit_ns += step_ns * self.max_share
            return
        decode_ns = min(self._decode_ns, step_ns) if num_decoding else 0.0
        prompt_ns = step_ns - decode_ns
        self._row_ns = _mean(self._row_ns, prompt_ns / prompt_rows)
        if num_decoding:
            self._credit_ns += decode_ns * self.max_share - prompt_ns * (1 - self.max_share)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
