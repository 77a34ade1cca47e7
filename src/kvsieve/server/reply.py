"""What every generating endpoint has in common: events in, one object or a stream of chunks out."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.engine.requests import (
    Failed,
    Finished,
    GenerationRequest,
    GenerationService,
    PromptLogprobs,
    PromptProgress,
)
from kvsieve.server.bridge import Disconnected, Job, stopping, while_connected
from kvsieve.server.choices import Choice, Piece, timings
from kvsieve.server.config import ServerConfig
from kvsieve.server.errors import ApiError, from_engine
from kvsieve.server.sse import EventStream

Chunk = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request wants generated and how the reply is to be shown.

    requests      the sequences, prompt after prompt, `per_prompt` of each
    reply_id      in every chunk
    logprobs      whether tokens are listed with their log probabilities
    """

    requests: Sequence[GenerationRequest]
    per_prompt: int
    model: str
    fingerprint: str
    tokenizer: AnyTokenizer
    reply_id: str
    stream: bool = False
    include_usage: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    return_tokens: bool = False
    logprobs: bool = False
    ping_s: float | None = None


class Reply(ABC):
    """Grows with the events of a job. Subclasses say how it looks."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.created = int(time.time())
        self._began = time.monotonic()
        self.choices = [
            Choice(index=index, tokenizer=asked.tokenizer, stops=request.params.stops)
            for index, request in enumerate(asked.requests)
        ]

    # -- the stream ------------------------------------------------------------------------
    def begin(self) -> list[Chunk]:
        """Chunks to send before anything was computed."""
        return []

    @abstractmethod
    def progress(self, choice: Choice, progress: PromptProgress) -> Chunk:
        """Chunk that says how far a prompt is."""

    def scored(self, choice: Choice, scores: PromptLogprobs) -> list[Chunk]:
        """Chunks for the log probabilities of a prompt, where they were asked for."""
        return []

    @abstractmethod
    def piece(self, choice: Choice, piece: Piece) -> list[Chunk]:
        """Chunks for a piece of text; called in order for the whole reply too."""

    def end(self) -> list[Chunk | str]:
        """Chunks after the last piece of all."""
        return []

    # -- the whole -------------------------------------------------------------------------
    @abstractmethod
    def whole(self) -> Any:
        """The reply that is not streamed, after the last piece."""

    # -- shared ----------------------------------------------------------------------------
    def progress_fields(self, progress: PromptProgress) -> dict[str, Any]:
        """llama.cpp's `prompt_progress`."""
        return {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round(1e3 * (time.monotonic() - self._began)),
        }

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts, each counted once, and of all completions."""
        firsts = [one.ended for one in self.choices[:: self.asked.per_prompt]]
        prompt = sum(one.prompt_tokens for one in firsts)
        generated = sum(choice.ended.completion_tokens for choice in self.choices)
        cached = sum(one.timings.cache_n for one in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def facts(self, choice: Choice) -> dict[str, Any]:
        """How a completion was computed."""
        completion = choice.ended
        return {"timings": timings(completion), "attention": completion.attention.to_json()}

    def speed(self, choice: Choice) -> dict[str, Any]:
        """`timings` in the middle of a stream, if the request wants them."""
        return {"timings": choice.speed_so_far} if self.asked.timings_per_token else {}


async def answer(
    request: Request, reply: Reply, *, service: GenerationService, config: ServerConfig
) -> Response:
    """Generate and answer, as a stream or at once; the client's leaving ends the generation."""
    job = Job(service, reply.asked.requests)
    # In a thread: the first constraint of a model prepares its vocabulary.
    await asyncio.to_thread(job.start)
    if reply.asked.stream:
        silence_s = reply.asked.ping_s or config.ping_s
        chunks = _chunks(job, reply, silence_s=silence_s)
        return EventStream(chunks, send_s=config.send_s, on_close=job.close)
    try:
        await while_connected(request.receive, _collect(job, reply))
    except Disconnected:
        return Response(status_code=400)
    finally:
        job.close()
    return JSONResponse(reply.whole())


async def _chunks(
    job: Job, reply: Reply, *, silence_s: float
) -> AsyncIterator[dict[str, Any] | str | None]:
    for chunk in reply.begin():
        yield chunk
    try:
        async for event in job.events(silence_s=silence_s):
            if event is None:
                yield None
                continue
            for chunk in _take(reply, *event):
                yield chunk
    except ApiError as error:
        # The status has gone out: what is left is an event that clients raise.
        yield error.body()
        return
    for end in reply.end():
        yield end


async def _collect(job: Job, reply: Reply) -> None:
    async for event in job.events():
        if event is not None:
            _take(reply, *event)


def _take(reply: Reply, index: int, event: Any) -> list[Chunk]:
    choice = reply.choices[index]
    if isinstance(event, Failed):
        raise from_engine(event.error)
    if isinstance(event, PromptProgress):
        return [reply.progress(choice, event)] if reply.asked.return_progress else []
    if isinstance(event, PromptLogprobs):
        return reply.scored(choice, event)
    if isinstance(event, Finished) and event.completion.finish_reason == "cancelled":
        # Nobody here asked for that, so the server did.
        raise stopping()
    return reply.piece(choice, choice.take(event))
