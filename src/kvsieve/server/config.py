"""What an operator decides about a server, as values that are checked when they are made."""

from dataclasses import dataclass, field
from typing import get_args

from kvsieve.attention.config import CONTROLS, SelectorName, SparseAttention
from kvsieve.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request may ask for. Beyond a limit it is refused, never cut.

    body_bytes     bytes of a request's body
    nesting        depth of lists and objects in a body
    messages       messages of a conversation
    prompts        prompts of one request
    choices        completions of one request, all its prompts together
    stops          stop strings
    stop_chars     characters of one stop string
    tools          functions that a model may be offered
    top_logprobs   alternatives listed per token
    logit_biases   entries of `logit_bias`
    tokenize_chars  characters of a text that is only tokenized; a prompt's follow from the context
    read_s         seconds in which a request must have arrived
    """

    body_bytes: int = 16 * MIB
    nesting: int = 64
    messages: int = 4096
    prompts: int = 128
    choices: int = 128
    stops: int = 16
    stop_chars: int = 1000
    tools: int = 128
    top_logprobs: int = 20
    logit_biases: int = 1024
    tokenize_chars: int = 1_000_000
    read_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"[RequestLimits] {name}: expected at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class SparsePolicy:
    """Attention of requests that do not choose, and what the others may choose.

    default    None is exact attention
    per_request  False: every request gets `default`, and one that asks for anything else is refused
    min_k, max_k  blocks that a request may set; exact attention, which reads every block, needs
               `max_k` None
    """

    default: SparseAttention | None = None
    per_request: bool = True
    min_k: int = 1
    max_k: int | None = None

    def __post_init__(self) -> None:
        if self.min_k < 1:
            raise ConfigError(f"[SparsePolicy] min_k: expected at least 1, got {self.min_k}")
        if self.max_k is not None and self.max_k < self.min_k:
            raise ConfigError(
                f"[SparsePolicy] max_k: expected at least min_k={self.min_k}, got {self.max_k}"
            )
        if self.per_request and self.max_k is not None and self.default is None:
            raise ConfigError(
                "[SparsePolicy] max_k: expected a sparse default beside it, because exact "
                f"attention reads every block, got max_k={self.max_k} and exact"
            )

    @property
    def selectors(self) -> tuple[str, ...]:
        """What a request may choose: selectors for evaluation only where the operator did."""
        has_control = self.default is not None and self.default.selector in CONTROLS
        return tuple(name for name in get_args(SelectorName) if has_control or name not in CONTROLS)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Sampling of requests that do not say otherwise, named and valued as in llama.cpp.

    n_predict  tokens of a reply; -1: until the model ends or the context is full
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = -1
    n_predict: int = -1

    def __post_init__(self) -> None:
        # Imported here: the command line reads this module, and should be quick to show its help.
        from kvsieve.engine.sampling import SamplingParams

        SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )
        if self.n_predict < -1:
            raise ConfigError(
                f"[SamplingDefaults] n_predict: expected tokens, or -1, got {self.n_predict}"
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server speaks.

    host, port     where it listens
    alias          name of the model in replies; None: as its file calls it
    api_keys       any of these opens all endpoints but `/health`; none: open to whoever connects
    cors_origins   web pages that browsers may let in; none by default
    ping_s         seconds of silence after which a stream gets a comment line
    send_s         seconds that a client may take to accept a piece of a reply
    drain_s        seconds that running requests have to finish when the server is told to stop
    slots          whether `/slots` answers
    metrics        whether `/metrics` answers
    slot_save_path  folder of saved slots; None: they can not be saved
    connections    clients connected at once
    """

    host: str = "127.0.0.1"
    port: int = 8080
    alias: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ping_s: float = 15.0
    send_s: float = 600.0
    drain_s: float = 30.0
    slots: bool = True
    metrics: bool = True
    slot_save_path: str | None = None
    connections: int = 1000
    ssl_key_file: str | None = None
    ssl_cert_file: str | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    sparse: SparsePolicy = field(default_factory=SparsePolicy)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"[ServerConfig] port: expected 0 to 65535, got {self.port}")
        for name in ("ping_s", "send_s", "drain_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"[ServerConfig] {name}: expected seconds above 0, got {getattr(self, name)}"
                )
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("[ServerConfig] api_keys: expected keys that are not empty, got one")
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            raise ConfigError(
                "[ServerConfig] ssl_key_file, ssl_cert_file: expected both or neither, got one"
            )
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(
                    "[ServerConfig] cors_origins: expected origins such as https://example.org, "
                    f"or *, got {origin!r}"
                )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in {"127.0.0.1", "::1", "localhost"} or self.host.endswith(".sock")
