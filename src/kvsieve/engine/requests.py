"""What goes into the service and what comes out of it: plain values, and the service's shape.

Whoever serves requests (HTTP, a terminal chat) needs this module and `engine.service` only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal, Protocol, TypeAlias

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.outputs import (
    AttentionReport,
    BlockReads,
    Completion,
    TokenLogprobs,
    TokenTiming,
)
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import KvsieveError


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    sparse        None: exact attention
    cache_prompt  reuse what the prefix cache has of the prompt, and leave the prompt there
    slot          run in this slot, and wait for it if it is busy; None: in any
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    sparse: SparseAttention | None = None
    cache_prompt: bool = True
    slot: int | None = None


# -- events, in the order they come: progress, tokens, then one Finished or one Failed -------------
@dataclass(frozen=True, kw_only=True)
class PromptProgress:
    """Tokens of the prompt that are done: `cached` came from the prefix cache, `processed` holds
    those too, and ends at `total`. One event when the prompt begins, one after each chunk.
    """

    cached: int
    processed: int
    total: int


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Log probabilities of the prompt's tokens, None for the first; comes once, before any token,
    to a request that asked for them.
    """

    tokens: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One generated token, and the text that became certain with it, often none.

    An end token has no text. `logprobs` is there if the request asked for them, `timing` from
    the second token on.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    timing: TokenTiming | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a request that ran or was cancelled; `text` is what had been held back.

    The texts of all `TokenEvent`s and this one join to `completion.text`.
    """

    completion: Completion
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The end of a request that could not go on."""

    error: KvsieveError


Event: TypeAlias = PromptProgress | PromptLogprobs | TokenEvent | Finished | Failed
OnEvent: TypeAlias = Callable[[Event], None]
"""Called from the engine's thread: it must return quickly, and an exception cancels the request."""


class Ticket(Protocol):
    """A request that was accepted."""

    @property
    def request_id(self) -> int:
        """Counts the accepted requests from 0."""
        ...

    def cancel(self) -> None:
        """End the request within a token or a chunk of its prompt; harmless when repeated.

        Its last event is still `Finished`, with finish reason ``cancelled``, unless it had ended.
        """
        ...


# -- what a service says of itself -------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class SlotState:
    """One of the places in which requests run.

    ``num_tokens`` are in the cache: of the running request, or kept of the last one.
    ``attention`` is what ran so far; None in an idle slot.
    """

    slot: int
    phase: Literal["idle", "prompt", "reply"]
    num_tokens: int
    request_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    attention: AttentionReport | None = None


@dataclass(frozen=True, kw_only=True)
class HistogramValue:
    """Observations in buckets: ``counts[i]`` are at most ``bounds[i]`` and above the bound before;
    the last count, one more than there are bounds, holds the rest. `total` is their sum.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, kw_only=True)
class ServiceMetrics:
    """Counts since the service began, and what it is doing now. Times are in seconds.

    ``prompt_tokens`` went through the model, so tokens of the prefix cache are not among them;
    ``prefix_queries`` counts all prompt tokens and ``prefix_hits`` those that were cached.
    ``kv_usage`` is the share of the cache's pages that running requests hold. ``steps`` counts
    passes through the model, and ``step_sequences`` the sequences in them.
    """

    prompt_tokens: int
    prompt_seconds: float
    generated_tokens: int
    generated_seconds: float
    prefix_queries: int
    prefix_hits: int
    running: int
    waiting: int
    num_slots: int
    kv_usage: float
    cached_bytes: int
    largest_sequence: int
    steps: int
    step_sequences: int
    attention: Mapping[str, int] = field(default_factory=dict)
    """Requests by the attention that ran: exact, sparse."""
    reads: Mapping[str, BlockReads] = field(default_factory=dict)
    """Blocks that requests which ended have read, by phase: prefill, decode."""
    kept_mass: HistogramValue | None = None
    """Estimated kept mass of replies whose selector estimates it."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Requests by finish reason: stop, length, cancelled, error."""
    histograms: Mapping[str, HistogramValue] = field(default_factory=dict)
    """By vLLM's names, without its prefix: time_to_first_token_seconds,
    inter_token_latency_seconds, e2e_request_latency_seconds, request_queue_time_seconds,
    request_prefill_time_seconds, request_decode_time_seconds, request_prompt_tokens,
    request_generation_tokens."""


@dataclass(frozen=True, kw_only=True)
class SlotFile:
    """What saving or restoring a slot moved."""

    num_tokens: int
    num_bytes: int
    seconds: float


class GenerationService(Protocol):
    """Several requests at once over one model; every method may be called from any thread."""

    @property
    def num_slots(self) -> int:
        """Requests that run at the same time."""
        ...

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> Ticket:
        """Queue a request.

        Raises, before anything is allocated: ConfigError (ids, parameters, slot), CapacityError
        (the prompt is longer than the context), QueueFullError (with `retry_after_s`),
        ServiceClosedError (draining or closed).
        """
        ...

    def slots(self) -> list[SlotState]:
        """One state per slot, in order."""
        ...

    def metrics(self) -> ServiceMetrics:
        """Counters and gauges as they are now."""
        ...

    def save_slot(self, slot: int, path: str | PathLike[str]) -> SlotFile:
        """Write the cache of an idle slot to `path`, all of it or nothing.

        Raises ConfigError (no such slot, busy, or nothing in it), SlotFileError (not written).
        """
        ...

    def restore_slot(self, slot: int, path: str | PathLike[str]) -> SlotFile:
        """Read a file of `save_slot` into an idle slot.

        Raises ConfigError (no such slot, busy), SlotFileError (missing, damaged, or of another
        model or cache type), CapacityError (larger than the prefix cache may be).
        """
        ...

    def erase_slot(self, slot: int) -> int:
        """Forget what an idle slot keeps; the tokens it had. ConfigError: no such slot, busy."""
        ...

    def drain(self, timeout: float) -> bool:
        """Accept nothing more and wait until all is done; False if `timeout` seconds passed."""
        ...

    def close(self) -> None:
        """Cancel what is left and stop; harmless when repeated."""
        ...
