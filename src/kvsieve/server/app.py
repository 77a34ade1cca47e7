"""Puts the endpoints, their errors and the gate in front of them together."""

import logging
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware

from kvsieve.server import generating_routes, state_routes, text_routes
from kvsieve.server.config import ServerConfig
from kvsieve.server.context import Context
from kvsieve.server.errors import ApiError
from kvsieve.server.gate import Gate, RequestIds
from kvsieve.server.prompts import PromptReader, longest_token
from kvsieve.server.protocol import SparseFields
from kvsieve.server.served import Served
from kvsieve.version import __version__

_UNSUPPORTED = ("/embeddings", "/responses", "/images/generations", "/audio/speech", "/rerank")

_log = logging.getLogger(__name__)


def create_app(served: Served | None, config: ServerConfig) -> FastAPI:
    """The application for one model.

    None: for one that `attach` brings later. Until then every request is answered that it is
    loading, `/health` too.
    """
    app = FastAPI(
        title="kvsieve",
        version=__version__,
        # The pages would load scripts from elsewhere; the document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.limits = config.limits
    # FastAPI remembers endpoints for as long as the process lives, so they hold no model.
    app.state.context = None
    if served is not None:
        attach(app, served, config)
    modules = (generating_routes, text_routes, state_routes)
    for router in (*(module.router for module in modules), _unsupported_routes()):
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    _add_errors(app)
    app.add_middleware(
        Gate,
        api_keys=config.api_keys,
        origins=config.cors_origins,
        is_ready=lambda: app.state.context is not None,
    )
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestIds)
    return app


def attach(app: FastAPI, served: Served, config: ServerConfig) -> None:
    """From now on `app` answers for this model, with `config`'s settings of what it generates."""
    reader = PromptReader(
        tokenizer=served.tokenizer,
        template=served.template,
        ctx_size=served.ctx_size,
        limits=config.limits,
        longest_token=longest_token(served.tokenizer),
    )
    app.state.context = Context(served=served, config=config, reader=reader)


def _unsupported_routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> Response:
        # Not a 501, which is what it is: clients try a 5xx again and again.
        raise ApiError(404, f"{request.url.path}: expected an endpoint for text, got one we lack")

    for path in _UNSUPPORTED:
        routes.add_api_route(path, refuse, methods=["POST"], response_model=None)
    return routes


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        return _plain(request, error.status_code, error.detail, error.headers).response()

    @app.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        return _plain(request, 404, "Not Found", None).response()

    @app.exception_handler(405)
    async def wrong_method(request: Request, error: HTTPException) -> Response:
        return _plain(request, 405, "Method Not Allowed", error.headers).response()

    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: RequestValidationError) -> Response:
        return _first_problem(error).response()

    @app.exception_handler(Exception)
    async def broken(_request: Request, error: Exception) -> Response:
        _log.error("internal error", exc_info=error)
        return ApiError(500, f"internal error: {type(error).__name__}").response()


def _plain(request: Request, status: int, detail: Any, headers: Any) -> ApiError:
    where = f"{request.method} {request.url.path[:200]}"
    if status == 404:
        return ApiError(404, f"{where}: expected the path of an endpoint, got another")
    if status == 405:
        allowed = (headers or {}).get("allow") or (headers or {}).get("Allow", "another method")
        return ApiError(405, f"{where}: expected {allowed}", headers=headers)
    return ApiError(status, f"{where}: {detail}", headers=headers)


def _first_problem(error: RequestValidationError) -> ApiError:
    """OpenAI's error object for the first field that is wrong."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"][1:]]
    # Pydantic names the member of a union too: `stop.list[str].0`, `content.str`.
    names = [part for part in place if part.isidentifier() and part not in _UNION_WORDS]
    param = names[0] if names else "body"
    where = ".".join(part for part in place if part.isdigit() or part in names) or "body"
    message = str(problem["msg"])
    if problem["type"] == "missing":
        return ApiError(400, f"{where}: expected a value, got none", param=param)
    if problem["type"] == "extra_forbidden":
        known = ", ".join(SparseFields.model_fields)  # the only body that is closed
        return ApiError(400, f"{where}: expected one of {known}, got another field", param=param)
    shown = repr(problem.get("input"))[:80]
    expected = message.removeprefix("Input should be ")
    return ApiError(400, f"{where}: expected {expected}, got {shown}", param=param)


_UNION_WORDS = frozenset({"str", "int", "float", "bool", "dict", "list", "none", "literal"})
