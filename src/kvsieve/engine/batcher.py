"""Continuous batching: which requests run, step by step, and what becomes of their tokens.

Everything here belongs to one thread, the engine's. Other threads queue jobs and read counts.
"""

import logging
from collections import deque
from time import perf_counter, perf_counter_ns

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import blocks_for
from kvsieve.cache.prefix_cache import PrefixCache
from kvsieve.engine.batch import Batch, SequenceStep
from kvsieve.engine.job import Job
from kvsieve.engine.pace import PromptPace
from kvsieve.engine.prefix_reuse import begin, keep_all, keep_prompt
from kvsieve.engine.preparation import Preparation
from kvsieve.engine.reply import Engine, Reply
from kvsieve.engine.requests import Failed, PromptLogprobs, PromptProgress, TokenEvent
from kvsieve.engine.service_metrics import Counters
from kvsieve.engine.slots import Slot
from kvsieve.errors import KvsieveError
from kvsieve.kernels.backend import StepStats
from kvsieve.types import BLOCK_SIZE, F32

_log = logging.getLogger(__name__)


class _AllCancelledError(Exception):
    """Raised between two layers when nobody wants the step any more; never leaves this module."""


class Batcher:
    """Jobs that wait, jobs that run in slots, and the steps that take them on.

    First come, first served: waiting jobs get slots in order (one that asks for a busy slot lets
    others pass), and prompts are read in order. Every running reply gets a token in every step.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        preparation: Preparation,
        pool: BlockPool,
        prefix: PrefixCache,
        pace: PromptPace,
        num_slots: int,
        reuse_generated: bool = False,
    ) -> None:
        self.engine = engine
        self.preparation = preparation
        self.pool = pool
        self.prefix = prefix
        self.pace = pace
        self.reuse_generated = reuse_generated
        self.slots = [Slot(place) for place in range(num_slots)]
        self.waiting: deque[Job] = deque()
        self.counters = Counters()

    @property
    def running(self) -> list[Job]:
        """Jobs in slots, the first accepted first."""
        jobs = [slot.job for slot in self.slots if slot.job is not None]
        return sorted(jobs, key=lambda job: job.request_id)

    # -- one step ----------------------------------------------------------------------------
    def step(self) -> bool:
        """Take the running jobs one step on; False if there was nothing to do."""
        self._drop_cancelled()
        self._admit()
        running = self.running
        if not running:
            return bool(self.waiting)
        decoding = [job for job in running if not job.is_reading]
        reading = [job for job in running if job.is_reading]
        rows = self.pace.rows(num_decoding=len(decoding), num_reading=len(reading))
        if rows:
            reading = self._begin_reading(reading, rows)
        batch, jobs = self._batch(decoding, reading, rows)
        if not jobs:
            return bool(running)
        try:
            self._run(batch, jobs)
        except _AllCancelledError:
            return True
        return True

    def _batch(self, decoding: list[Job], reading: list[Job], rows: int) -> tuple[Batch, list[Job]]:
        batch = self.engine.scheduler.shared_batch(
            [job.sequence for job in decoding if job.sequence],
            [job.sequence for job in reading if job.sequence],
            prompt_rows=rows,
        )
        by_sequence = {id(job.sequence): job for job in (*decoding, *reading)}
        return batch, [by_sequence[id(step.sequence)] for step in batch.steps]

    def _run(self, batch: Batch, jobs: list[Job]) -> None:
        began = perf_counter_ns()

        def check() -> None:
            if all(job.is_cancelled for job in jobs):
                raise _AllCancelledError

        missing = (blocks_for(s.end) - s.sequence.cache.num_blocks for s in batch.steps)
        self.prefix.make_room(sum(max(0, count) for count in missing))
        try:
            logits, stats = self.engine.runner.forward(batch, on_layer=check)
        except _AllCancelledError:
            raise
        except Exception as error:
            self._run_alone(batch, jobs, error)
            return
        ran = perf_counter_ns() - began
        prompt_rows = sum(step.q_len for step in batch.steps if step.is_prefill)
        num_decoding = sum(not step.is_prefill for step in batch.steps)
        self.pace.ran(prompt_rows=prompt_rows, num_decoding=num_decoding, step_ns=ran)
        self._count(batch, ran)
        for job, step, rows in zip(jobs, batch.steps, logits, strict=True):
            try:
                self._deliver(job, step, rows, stats=stats, began_ns=began)
            except Exception as error:
                self._fail(job, error)

    def _run_alone(self, batch: Batch, jobs: list[Job], error: Exception) -> None:
        """A step failed and no cache has grown: find out whose fault it was."""
        if len(jobs) == 1:
            self._fail(jobs[0], error)
            return
        for job, step in zip(jobs, batch.steps, strict=True):
            if not job.has_ended:
                self._run(Batch(steps=(step,)), [job])

    def _count(self, batch: Batch, step_ns: int) -> None:
        counters, rows = self.counters, batch.num_rows
        counters.steps += 1
        counters.step_sequences += len(batch.steps)
        for step in batch.steps:
            share = step_ns * step.q_len // rows
            if step.is_prefill:
                counters.prompt_tokens += step.q_len
                counters.prompt_ns += share
            else:
                counters.generated_ns += share
            counters.largest_sequence = max(counters.largest_sequence, step.end)

    def _deliver(
        self, job: Job, step: SequenceStep, logits: F32 | None, *, stats: StepStats, began_ns: int
    ) -> None:
        sequence, reply = step.sequence, job.reply
        assert reply is not None  # every running job has one
        event = reply.take(step, logits, stats=stats, began_ns=began_ns)
        if step.is_prefill:
            if job.request.cache_prompt:
                keep_prompt(self.prefix, job)
            job.tell(
                PromptProgress(
                    cached=sequence.num_cached,
                    processed=sequence.cache.num_tokens,
                    total=sequence.prompt_len,
                )
            )
            if sequence.scores_prompt and step.end == sequence.prompt_len:
                job.tell(PromptLogprobs(tokens=tuple(reply.prompt_logprobs)))
        if event is not None and event.token_id is not None:
            self._count_token(job)
            job.tell(
                TokenEvent(
                    token_id=event.token_id,
                    text=event.text,
                    logprobs=event.logprobs,
                    timing=event.timing,
                )
            )
        if reply.finish_reason is not None:
            self._end(job)

    def _count_token(self, job: Job) -> None:
        now = perf_counter()
        self.counters.generated_tokens += 1
        if job.last_token is None:
            self.counters.observe("time_to_first_token_seconds", now - job.submitted)
        else:
            self.counters.observe("inter_token_latency_seconds", now - job.last_token)
        job.last_token = now

    def cancel_all(self) -> None:
        """Cancel everything that waits or runs."""
        for job in (*self.waiting, *self.running):
            job.is_cancelled = True

    def fail_all(self, error: Exception) -> None:
        """End everything that waits or runs with an error."""
        jobs = [*self.waiting, *self.running]
        self.waiting.clear()
        for job in jobs:
            self._fail(job, error)

    # -- coming and going ----------------------------------------------------------------------
    def _drop_cancelled(self) -> None:
        if any(job.is_cancelled for job in self.waiting):
            for job in [job for job in self.waiting if job.is_cancelled]:
                self.waiting.remove(job)
                self._guarded_end(job)
        for job in self.running:
            if job.is_cancelled:
                self._guarded_end(job)

    def _guarded_end(self, job: Job) -> None:
        """End a cancelled job."""
        try:
            self._open(job)
            if job.reply is not None:
                job.reply.finish_reason = job.reply.finish_reason or "cancelled"
            self._end(job)
        except Exception as error:
            self._fail(job, error)

    def _admit(self) -> None:
        """Give free slots to waiting jobs, as long as the pages that they may need suffice."""
        free = [slot for slot in self.slots if slot.job is None]
        promised = sum(_most_blocks(job) for job in self.running)
        for job in list(self.waiting) if free else ():
            wanted = job.request.slot
            fitting = [slot for slot in free if wanted in (None, slot.place)]
            if not fitting:
                continue
            try:
                self._open(job)
            except Exception as error:
                self.waiting.remove(job)
                self._fail(job, error)
                continue
            promised += _most_blocks(job)
            if promised > self.pool.num_blocks:
                return  # nobody else may pass, or it might wait for ever
            slot = min(fitting, key=lambda slot: slot.last_used)
            self.waiting.remove(job)
            free.remove(slot)
            slot.take(job)
            job.admitted = perf_counter()
            self.counters.observe("request_queue_time_seconds", job.admitted - job.submitted)

    def _open(self, job: Job) -> None:
        """Give a job its sequence and its reply, no page yet."""
        if job.sequence is not None:
            return
        request = job.request
        sequence, max_new_tokens = self.preparation.sequence_for(
            job.prompt_ids, request.params, sparse=request.sparse, pool=self.pool
        )
        sequence.reuses_generated = self.reuse_generated
        job.reply = Reply(
            sequence, request.params, engine=self.engine, max_new_tokens=max_new_tokens
        )
        job.sequence = sequence

    def _begin_reading(self, reading: list[Job], rows: int) -> list[Job]:
        """The jobs that share `rows` rows; who has not begun looks in the prefix cache first.

        A prompt whose first block another one is reading now waits for it: it will find there
        what the two have in common.
        """
        ready: list[Job] = []
        for job in reading:
            if rows <= 0:
                break
            if not job.has_begun:
                if job.request.cache_prompt and any(_share_a_block(job, one) for one in ready):
                    continue
                self.prefix.make_room(1)
                begin(self.prefix, job)
                sequence = job.sequence
                assert sequence is not None  # admitted, so opened
                self.counters.prefix_queries += sequence.prompt_len
                self.counters.prefix_hits += sequence.num_cached
                job.tell(
                    PromptProgress(
                        cached=sequence.num_cached,
                        processed=sequence.num_cached,
                        total=sequence.prompt_len,
                    )
                )
            ready.append(job)
            if job.sequence is not None:
                rows -= job.sequence.prompt_len - job.sequence.cache.num_tokens
        return ready

    def _end(self, job: Job) -> None:
        """Hand over the completion, leave the blocks to the prefix cache, free slot and pages."""
        if job.has_ended or job.reply is None or job.sequence is None:
            return
        last = job.reply.end()
        self._leave(job)
        if last.completion is not None:
            now = perf_counter()
            self.counters.finish(
                last.completion,
                seconds=now - job.submitted,
                running_seconds=now - (job.admitted or now),
            )
        job.end(last)

    def _leave(self, job: Job) -> None:
        sequence = job.sequence
        assert sequence is not None  # it was opened
        try:
            if job.request.cache_prompt and job.has_begun:
                ids = keep_all(self.prefix, job)
                if job.slot is not None:
                    self.slots[job.slot].keep(ids, job.kept)
        finally:
            self._free(job)

    def _free(self, job: Job) -> None:
        """Give back the pages and the slot."""
        if job.sequence is not None:
            job.sequence.cache.release()
            self.prefix.settle()
        if job.slot is not None:
            self.slots[job.slot].leave()
            job.slot = None

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job with an error; what is not ours to explain is logged with its trace."""
        if job.has_ended:
            return
        job.has_ended = True
        if not isinstance(error, KvsieveError):
            _log.error("request %d failed", job.request_id, exc_info=error)
            error = KvsieveError(f"[Service] internal error: {type(error).__name__}: {error}")
        self._free(job)
        self.counters.finished["error"] += 1
        job.tell(Failed(error=error))


def _most_blocks(job: Job) -> int:
    """Blocks that a job may come to hold."""
    return 0 if job.sequence is None else blocks_for(job.sequence.cache.max_tokens)


def _share_a_block(job: Job, other: Job) -> bool:
    one, two = job.prompt_ids[:BLOCK_SIZE], other.prompt_ids[:BLOCK_SIZE]
    return len(one) == len(two) == BLOCK_SIZE and bool((one == two).all())
