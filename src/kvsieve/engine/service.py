"""Several requests at once over one model: a queue, slots, one thread that runs the engine."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from os import PathLike
from time import perf_counter
from typing import TypeVar

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import blocks_for
from kvsieve.cache.prefix_cache import PrefixCache
from kvsieve.engine.batcher import Batcher
from kvsieve.engine.job import Job
from kvsieve.engine.llm import LLM
from kvsieve.engine.memory import available_memory
from kvsieve.engine.pace import PromptPace
from kvsieve.engine.preparation import checked_sparse
from kvsieve.engine.requests import (
    GenerationRequest,
    OnEvent,
    ServiceMetrics,
    SlotFile,
    SlotState,
)
from kvsieve.engine.slot_store import SlotStore
from kvsieve.errors import CapacityError, ConfigError, QueueFullError, ServiceClosedError
from kvsieve.types import BLOCK_SIZE

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_CACHE_SHARE = 0.8
"""Of the memory available that pages may take: selectors' data, activations and whoever serves
need some too."""

DEFAULT_CACHE_RAM = 1 << 30


class Service:
    """Runs requests of many callers on one `LLM`, which belongs to it until `close`.

    max_sequences      slots: requests that run at the same time
    max_queue          requests that may wait for a slot
    max_prefill_share  of the time, for reading prompts while replies are being generated
    cache_ram_bytes    for blocks of past requests, and what selectors keep with them
    reuse_generated    of sparse requests, reuse also what a cold run would compute differently:
                       what was generated, and the exact tails of earlier prompts

    The class is a `GenerationService`: see there for what its methods take, give and raise.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_sequences: int = 4,
        max_queue: int = 64,
        max_prefill_share: float = 0.5,
        cache_ram_bytes: int = DEFAULT_CACHE_RAM,
        reuse_generated: bool = False,
    ) -> None:
        _check_count("max_sequences", max_sequences, minimum=1)
        _check_count("max_queue", max_queue, minimum=0)
        _check_count("cache_ram_bytes", cache_ram_bytes, minimum=0)
        pace = PromptPace(max_share=max_prefill_share, chunk=llm.engine.scheduler.prefill_chunk)
        self.llm = llm
        self._max_queue = max_queue
        pool = _pool(llm, max_sequences=max_sequences, cache_ram_bytes=cache_ram_bytes)
        self._batcher = Batcher(
            engine=llm.engine,
            preparation=llm.preparation,
            pool=pool,
            prefix=PrefixCache(pool, max_bytes=cache_ram_bytes),
            pace=pace,
            num_slots=max_sequences,
            reuse_generated=reuse_generated,
        )
        self._store = SlotStore(self._batcher, fingerprint=llm.info.fingerprint)
        self._changed = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._next_id = 0
        self._accepts = True
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="kvsieve-engine", daemon=True)
        self._thread.start()

    # -- requests ------------------------------------------------------------------------------
    @property
    def num_slots(self) -> int:
        """Requests that run at the same time."""
        return len(self._batcher.slots)

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> "JobTicket":
        """Queue a request; its events come from the engine's thread."""
        preparation = self.llm.preparation
        ids = preparation.prompt_ids(request.prompt_ids)
        preparation.checked_params(request.params)
        sparse = checked_sparse(request.sparse)
        if sparse is not None and sparse.rule is not None:
            raise ConfigError(
                "[Service] sparse.rule: expected none, because requests share steps and a cache, "
                f"got {sparse.selector_name}"
            )
        if request.slot is not None:
            self._check_slot("submit", request.slot)
        if request.params.constraint is not None:
            self.llm.engine.compiler.prepare()  # here, where it holds up nobody else
        with self._changed:
            if not self._accepts:
                raise ServiceClosedError("[Service.submit] the service accepts no more requests")
            self._check_queue()
            job = Job(request_id=self._next_id, request=request, prompt_ids=ids, on_event=on_event)
            self._next_id += 1
            self._inbox.append(job)
            self._changed.notify_all()
        return JobTicket(job, self._wake)

    def _check_queue(self) -> None:
        busy, waiting = self._num_running, self._num_waiting
        free = max(0, self.num_slots - busy)
        if waiting < self._max_queue + free:
            return
        rounds = (waiting + 1) / self.num_slots
        seconds = max(1.0, rounds * self._batcher.counters.seconds_per_request)
        raise QueueFullError(
            f"[Service.submit] expected at most {self._max_queue} waiting requests, got one more; "
            f"a place should be free in {seconds:.0f} s",
            retry_after_s=seconds,
        )

    # -- what it is doing ------------------------------------------------------------------------
    @property
    def _num_running(self) -> int:
        return sum(slot.job is not None for slot in self._batcher.slots)

    @property
    def _num_waiting(self) -> int:
        return len(self._inbox) + len(self._batcher.waiting)

    def slots(self) -> list[SlotState]:
        """One state per slot, in order."""
        return [slot.state for slot in self._batcher.slots]

    def metrics(self) -> ServiceMetrics:
        """Counters and gauges as they are now."""
        batcher = self._batcher
        counters, pool = batcher.counters, batcher.pool
        jobs = [slot.job for slot in batcher.slots]
        sequences = [job.sequence for job in jobs if job is not None]
        held = sum(one.cache.num_blocks for one in sequences if one is not None)
        return ServiceMetrics(
            prompt_tokens=counters.prompt_tokens,
            prompt_seconds=counters.prompt_ns / 1e9,
            generated_tokens=counters.generated_tokens,
            generated_seconds=counters.generated_ns / 1e9,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            running=self._num_running,
            waiting=self._num_waiting,
            num_slots=self.num_slots,
            kv_usage=held / pool.num_blocks,
            cached_bytes=batcher.prefix.num_bytes,
            largest_sequence=counters.largest_sequence,
            steps=counters.steps,
            step_sequences=counters.step_sequences,
            attention=dict(counters.attention),
            reads=dict(counters.reads),
            kept_mass=counters.kept_mass.value,
            finished=dict(counters.finished),
            histograms={name: one.value for name, one in counters.histograms.items()},
        )

    # -- slots on disk -----------------------------------------------------------------------------
    def save_slot(self, slot: int, path: str | PathLike[str]) -> SlotFile:
        """Write the cache of an idle slot to `path`, all of it or nothing."""
        self._check_slot("save_slot", slot)
        began = perf_counter()
        contents = self._call(lambda: self._store.pin(slot))
        try:
            num_bytes = self._store.write(contents, path)
        finally:
            self._call(lambda: self._store.unpin(contents))
        return SlotFile(
            num_tokens=contents.num_tokens, num_bytes=num_bytes, seconds=perf_counter() - began
        )

    def restore_slot(self, slot: int, path: str | PathLike[str]) -> SlotFile:
        """Read a file of `save_slot` into an idle slot."""
        self._check_slot("restore_slot", slot)
        began = perf_counter()
        saved, num_bytes = self._store.read(path)
        num_tokens = self._call(lambda: self._store.put(slot, saved))
        return SlotFile(num_tokens=num_tokens, num_bytes=num_bytes, seconds=perf_counter() - began)

    def erase_slot(self, slot: int) -> int:
        """Forget what an idle slot keeps; returns the tokens it had."""
        self._check_slot("erase_slot", slot)
        return self._call(lambda: self._store.erase(slot))

    def _check_slot(self, function: str, slot: int) -> None:
        is_place = isinstance(slot, int) and not isinstance(slot, bool)
        if not is_place or not 0 <= slot < self.num_slots:
            raise ConfigError(
                f"[Service.{function}] slot: expected 0 to {self.num_slots - 1}, got {slot!r}"
            )

    # -- ending --------------------------------------------------------------------------------
    def drain(self, timeout: float) -> bool:
        """Accept nothing more and wait until all is done; False if `timeout` seconds passed."""
        with self._changed:
            self._accepts = False
            return self._changed.wait_for(
                lambda: not (self._num_waiting or self._num_running), timeout
            )

    def close(self) -> None:
        """Cancel what is left and stop; the LLM is the caller's again."""
        with self._changed:
            self._accepts = False
            self._stops = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the engine's thread -------------------------------------------------------------------
    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the engine's thread, between two steps."""
        if self._thread is threading.current_thread():
            return function()
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._changed:
            if self._stops:
                raise ServiceClosedError("[Service] the service is closed")
            self._calls.append(run)
            self._changed.notify_all()
        return future.result()

    def _run(self) -> None:
        while True:
            with self._changed:
                stops = self._stops
                while self._inbox:
                    self._batcher.waiting.append(self._inbox.popleft())
            while self._calls:
                self._calls.popleft()()
            if stops:
                self._batcher.cancel_all()
            if self._step():
                continue
            with self._changed:
                self._changed.notify_all()  # nothing is left: whoever drains may go on
                if stops and not self._calls:
                    return
                if not (self._inbox or self._calls or self._stops):
                    self._changed.wait()

    def _step(self) -> bool:
        try:
            return self._batcher.step()
        except Exception as error:  # a fault of ours: whoever waits has to hear of it
            self._batcher.fail_all(error)
            return True


class JobTicket:
    """The `Ticket` of one accepted request."""

    def __init__(self, job: Job, wake: Callable[[], None]) -> None:
        self._job = job
        self._wake = wake

    @property
    def request_id(self) -> int:
        """Counts the accepted requests from 0."""
        return self._job.request_id

    def cancel(self) -> None:
        """End the request within a token or a chunk of its prompt; harmless when repeated."""
        self._job.is_cancelled = True
        self._wake()


def _pool(llm: LLM, *, max_sequences: int, cache_ram_bytes: int) -> BlockPool:
    """Pages for every slot's whole context, and for what the prefix cache may keep beside.

    Where memory does not suffice there are fewer, at least for one whole context: long requests
    then wait for each other.
    """
    config, layout = llm.config, llm.cache_layout
    block_bytes = config.num_layers * config.num_kv_heads * layout.page_bytes
    context = blocks_for(llm.ctx_size)
    wanted = max_sequences * context + cache_ram_bytes // block_bytes
    available = available_memory()
    if cache_ram_bytes > available:
        raise CapacityError(
            f"[Service] cache_ram_bytes: expected at most the {available >> 20} MiB available, "
            f"got {cache_ram_bytes >> 20} MiB"
        )
    num_blocks = max(context, min(wanted, int(_CACHE_SHARE * available) // block_bytes))
    if num_blocks < wanted:
        _log.warning(
            "the cache has room for %d tokens in all, not %d (%d slots of %d tokens, and %d MiB "
            "of earlier prompts): memory is short, so long requests wait for each other",
            num_blocks * BLOCK_SIZE,
            wanted * BLOCK_SIZE,
            max_sequences,
            llm.ctx_size,
            cache_ram_bytes >> 20,
        )
    return BlockPool(
        layout,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        num_blocks=num_blocks,
    )


def _check_count(name: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(
            f"[Service] {name}: expected an integer of at least {minimum}, got {value!r}"
        )
