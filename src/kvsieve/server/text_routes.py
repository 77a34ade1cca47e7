"""Endpoints between text and tokens, which generate nothing."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from kvsieve.engine.no_vocabulary import NoVocabulary
from kvsieve.server.body import BoundedRoute
from kvsieve.server.context import Context, context_of
from kvsieve.server.errors import from_engine, invalid
from kvsieve.server.messages import conversation
from kvsieve.server.prompts import Conversation
from kvsieve.server.protocol import DetokenizeRequest, TemplateRequest, TokenizeRequest
from kvsieve.server.served import Served

router = APIRouter(route_class=BoundedRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, list[Any]]:
    """Token ids of a text, with their bytes if `with_pieces`."""
    context = context_of(request)
    served, most = context.served, context.config.limits.tokenize_chars
    if len(body.content) > most:
        raise invalid("content", expected=f"at most {most} characters", got=len(body.content))
    try:
        ids = await asyncio.to_thread(
            served.tokenizer.encode,
            body.content,
            add_special=bool(body.add_special),
            parse_special=body.parse_special is not False,
        )
    except Exception as error:
        raise from_engine(error, param="content") from error
    return {"tokens": [_with_piece(served, one) for one in ids] if body.with_pieces else ids}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """Text of token ids, control tokens by their names."""
    tokenizer = context_of(request).served.tokenizer
    for one in body.tokens:
        if not 0 <= one < tokenizer.vocab_size:
            raise invalid("tokens", expected=f"ids from 0 to {tokenizer.vocab_size - 1}", got=one)
    try:
        return {"content": tokenizer.decode(body.tokens, special=True)}
    except Exception as error:
        raise from_engine(error, param="tokens") from error


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, request: Request) -> dict[str, str]:
    """The prompt that a conversation becomes."""
    context = context_of(request)
    try:
        return {"prompt": await context.reader.text(_asked(body, context))}
    except Exception as error:
        raise from_engine(error, param="messages") from error


@router.post("/chat/completions/input_tokens")
async def input_tokens(body: TemplateRequest, request: Request) -> dict[str, Any]:
    """How many tokens that prompt has."""
    context = context_of(request)
    try:
        ids = await context.reader.conversation(_asked(body, context))
    except Exception as error:
        raise from_engine(error, param="messages") from error
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _asked(body: TemplateRequest, context: Context) -> Conversation:
    tools = context.served.abilities.tools
    return conversation(body, limits=context.config.limits, can_use_tools=tools)


def _with_piece(served: Served, token_id: int) -> dict[str, Any]:
    if isinstance(served.tokenizer, NoVocabulary):
        return {"id": token_id, "piece": ""}
    raw = served.tokenizer.token_bytes(token_id, special=True)
    try:
        return {"id": token_id, "piece": raw.decode("utf-8")}
    except UnicodeDecodeError:
        # llama.cpp's form of half a character.
        return {"id": token_id, "piece": list(raw)}
