"""Endpoints that generate: chat, completions, and llama.cpp's completion."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from kvsieve.engine.requests import GenerationRequest
from kvsieve.server.body import BoundedRoute
from kvsieve.server.chat import ChatReply, chat_id
from kvsieve.server.completions import CompletionReply, completion_id
from kvsieve.server.config import ServerConfig
from kvsieve.server.constraints import Schema, demanded_tools, reply_schema
from kvsieve.server.context import context_of
from kvsieve.server.errors import from_engine, invalid
from kvsieve.server.messages import conversation
from kvsieve.server.native import NativeReply
from kvsieve.server.parameters import (
    choice_count,
    for_choice,
    refuse_unsupported,
    reply_limit,
    sampling,
)
from kvsieve.server.prompts import Ids, PromptReader
from kvsieve.server.protocol import ChatRequest, Common, CompletionRequest, NativeRequest
from kvsieve.server.reply import Asked, Reply, answer
from kvsieve.server.served import Served
from kvsieve.server.sparse_choice import sparse_attention
from kvsieve.server.state_routes import model_name
from kvsieve.server.tool_calls import ToolCallReader

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; conversations end by themselves."""


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Makes what is to be generated from a request that was understood."""

    served: Served
    config: ServerConfig

    def asked(
        self,
        request: Common,
        prompts: Sequence[Ids],
        *,
        reply_id: str,
        max_tokens: int,
        logprobs: int | None,
        scores_prompt: bool = False,
        schema: Schema | None = None,
    ) -> Asked:
        """The sequences of a request, `n` for each prompt, and how the reply is shown.

        `scores_prompt`: log probabilities of the prompt's tokens come with those of the reply.
        Called in threads: a schema may take a while to compile.
        """
        config, served = self.config, self.served
        refuse_unsupported(request)
        if logprobs is not None and not 0 <= logprobs <= config.limits.top_logprobs:
            raise invalid("logprobs", expected=f"0 to {config.limits.top_logprobs}", got=logprobs)
        count = choice_count(request, prompts=len(prompts), limits=config.limits)
        params = sampling(
            request,
            defaults=config.sampling,
            limits=config.limits,
            tokenizer=served.tokenizer,
            max_tokens=max_tokens,
            logprobs=logprobs,
            schema=schema,
        )
        if scores_prompt:
            params = replace(params, prompt_logprobs=logprobs)
        sparse = sparse_attention(request.sparse, config.sparse)
        requests = [
            GenerationRequest(
                prompt_ids=ids,
                params=for_choice(params, choice),
                sparse=sparse,
                cache_prompt=request.cache_prompt is not False,
                slot=_slot(request.id_slot, served.service.num_slots),
            )
            for ids in prompts
            for choice in range(count)
        ]
        options = request.stream_options
        return Asked(
            requests=requests,
            per_prompt=count,
            model=model_name(served, config),
            fingerprint=served.fingerprint,
            tokenizer=served.tokenizer,
            reply_id=reply_id,
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            return_progress=bool(request.return_progress),
            timings_per_token=bool(request.timings_per_token),
            return_tokens=bool(request.return_tokens),
            logprobs=logprobs is not None,
            ping_s=request.sse_ping_interval,
        )


router = APIRouter(route_class=BoundedRoute)


@router.post("/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, _chat, body)


@router.post("/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text."""
    return await _answer(request, _completion, body)


@router.post("/completion", response_model=None)
async def completion(body: NativeRequest, request: Request) -> Response:
    """Continue a text, in llama.cpp's shape."""
    return await _answer(request, _native, body)


async def _answer(
    request: Request, prepare: Callable[..., Awaitable[Reply]], body: Any
) -> Response:
    context = context_of(request)
    asker = Asker(served=context.served, config=context.config)
    try:
        reply = await prepare(body, asker, context.reader)
    except Exception as error:
        raise from_engine(error) from error
    return await answer(request, reply, service=context.served.service, config=context.config)


async def _chat(body: ChatRequest, asker: Asker, reader: PromptReader) -> ChatReply:
    limits, abilities = asker.config.limits, asker.served.abilities
    given = conversation(body, limits=limits, can_use_tools=abilities.tools)
    tools = None if given.tools is None else [dict(tool) for tool in given.tools]
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs != 0:
        raise invalid("top_logprobs", expected="logprobs true beside it", got=body.logprobs)
    max_tokens = reply_limit(
        {
            "max_completion_tokens": body.max_completion_tokens,
            "max_tokens": body.max_tokens,
            "n_predict": body.n_predict,
        },
        default=asker.config.sampling.n_predict,
    )
    asked = await asyncio.to_thread(
        asker.asked,
        body,
        [await reader.conversation(given)],
        reply_id=chat_id(),
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        schema=reply_schema(body, tools=tools),
    )
    if tools is None:
        return ChatReply(asked)
    names = [tool["function"]["name"] for tool in tools]
    demanded = bool(demanded_tools(body, tools))
    most = 1 if body.parallel_tool_calls is False or demanded else None
    return ChatReply(
        asked,
        readers=[
            ToolCallReader(names, whole_json=demanded or not abilities.tagged, most=most)
            for _ in asked.requests
        ],
    )


async def _completion(
    body: CompletionRequest, asker: Asker, reader: PromptReader
) -> CompletionReply:
    prompts = await reader.several("" if body.prompt is None else body.prompt)
    logprobs = body.logprobs
    if isinstance(logprobs, bool):
        logprobs = 0 if logprobs else None
    asked = await asyncio.to_thread(
        asker.asked,
        body,
        prompts,
        reply_id=completion_id(),
        max_tokens=reply_limit(
            {"max_tokens": body.max_tokens, "n_predict": body.n_predict},
            default=_COMPLETION_TOKENS,
        ),
        logprobs=logprobs,
        scores_prompt=bool(body.echo) and logprobs is not None,
        schema=reply_schema(body),
    )
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [_echo(body.prompt, place, ids, asker) for place, ids in enumerate(prompts)]
    return CompletionReply(asked, echoes=echoes)


async def _native(body: NativeRequest, asker: Asker, reader: PromptReader) -> NativeReply:
    asked = await asyncio.to_thread(
        asker.asked,
        body,
        await reader.mixed(body.prompt),
        reply_id=secrets.token_hex(16),
        max_tokens=reply_limit(
            {"n_predict": body.n_predict, "max_tokens": body.max_tokens},
            default=asker.config.sampling.n_predict,
            unlimited=True,
        ),
        logprobs=body.n_probs or None,
        schema=reply_schema(body),
    )
    return NativeReply(asked, fields=body.response_fields or [])


def _echo(prompt: Any, place: int, ids: Ids, asker: Asker) -> str:
    one = prompt[place] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
    return one if isinstance(one, str) else asker.served.tokenizer.decode(ids, special=True)


def _slot(given: int | None, num_slots: int) -> int | None:
    if given is None or given == -1:
        return None
    if not 0 <= given < num_slots:
        raise invalid("id_slot", expected=f"-1 (any) or 0 to {num_slots - 1}", got=given)
    return given
