"""Options of ``kvsieve serve``, named as in llama.cpp where it has them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from kvsieve.cli.options import DrawingOptions, integer, option, real
from kvsieve.cli.sparse_options import SparseOptions
from kvsieve.errors import ConfigError
from kvsieve.server.config import (
    MIB,
    RequestLimits,
    SamplingDefaults,
    ServerConfig,
    SparsePolicy,
)

_SERVER = "Server"
_SAFETY = "Who may do what"
_BATCH = "Several at once"


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where the server listens, and what it shows."""

    host: Annotated[
        str,
        option(
            "--host",
            panel=_SERVER,
            metavar="ADDRESS",
            help="Address to listen on; a path ending in .sock is a Unix socket.",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, integer("--port", panel=_SERVER, help="Port; 0 takes a free one.")] = 8080
    alias: Annotated[
        str | None,
        option(
            "-a",
            "--alias",
            panel=_SERVER,
            metavar="NAME",
            show_default="the file's name",
            help="Name of the model in replies.",
        ),
    ] = None
    chat_template_file: Annotated[
        str | None,
        option(
            "--chat-template-file",
            panel=_SERVER,
            metavar="FILE",
            show_default="the model file's",
            help="A Jinja template to use instead.",
        ),
    ] = None
    metrics: Annotated[
        bool, option("--metrics/--no-metrics", panel=_SERVER, help="Answer /metrics.")
    ] = True
    slots: Annotated[bool, option("--slots/--no-slots", panel=_SERVER, help="Answer /slots.")] = (
        True
    )
    slot_save_path: Annotated[
        str | None,
        option(
            "--slot-save-path",
            panel=_SERVER,
            metavar="FOLDER",
            help="Where slots may be saved and restored; without it they cannot.",
        ),
    ] = None
    ping: Annotated[
        float,
        real(
            "--sse-ping-interval",
            panel=_SERVER,
            help="Seconds of silence after which a stream gets a comment line.",
        ),
    ] = 15.0
    timeout: Annotated[
        float,
        real(
            "--timeout",
            panel=_SERVER,
            help="Seconds a client may take to accept a piece of a reply.",
        ),
    ] = 600.0
    drain: Annotated[
        float,
        real(
            "--drain-timeout",
            panel=_SERVER,
            help="Seconds that running requests have to finish after SIGTERM or Ctrl-C.",
        ),
    ] = 30.0

    def template(self) -> str | None:
        """Text of the template to use instead of the model file's."""
        if self.chat_template_file is None:
            return None
        return _text_of("--chat-template-file", self.chat_template_file)

    def folder(self) -> str | None:
        """The folder of saved slots, which has to exist."""
        if self.slot_save_path is not None and not Path(self.slot_save_path).is_dir():
            raise ConfigError(f"--slot-save-path: expected a folder, got {self.slot_save_path!r}")
        return self.slot_save_path


@dataclass(frozen=True, kw_only=True)
class SafetyOptions:
    """Keys, web pages, and limits of requests."""

    api_key: Annotated[
        list[str],
        option(
            "--api-key",
            panel=_SAFETY,
            metavar="KEY",
            show_default=False,
            help="Keys that clients must send, separated by commas; may be given several times. "
            "Others see a command line: prefer a file.",
        ),
    ] = field(default_factory=list)
    api_key_file: Annotated[
        str | None,
        option("--api-key-file", panel=_SAFETY, metavar="FILE", help="Keys, one a line."),
    ] = None
    cors_origins: Annotated[
        str | None,
        option(
            "--cors-origins",
            panel=_SAFETY,
            metavar="URLS",
            help="Web pages that may use the server from a browser, such as "
            "https://chat.example.org, separated by commas; * lets in all.",
        ),
    ] = None
    body_limit: Annotated[
        int, integer("--body-limit", panel=_SAFETY, help="MiB that a request may have.")
    ] = 16
    sparse_fixed: Annotated[
        bool,
        option(
            "--sparse-fixed",
            panel=_SAFETY,
            help="Requests may not choose their attention; without it they may.",
        ),
    ] = False
    sparse_limit_k_min: Annotated[
        int,
        integer(
            "--sparse-limit-k-min", panel=_SAFETY, help="Fewest blocks that a request may set."
        ),
    ] = 1
    sparse_limit_k_max: Annotated[
        int | None,
        integer(
            "--sparse-limit-k-max",
            panel=_SAFETY,
            show_default="no limit, exact attention included",
            help="Most blocks that a request may set. Needs --sparse-attn.",
        ),
    ] = None
    ssl_key_file: Annotated[
        str | None,
        option("--ssl-key-file", panel=_SAFETY, metavar="FILE", help="Private key, for HTTPS."),
    ] = None
    ssl_cert_file: Annotated[
        str | None,
        option("--ssl-cert-file", panel=_SAFETY, metavar="FILE", help="Certificate, for HTTPS."),
    ] = None

    def keys(self) -> tuple[str, ...]:
        """All keys, from the command line and the file."""
        keys = [key for given in self.api_key for key in given.split(",")]
        if self.api_key_file is not None:
            lines = _text_of("--api-key-file", self.api_key_file).splitlines()
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise ConfigError(
                    f"--api-key-file: expected a key on a line of {self.api_key_file}, got none"
                )
            keys += found
        return tuple(keys)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How many requests run and wait, and what is kept of them."""

    parallel: Annotated[
        int, integer("-np", "--parallel", panel=_BATCH, help="Requests that run at once.")
    ] = 4
    max_queue: Annotated[
        int,
        integer(
            "--max-queue",
            panel=_BATCH,
            help="Requests that wait; more are told to come back later.",
        ),
    ] = 64
    max_prefill_share: Annotated[
        float,
        real(
            "--max-prefill-share",
            panel=_BATCH,
            help="Share of the time that prompts may take from running replies, 0 to 1.",
        ),
    ] = 0.5
    cache_ram: Annotated[
        int,
        integer(
            "-cram",
            "--cache-ram",
            panel=_BATCH,
            help="MiB for finished prompts and replies, which make the next request on them "
            "quicker; 0 is off.",
        ),
    ] = 1024
    reuse_generated: Annotated[
        bool,
        option(
            "--reuse-generated",
            panel=_BATCH,
            help="With sparse attention, let the next turn of a conversation reuse the last reply "
            "too. Quicker; it may then differ from the same conversation read anew.",
        ),
    ] = False

    def __post_init__(self) -> None:
        for names, value, least in (
            ("-np/--parallel", self.parallel, 1),
            ("--max-queue", self.max_queue, 0),
            ("-cram/--cache-ram", self.cache_ram, 0),
        ):
            if value < least:
                raise ConfigError(f"{names}: expected at least {least}, got {value}")
        if not 0 < self.max_prefill_share <= 1:
            raise ConfigError(
                f"--max-prefill-share: expected a share, above 0 and at most 1, got "
                f"{self.max_prefill_share}"
            )


def server_config(
    listen: ListenOptions,
    safety: SafetyOptions,
    batch: BatchOptions,
    *,
    sampling: DrawingOptions,
    sparse: SparseOptions,
) -> ServerConfig:
    """The server's settings; ConfigError on a value out of range."""
    # More sequences than may run and wait would be refused however often they are asked for.
    at_once = min(RequestLimits.choices, batch.parallel + batch.max_queue)
    origins = [one.strip().rstrip("/") for one in (safety.cors_origins or "").split(",")]
    return ServerConfig(
        host=listen.host,
        port=listen.port,
        alias=listen.alias,
        api_keys=safety.keys(),
        cors_origins=tuple(one for one in origins if one),
        ping_s=listen.ping,
        send_s=listen.timeout,
        drain_s=listen.drain,
        slots=listen.slots,
        metrics=listen.metrics,
        slot_save_path=listen.folder(),
        ssl_key_file=safety.ssl_key_file,
        ssl_cert_file=safety.ssl_cert_file,
        limits=RequestLimits(body_bytes=safety.body_limit * MIB, choices=at_once, prompts=at_once),
        sampling=SamplingDefaults(
            temperature=sampling.temp,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            n_predict=sampling.predict,
        ),
        sparse=SparsePolicy(
            default=sparse.setting,
            per_request=not safety.sparse_fixed,
            min_k=safety.sparse_limit_k_min,
            max_k=safety.sparse_limit_k_max,
        ),
    )


def _text_of(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: expected UTF-8 text, got other bytes in {path}") from None
