"""Talks to a `Service` as a server does: submits, collects events, waits."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.outputs import Completion
from kvsieve.engine.requests import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    PromptProgress,
    Ticket,
    TokenEvent,
)
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.service import Service

CONTEXT = 256
MakeService = Callable[..., Service]

MODES = {
    "exact": None,
    "probe": SparseAttention(k=3, selector="probe", dense_tail=32),
    "even": SparseAttention(k=2, selector="even", share="group", dense_tail=0),
    "anchors": SparseAttention(k=4, selector="anchors", dense_tail=0),
    "mass": SparseAttention(selector="anchors", mass=0.5, k_min=2, k_max=4, dense_tail=32),
    "minmax": SparseAttention(k=4, selector="minmax", dense_tail=32),
    "mean": SparseAttention(k=2, block_size=64, selector="mean", dense_tail=0),
    "meanstd": SparseAttention(k=4, selector="meanstd", share="group", dense_tail=0),
    "window": SparseAttention(k=2, selector="window", dense_tail=0),
    "oracle": SparseAttention(k=4, selector="oracle", share="group", dense_tail=0),
    "random": SparseAttention(k=4, selector="random", seed=7, dense_tail=32),
}
"""Exact, and every selector; each with another setting of the rest."""

PATIENCE = 120.0
"""Seconds after which a test gives up waiting; no test measures time."""


def make_ids(count: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, count).tolist()


class Client:
    """One request and its events."""

    def __init__(
        self,
        service: Service,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        sparse: SparseAttention | None = None,
        cache_prompt: bool = True,
        slot: int | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.events: list[Event] = []
        self._listener = on_event
        self._ended = threading.Event()
        self.ticket: Ticket = service.submit(
            GenerationRequest(
                prompt_ids=tuple(prompt),
                params=SamplingParams(max_tokens=8, ignore_eos=True) if params is None else params,
                sparse=sparse,
                cache_prompt=cache_prompt,
                slot=slot,
            ),
            self._take,
        )

    def _take(self, event: Event) -> None:
        assert not self._ended.is_set(), "an event after the last one"
        self.events.append(event)
        if isinstance(event, (Finished, Failed)):
            self._ended.set()
        if self._listener is not None:
            self._listener(event)

    def wait(self) -> Event:
        """The last event."""
        assert self._ended.wait(PATIENCE), f"no end after {self.events}"
        return self.events[-1]

    @property
    def completion(self) -> Completion:
        last = self.wait()
        assert isinstance(last, Finished), last
        return last.completion

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids

    @property
    def cached(self) -> int:
        return self.completion.timings.cache_n

    @property
    def tokens(self) -> list[TokenEvent]:
        return [event for event in self.events if isinstance(event, TokenEvent)]

    @property
    def progress(self) -> list[tuple[int, int, int]]:
        return [
            (event.cached, event.processed, event.total)
            for event in self.events
            if isinstance(event, PromptProgress)
        ]


class Gate:
    """Holds the engine's thread inside an event until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, event: Event) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def held_blocks(service: Service) -> int:
    """Blocks that nobody but the prefix cache should hold once all requests have ended, and do
    not come back when the prefix cache gives up its own."""
    assert service.drain(PATIENCE)
    batcher = service._batcher
    batcher.prefix.clear()
    assert batcher.prefix.num_bytes == 0
    return batcher.pool.num_blocks - batcher.pool.num_free
