"""Places in which requests run, and what each one remembers of its last."""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from kvsieve.cache.prefix_cache import Entry
from kvsieve.engine.job import Job
from kvsieve.engine.reply import attention_report
from kvsieve.engine.requests import SlotState
from kvsieve.types import I32


class Slot:
    """One place. Idle, it names the entries of the prefix cache that its last request left there;
    they may be given up at any time, so whatever uses them looks first.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.job: Job | None = None
        self.last_used = -1.0
        self.kept_ids: I32 = np.empty(0, np.int32)
        self.kept: list[Entry] = []

    def take(self, job: Job) -> None:
        """Run `job` here."""
        self.job = job
        job.slot = self.place
        self.last_used = perf_counter()
        self.erase()

    def leave(self) -> None:
        """Be idle again."""
        self.job = None
        self.last_used = perf_counter()

    def keep(self, ids: I32 | None, entries: Sequence[Entry]) -> None:
        """Remember what a request leaves behind."""
        if ids is not None:
            self.kept_ids = ids
            self.kept = list(entries)

    def erase(self) -> None:
        """Remember nothing."""
        self.kept_ids = np.empty(0, np.int32)
        self.kept = []

    @property
    def state(self) -> SlotState:
        """What the slot does now; may be asked by any thread."""
        job = self.job
        sequence = None if job is None else job.sequence
        if job is None or sequence is None:
            return SlotState(slot=self.place, phase="idle", num_tokens=len(self.kept_ids))
        return SlotState(
            slot=self.place,
            phase="prompt" if job.is_reading else "reply",
            num_tokens=sequence.cache.num_tokens,
            request_id=job.request_id,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=sequence.num_cached,
            generated_tokens=len(sequence.output_ids),
            attention=attention_report(sequence),
        )
