"""One accepted request on its way: queued, reading its prompt, replying."""

import logging
from dataclasses import dataclass, field
from time import perf_counter

from kvsieve.cache.prefix_cache import Entry
from kvsieve.engine.outputs import StreamEvent
from kvsieve.engine.reply import Reply
from kvsieve.engine.requests import Event, Finished, GenerationRequest, OnEvent
from kvsieve.engine.sequence import Sequence
from kvsieve.types import I32

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Job:
    """A request with everything the engine's thread keeps of it."""

    request_id: int
    request: GenerationRequest
    prompt_ids: I32
    on_event: OnEvent
    submitted: float = field(default_factory=perf_counter)
    admitted: float | None = None
    last_token: float | None = None
    slot: int | None = None
    sequence: Sequence | None = None
    reply: Reply | None = None
    has_begun: bool = False
    kept: list[Entry] = field(default_factory=list)
    """Entries of the prefix cache that hold the sequence's first blocks."""
    snapshot_at: int = 0
    """Tokens at the last snapshot of what selectors keep."""
    is_cancelled: bool = False
    """Set by any thread; the engine's thread looks between two layers."""
    has_ended: bool = False

    @property
    def is_reading(self) -> bool:
        """Whether prompt tokens are left to run."""
        sequence = self.sequence
        return sequence is not None and sequence.cache.num_tokens < sequence.prompt_len

    def tell(self, event: Event) -> None:
        """Hand an event over; whoever cannot take it is not called again."""
        try:
            self.on_event(event)
        except Exception:
            _log.exception("request %d: its listener failed, so it is cancelled", self.request_id)
            self.is_cancelled = True
            self.on_event = _ignore

    def end(self, last: StreamEvent) -> None:
        """Hand over the completion."""
        self.has_ended = True
        if last.completion is not None:
            self.tell(Finished(completion=last.completion, text=last.text))


def _ignore(event: Event) -> None:
    """Take no notice."""
