"""A stand-in for the engine that says given tokens, so that HTTP around it can be tested alone."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsieve.engine.detokenizer import Detokenizer
from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.engine.outputs import (
    AttentionReport,
    BlockReads,
    Completion,
    EngineInfo,
    Timings,
    TokenLogprob,
    TokenLogprobs,
)
from kvsieve.engine.requests import (
    Failed,
    Finished,
    GenerationRequest,
    HistogramValue,
    OnEvent,
    PromptLogprobs,
    PromptProgress,
    ServiceMetrics,
    SlotFile,
    SlotState,
    TokenEvent,
)
from kvsieve.engine.stop import StopMatcher
from kvsieve.errors import ConfigError, QueueFullError, ServiceClosedError

Script = Callable[[GenerationRequest], Sequence[int]]

INFO = EngineInfo(model_name="fake", fingerprint="f" * 16, isa="none", threads=1, version="0")
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens"),
)


@dataclass(kw_only=True)
class FakeTicket:
    """One request, run by a thread of its own."""

    request_id: int
    request: GenerationRequest
    cancelled: threading.Event = field(default_factory=threading.Event)
    said: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class FakeService:
    """Says the tokens of `script(request)`, which are those of `text`, then the end token.

    go       not set: requests wait before their first token, as if their prompts were long
    pause_s  between tokens
    fail     an error to end every request with, after its tokens
    room     requests accepted before the queue is full; None: any number
    """

    def __init__(self, tokenizer: AnyTokenizer, text: str) -> None:
        self.tokenizer = tokenizer
        self._said = tokenizer.encode(text, add_special=False)
        self.tickets: list[FakeTicket] = []
        self.reset()

    def reset(self) -> None:
        """Forget what tests have set, and end what they left running."""
        for ticket in self.tickets:
            ticket.cancel()
        self.script: Script = lambda _: self._said
        self.num_slots = 4
        self.go = threading.Event()
        self.go.set()
        self.pause_s = 0.0
        self.fail: Exception | None = None
        self.room: int | None = None
        self.is_closed = False
        self.tickets = []

    # -- the protocol ----------------------------------------------------------------------
    def submit(self, request: GenerationRequest, on_event: OnEvent) -> FakeTicket:
        if self.is_closed:
            raise ServiceClosedError("closed")
        if self.room is not None and len(self.running) >= self.room:
            raise QueueFullError("the queue is full", retry_after_s=3.0)
        ticket = FakeTicket(request_id=len(self.tickets), request=request)
        self.tickets.append(ticket)
        threading.Thread(target=self._run, args=(ticket, on_event), daemon=True).start()
        return ticket

    def slots(self) -> list[SlotState]:
        busy = self.running
        return [
            SlotState(slot=slot, phase="reply", num_tokens=7, request_id=busy[slot].request_id)
            if slot < len(busy)
            else SlotState(slot=slot, phase="idle", num_tokens=0)
            for slot in range(self.num_slots)
        ]

    def metrics(self) -> ServiceMetrics:
        histogram = HistogramValue(bounds=(0.5, 1.0), counts=(3, 2, 1), total=4.25)
        return ServiceMetrics(
            prompt_tokens=50,
            prompt_seconds=2.0,
            generated_tokens=30,
            generated_seconds=3.0,
            prefix_queries=80,
            prefix_hits=30,
            running=len(self.running),
            waiting=1,
            num_slots=self.num_slots,
            kv_usage=0.25,
            cached_bytes=4096,
            largest_sequence=99,
            steps=10,
            step_sequences=15,
            attention={"exact": 4, "sparse": 3},
            reads={
                "prefill": BlockReads(attended=60, causal=80, queries=9),
                "decode": BlockReads(attended=5, causal=20, queries=9),
            },
            kept_mass=HistogramValue(bounds=(0.9, 1.0), counts=(1, 2, 0), total=2.75),
            finished={"stop": 5, "cancelled": 2},
            histograms=dict.fromkeys(HISTOGRAMS, histogram),
        )

    def save_slot(self, slot: int, path: object) -> SlotFile:
        self._check_slot(slot)
        with open(str(path), "wb") as file:
            file.write(b"saved")
        return SlotFile(num_tokens=7, num_bytes=5, seconds=0.001)

    def restore_slot(self, slot: int, path: object) -> SlotFile:
        self._check_slot(slot)
        return SlotFile(num_tokens=7, num_bytes=5, seconds=0.001)

    def erase_slot(self, slot: int) -> int:
        self._check_slot(slot)
        return 7

    def drain(self, timeout: float) -> bool:
        self.is_closed = True
        return all(ticket.ended.wait(timeout) for ticket in self.tickets)

    def close(self) -> None:
        self.is_closed = True
        for ticket in self.tickets:
            ticket.cancel()

    # -- for tests ----------------------------------------------------------------------------
    @property
    def running(self) -> list[FakeTicket]:
        return [ticket for ticket in self.tickets if not ticket.ended.is_set()]

    @property
    def last(self) -> GenerationRequest:
        return self.tickets[-1].request

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ConfigError(f"[Service] slot: expected 0 to {self.num_slots - 1}, got {slot}")

    def _run(self, ticket: FakeTicket, on_event: OnEvent) -> None:
        total = len(ticket.request.prompt_ids)
        on_event(PromptProgress(cached=0, processed=0, total=total))
        while not self.go.wait(0.01) and not ticket.cancelled.is_set():
            pass
        if not ticket.cancelled.is_set():
            on_event(PromptProgress(cached=0, processed=total, total=total))
            self._score(ticket.request, on_event)
        last = self._speak(ticket, on_event)
        ticket.ended.set()
        on_event(Failed(error=self.fail) if self.fail is not None else last)  # type: ignore[arg-type]

    def _speak(self, ticket: FakeTicket, on_event: OnEvent) -> Finished:
        params = ticket.request.params
        ids = [*self.script(ticket.request), min(self.tokenizer.eos_ids)]
        stops, text = StopMatcher(params.stops), Detokenizer(self.tokenizer)
        texts: list[str] = []
        reason, said = "length", 0
        stopped = False
        for token in ids:
            if ticket.cancelled.is_set():
                reason = "cancelled"
                break
            if said >= params.max_tokens:
                break
            said += 1
            ticket.said = said
            is_end = token in self.tokenizer.eos_ids
            piece = ""
            if not is_end:
                piece, stopped = stops.push(text.push(token))
            texts.append(piece)
            on_event(TokenEvent(token_id=token, text=piece, logprobs=self._logprobs(ticket, token)))
            if is_end or stopped:
                reason = "stop"
                break
            time.sleep(self.pause_s)
        rest = ""
        if not stopped:
            rest, stopped = stops.push(text.flush())
            rest += "" if stopped else stops.flush()
        texts.append(rest)
        completion = _completion(ticket, "".join(texts), list(ids[:said]), reason)
        return Finished(completion=completion, text=rest)

    def _score(self, request: GenerationRequest, on_event: OnEvent) -> None:
        top = request.params.prompt_logprobs
        if top is None:
            return
        scores: list[TokenLogprobs | None] = [None]
        for place, token in enumerate(request.prompt_ids[1:], start=1):
            listed = tuple(TokenLogprob(token_id=token, logprob=-float(place)) for _ in range(top))
            scores.append(TokenLogprobs(logprob=-float(place), top=listed))
        on_event(PromptLogprobs(tokens=tuple(scores)))

    def _logprobs(self, ticket: FakeTicket, token: int) -> TokenLogprobs | None:
        top = ticket.request.params.logprobs
        if top is None:
            return None
        others = [(token + step) % self.tokenizer.vocab_size for step in range(top)]
        listed = tuple(
            TokenLogprob(token_id=one, logprob=-0.5 - rank) for rank, one in enumerate(others)
        )
        return TokenLogprobs(logprob=-0.5, top=listed)


def _completion(ticket: FakeTicket, text: str, ids: list[int], reason: str) -> Completion:
    request = ticket.request
    sparse = request.sparse
    prompt_n = len(request.prompt_ids)
    return Completion(
        text=text,
        token_ids=ids,
        prompt_tokens=prompt_n,
        finish_reason=reason,  # type: ignore[arg-type]
        timings=Timings(
            prompt_n=prompt_n,
            prompt_ms=10.0,
            prompt_attention_ms=4.0,
            prompt_select_ms=1.0,
            prompt_dense_ms=5.0,
            predicted_n=len(ids),
            predicted_ms=20.0,
            predicted_attention_ms=8.0,
            predicted_select_ms=2.0,
            predicted_dense_ms=10.0,
        ),
        attention=AttentionReport(
            mode="exact" if sparse is None else "sparse",
            selector=sparse.selector if sparse else None,
            share=sparse.share if sparse else None,
            k=sparse.k if sparse else None,
            block_size=sparse.block_size if sparse else None,
            prefill=BlockReads(attended=3, causal=4, queries=2),
            decode=BlockReads(attended=1, causal=4, queries=2),
            exact_because=None,
        ),
        tokens=[],
        seed=0,
        engine=INFO,
    )
