"""``kvsieve serve``: OpenAI's API, and llama.cpp's endpoints, over one model."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions
from kvsieve.cli.profiles import profiled
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.serve_options import (
    BatchOptions,
    DefaultSamplingOptions,
    ListenOptions,
    SafetyOptions,
    server_config,
)
from kvsieve.cli.sparse_options import SparseOptions

if TYPE_CHECKING:
    import socket

    from kvsieve.server.config import ServerConfig


@grouped
def serve(
    *,
    listen: ListenOptions,
    safety: SafetyOptions,
    batch: BatchOptions,
    sampling: DefaultSamplingOptions,
    sparse: SparseOptions,
    model: ModelOptions,
) -> None:
    """Answer OpenAI's clients over HTTP until Ctrl-C or SIGTERM.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health,
    /metrics, /props, /slots, /tokenize, /detokenize, /apply-template and
    /completion, each with and without /v1. Every reply says which attention
    ran. See docs/server.md.

    \b
    Examples:
      kvsieve serve
      kvsieve serve -m model.gguf --port 9000 --api-key-file keys.txt
      kvsieve serve --sparse-attn --sparse-k 32 --sparse-limit-k-max 128 -np 8
    """
    from kvsieve.engine.service import Service
    from kvsieve.server.app import create_app
    from kvsieve.server.run import HttpServer, bind
    from kvsieve.server.served import served_model
    from kvsieve.server.state_routes import model_name

    config = server_config(listen, safety, sampling, sparse=sparse)
    template = listen.template()
    with (
        bind(config) as listener,
        StatusBar() as bar,
        open_model(model, bar=bar, sparse=config.sparse.default) as llm,
    ):
        bar.close()
        default = profiled(config.sparse.default, options=sparse, llm=llm, model=model)
        config = replace(config, sparse=replace(config.sparse, default=default))
        service = Service(
            llm,
            max_sequences=batch.parallel,
            max_queue=batch.max_queue,
            max_prefill_share=batch.max_prefill_share,
            cache_ram_bytes=batch.cache_ram << 20,
        )
        served = None
        try:
            served = served_model(llm, service, template_source=template)
            app = create_app(served, config)
            HttpServer(
                app,
                config,
                listener=listener,
                service=service,
                on_ready=lambda: _announce(config, listener, model_name(served, config)),
            ).run()
        finally:
            service.close()
            if served is not None:
                served.close()


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
