"""``kvsieve serve``: OpenAI's API, and llama.cpp's endpoints, over one model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import DrawingOptions, ModelOptions
from kvsieve.cli.profiles import profiled
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.serve_options import (
    BatchOptions,
    ListenOptions,
    SafetyOptions,
    server_config,
)
from kvsieve.cli.sparse_options import SparseOptions

if TYPE_CHECKING:
    import socket
    from contextlib import AbstractContextManager

    from kvsieve.engine.generation import Progress
    from kvsieve.server.config import ServerConfig
    from kvsieve.server.startup import Ready


@grouped
def serve(
    *,
    listen: ListenOptions,
    safety: SafetyOptions,
    batch: BatchOptions,
    sampling: DrawingOptions,
    sparse: SparseOptions,
    model: ModelOptions,
) -> None:
    """Answer OpenAI's clients over HTTP until Ctrl-C or SIGTERM.

    It answers at once, and says that it is loading until the model is there.
    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health,
    /metrics, /props, /slots, /tokenize, /detokenize, /apply-template and
    /completion, each with and without /v1. Every reply says which attention
    ran. Sampling options hold for requests that do not say otherwise. See
    docs/server.md.

    \b
    Examples:
      kvsieve serve
      kvsieve serve -m model.gguf --port 9000 --api-key-file keys.txt
      kvsieve serve --sparse-attn --sparse-k 32 --sparse-limit-k-max 128 -np 8
    """
    from kvsieve.server.app import create_app
    from kvsieve.server.run import HttpServer, bind
    from kvsieve.server.startup import Startup

    config = server_config(listen, safety, batch, sampling=sampling, sparse=sparse)
    template = listen.template()
    _check_source(model)
    with bind(config) as listener, StatusBar() as bar:

        def load(check: "Progress") -> "AbstractContextManager[Ready]":
            opened = _Opened(model=model, batch=batch, config=config, sparse=sparse)
            return opened.serving(template=template, bar=bar, check=check)

        def loaded(ready: "Ready") -> None:
            _announce(config, listener, config.alias or ready.served.name)

        app = create_app(None, config)
        # The server answers from here on; what needs the model is told that it is loading.
        startup = Startup(app, load, on_loaded=loaded, on_failed=lambda: server.stop())
        server = HttpServer(
            app,
            config,
            listener=listener,
            end_requests=startup.end_requests,
            on_ready=startup.begin,
        )
        try:
            server.run()
        finally:
            startup.close()


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What the model is opened with."""

    model: ModelOptions
    batch: BatchOptions
    config: "ServerConfig"
    sparse: SparseOptions

    @contextmanager
    def serving(
        self, *, template: str | None, bar: StatusBar, check: "Progress"
    ) -> Iterator["Ready"]:
        """The model, and everything that answers for it, until the server has ended."""
        from kvsieve.engine.service import Service
        from kvsieve.server.served import served_model
        from kvsieve.server.startup import Ready

        model, batch, config = self.model, self.batch, self.config
        with open_model(model, bar=bar, sparse=config.sparse.default, on_load=check) as llm:
            bar.close()
            default = profiled(config.sparse.default, options=self.sparse, llm=llm, model=model)
            config = replace(config, sparse=replace(config.sparse, default=default))
            with Service(
                llm,
                max_sequences=batch.parallel,
                max_queue=batch.max_queue,
                max_prefill_share=batch.max_prefill_share,
                cache_ram_bytes=batch.cache_ram << 20,
                reuse_generated=batch.reuse_generated,
            ) as service:
                served = served_model(llm, service, template_source=template, name=model.hub)
                try:
                    yield Ready(served=served, config=config)
                finally:
                    served.close()


def _check_source(model: ModelOptions) -> None:
    """A wrong path is told at once, before anybody is answered; the Hub is asked later."""
    from kvsieve.engine.model_loader import resolve_model

    if model.hub is None:
        resolve_model(model.source)


def _announce(config: "ServerConfig", listener: "socket.socket", model: str) -> None:
    """Say on stderr where the server is, after a warning if anybody may come in."""
    where = listener.getsockname()
    scheme = "https" if config.ssl_key_file else "http"
    if isinstance(where, str):
        shown = f"unix:{where}"
    else:
        host = f"[{where[0]}]" if ":" in where[0] else where[0]
        shown = f"{scheme}://{host}:{where[1]}"
    if not config.is_loopback and not config.api_keys:
        print(
            "kvsieve: warning: anyone who can reach this address may use the server "
            "(--api-key-file)",
            file=sys.stderr,
        )
    print(f"kvsieve: {model} at {shown}", file=sys.stderr, flush=True)
