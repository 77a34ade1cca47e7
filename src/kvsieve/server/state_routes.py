"""Endpoints that say how the server is: health, models, props, slots, metrics."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response

from kvsieve.engine.requests import SlotState
from kvsieve.server.body import BoundedRoute
from kvsieve.server.config import ServerConfig
from kvsieve.server.context import context_of
from kvsieve.server.errors import ApiError, from_engine, invalid
from kvsieve.server.metrics import CONTENT_TYPE, exposition
from kvsieve.server.protocol import SlotFileRequest
from kvsieve.server.served import Served
from kvsieve.server.sparse_choice import asked_of
from kvsieve.version import __version__

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Names of slot files: no folders, no hidden files, nothing a shell or a path would read."""


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

router = APIRouter(route_class=BoundedRoute)


def _readable(path: str) -> Callable[[Endpoint], Endpoint]:
    """Register an endpoint for GET, and for HEAD, of which the OpenAPI document says nothing."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(path, endpoint, methods=["GET"])
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
        return endpoint

    return register


def model_name(served: Served, config: ServerConfig) -> str:
    """The id of the model in replies."""
    return config.alias or served.name


@_readable("/health")
async def health() -> dict[str, str]:
    """Whether the server answers; needs no key."""
    return {"status": "ok"}


@_readable("/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    context = context_of(request)
    return {"object": "list", "data": [_model(context.served, context.config)]}


@_readable("/models/{model_id:path}")
async def model(model_id: str, request: Request) -> dict[str, Any]:
    """The model, if this is its name."""
    context = context_of(request)
    name = model_name(context.served, context.config)
    if model_id != name:
        raise ApiError(404, f"model: expected {name}, got {model_id[:100]}", param="model")
    return _model(context.served, context.config)


@_readable("/props")
async def props(request: Request) -> dict[str, Any]:
    """How the server was started."""
    context = context_of(request)
    return _props(context.served, context.config)


@_readable("/metrics")
async def metrics(request: Request) -> Response:
    """Counts in Prometheus' format."""
    context = context_of(request)
    if not context.config.metrics:
        raise ApiError(501, "/metrics: expected a server with metrics, got --no-metrics")
    name = model_name(context.served, context.config)
    return Response(exposition(context.served.service, model=name), media_type=CONTENT_TYPE)


@_readable("/slots")
async def slots(request: Request, fail_on_no_slot: int | None = None) -> list[dict[str, Any]]:
    """What runs in each slot; nobody's text."""
    context = context_of(request)
    if not context.config.slots:
        raise ApiError(501, "/slots: expected a server that shows its slots, got --no-slots")
    states = context.served.service.slots()
    if fail_on_no_slot and all(state.phase != "idle" for state in states):
        raise ApiError(503, "slots: expected one that is idle, got none")
    return [_slot(state, context.served) for state in states]


@router.post("/slots/{id_slot}")
async def slot_action(
    id_slot: int,
    action: Literal["save", "restore", "erase"],
    request: Request,
    body: SlotFileRequest | None = None,
) -> dict[str, Any]:
    """Save, restore or erase what a slot keeps in the cache."""
    context = context_of(request)
    try:
        if action == "erase":
            erased = await asyncio.to_thread(context.served.service.erase_slot, id_slot)
            return {"id_slot": id_slot, "n_erased": erased}
        path = _slot_path(context.config, None if body is None else body.filename)
        return await asyncio.to_thread(_move, context.served, id_slot, path, action)
    except Exception as error:
        raise from_engine(error) from error


def _move(served: Served, id_slot: int, path: Path, action: str) -> dict[str, Any]:
    reply = {"id_slot": id_slot, "filename": path.name}
    if action == "save":
        saved = served.service.save_slot(id_slot, path)
        counts = {"n_saved": saved.num_tokens, "n_written": saved.num_bytes}
        return {**reply, **counts, "timings": {"save_ms": round(1e3 * saved.seconds, 3)}}
    if path.is_symlink() or not path.is_file():
        raise ApiError(404, f"filename: expected a saved slot, got {path.name}", param="filename")
    found = served.service.restore_slot(id_slot, path)
    counts = {"n_restored": found.num_tokens, "n_read": found.num_bytes}
    return {**reply, **counts, "timings": {"restore_ms": round(1e3 * found.seconds, 3)}}


def _slot_path(config: ServerConfig, name: str | None) -> Path:
    if config.slot_save_path is None:
        raise ApiError(
            501, "slots: expected a server started with --slot-save-path, got one without"
        )
    if name is None or not _PLAIN_NAME.fullmatch(name):
        raise invalid(
            "filename",
            expected="a plain name of letters, digits, dot, dash and underscore",
            got=name,
        )
    path = Path(config.slot_save_path) / name
    if path.is_symlink():
        raise invalid("filename", expected="a file, or a name that is free", got="a symbolic link")
    return path


def _model(served: Served, config: ServerConfig) -> dict[str, Any]:
    model = served.model
    return {
        "id": model_name(served, config),
        "object": "model",
        "created": served.created,
        "owned_by": "kvsieve",
        "max_model_len": served.ctx_size,
        "meta": {
            # llama.cpp's numbers: 0 is no vocabulary, 2 byte-level BPE.
            "vocab_type": 2 if served.template_source or served.tokenizer.eos_ids else 0,
            "n_vocab": model.vocab_size,
            "n_ctx_train": model.context_length,
            "n_embd": model.hidden_size,
            "n_params": served.num_params,
            "size": served.file_bytes,
        },
    }


def _props(served: Served, config: ServerConfig) -> dict[str, Any]:
    defaults, sparse = config.sampling, config.sparse
    asked: dict[str, Any] = {}
    if sparse.default is not None:
        asked = asked_of(sparse.default) | {"profile": sparse.default.profile or None}
    attention: dict[str, Any] = {
        "mode": "exact" if sparse.default is None else "sparse",
        **asked,
        "per_request": sparse.per_request,
        "k_min": sparse.min_k,
        "k_max": sparse.max_k,
    }
    return {
        "default_generation_settings": {
            "n_ctx": served.ctx_size,
            "params": {**vars(defaults)},
        },
        "total_slots": served.service.num_slots,
        "model_path": served.file_name,
        "model_alias": model_name(served, config),
        "chat_template": served.template_source or "",
        "chat_template_caps": served.abilities.to_json(),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"kvsieve {__version__}",
        "attention": attention,
        "cache_type_k": served.cache_types[0],
        "cache_type_v": served.cache_types[1],
        "isa": served.isa,
        "threads": served.threads,
        "fingerprint": served.fingerprint,
    }


def _slot(state: SlotState, served: Served) -> dict[str, Any]:
    return {
        "id": state.slot,
        "id_task": -1 if state.request_id is None else state.request_id,
        "n_ctx": served.ctx_size,
        "is_processing": state.phase != "idle",
        "phase": state.phase,
        "n_tokens": state.num_tokens,
        "n_prompt_tokens": state.prompt_tokens,
        "n_prompt_tokens_cache": state.cached_tokens,
        "next_token": {"n_decoded": state.generated_tokens},
        "attention": None if state.attention is None else state.attention.to_json(),
    }
