"""What a generation gives back: text, token ids, times, and what attention read."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvsieve.attention.config import Share
from kvsieve.types import F32

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The chosen token's log probability, and the most probable tokens, best first.

    Of the model's own distribution, at temperature 1 and before any penalty, bias or cut.
    """

    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, kw_only=True)
class TokenTiming:
    """One decode step: a token went through the model, and the next one was sampled.

    ``num_tokens`` is what the step could see: every earlier token and its own. ``total_ms``
    also holds sampling and detokenising, and no time spent by whoever reads the stream.
    """

    num_tokens: int
    total_ms: float
    attention_ms: float
    select_ms: float
    dense_ms: float


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Totals per phase, in llama.cpp's words. ``attention`` leaves out ``select``.

    `cache_n` tokens of the prompt came from a prefix cache and `prompt_n` went through the model.
    The first token is sampled from the prompt's last row, so `predicted_n` tokens take
    ``predicted_n - 1`` decode steps; `Completion.tokens` has each step's own time.
    """

    prompt_n: int
    prompt_ms: float
    prompt_attention_ms: float
    prompt_select_ms: float
    prompt_dense_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_attention_ms: float
    predicted_select_ms: float
    predicted_dense_ms: float
    cache_n: int = 0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens read per second."""
        return _per_second(self.prompt_n, self.prompt_ms)

    @property
    def predicted_per_second(self) -> float:
        """Tokens generated per second."""
        return _per_second(self.predicted_n, self.predicted_ms)

    def to_json(self) -> dict[str, float]:
        """Plain numbers; milliseconds to the microsecond."""
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "prompt_attention_ms": round(self.prompt_attention_ms, 3),
            "prompt_select_ms": round(self.prompt_select_ms, 3),
            "prompt_dense_ms": round(self.prompt_dense_ms, 3),
            "prompt_per_second": round(self.prompt_per_second, 3),
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_attention_ms": round(self.predicted_attention_ms, 3),
            "predicted_select_ms": round(self.predicted_select_ms, 3),
            "predicted_dense_ms": round(self.predicted_dense_ms, 3),
            "predicted_per_second": round(self.predicted_per_second, 3),
        }


@dataclass(frozen=True, kw_only=True)
class BlockReads:
    """(query token, block) pairs of one phase, once per KV head, summed over layers and steps.

    ``queries`` counts (query token, layer, KV head); ``attended`` over it is what one query read.
    """

    attended: int = 0
    causal: int = 0
    queries: int = 0

    def __add__(self, other: "BlockReads") -> "BlockReads":
        return BlockReads(
            attended=self.attended + other.attended,
            causal=self.causal + other.causal,
            queries=self.queries + other.queries,
        )

    @property
    def density(self) -> float | None:
        """Share of the causal pairs that were read, or None where nothing ran."""
        return self.attended / self.causal if self.causal else None

    @property
    def blocks_per_query(self) -> float | None:
        """Mean blocks one query token read per layer and KV head, or None where nothing ran."""
        return self.attended / self.queries if self.queries else None


@dataclass(frozen=True, kw_only=True)
class KeptMass:
    """Estimated share of all attention that fell on the blocks that were read (section 9).

    Over (decode step, layer, query head): the mean, the 5th percentile, and the mean of the layer
    where it is smallest.
    """

    mean: float
    p5: float
    worst_layer: int
    worst_layer_mean: float

    @classmethod
    def of(cls, kept: F32) -> "KeptMass":
        """From f32 ``[steps, layers, query heads]``; the first of equally bad layers."""
        layers = kept.mean(axis=(0, 2), dtype=np.float64)
        worst = int(layers.argmin())
        return cls(
            mean=float(layers.mean()),
            p5=float(np.percentile(kept, 5)),
            worst_layer=worst,
            worst_layer_mean=float(layers[worst]),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, to four places."""
        return {
            "mean": round(self.mean, 4),
            "p5": round(self.p5, 4),
            "worst_layer": self.worst_layer,
            "worst_layer_mean": round(self.worst_layer_mean, 4),
        }


@dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """Which attention ran. ``selector``, ``share``, ``k``, ``block_size`` are what was asked for.

    ``mode`` is what ran: a run that was asked to be sparse and never was is ``exact``, and
    ``exact_because`` says why. ``sparse_layers`` are those that chose blocks: all of them but those
    that read a window; none in an exact run.
    """

    mode: Literal["exact", "sparse"]
    selector: str | None
    share: Share | None
    k: int | None
    block_size: int | None
    prefill: BlockReads
    decode: BlockReads
    exact_because: str | None
    sparse_layers: tuple[int, ...] = ()
    mass: float | None = None
    exact_layers: tuple[int, ...] = ()
    layer_k: tuple[tuple[int, int], ...] = ()
    profile: str | None = None
    kept_mass: KeptMass | None = None
    warn_mass: float = 0.0

    @property
    def warning(self) -> str | None:
        """A line where the estimated kept mass fell under what was asked to be warned of."""
        kept = self.kept_mass
        if kept is None or kept.mean >= self.warn_mass:
            return None
        return (
            f"kept about {kept.mean:.3f} of the attention while decoding, under the "
            f"{self.warn_mass:g} to warn of (layer {kept.worst_layer}: {kept.worst_layer_mean:.3f})"
        )

    @property
    def blocks_read(self) -> int:
        """Pairs read in prefill and decode together."""
        return self.prefill.attended + self.decode.attended

    def to_json(self) -> dict[str, Any]:
        """Plain values; a phase in which nothing ran has density null."""
        return {
            "mode": self.mode,
            "selector": self.selector,
            "share": self.share,
            "k": self.k,
            "block_size": self.block_size,
            "blocks_read": self.blocks_read,
            "density": {"prefill": self.prefill.density, "decode": self.decode.density},
            "exact_because": self.exact_because,
            "sparse_layers": list(self.sparse_layers),
            "mass": self.mass,
            "exact_layers": list(self.exact_layers),
            "layer_k": {str(layer): k for layer, k in self.layer_k},
            "profile": self.profile,
            "kept_mass": None if self.kept_mass is None else self.kept_mass.to_json(),
            "warning": self.warning,
        }


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What ran: the model, the instruction set, the threads."""

    model_name: str
    fingerprint: str
    isa: str
    threads: int
    version: str


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The result of one prompt.

    ``token_ids`` are all tokens that were generated, an end token and those of a stop string
    included; neither is in ``text``. ``seed`` is the one that was used, given or drawn.
    ``stop_string`` is the stop string that ended the text, if one did.
    ``tokens`` has one entry per decode step: one fewer than ``token_ids``.
    ``prompt_logprobs``, if they were asked for, has one entry per token of the prompt that ran; the
    first is None.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    timings: Timings
    attention: AttentionReport
    tokens: list[TokenTiming]
    seed: int
    engine: EngineInfo
    stop_string: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        """The object that ``kvsieve generate --json`` prints."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "timings": self.timings.to_json(),
            "attention": self.attention.to_json(),
            "model": {"name": self.engine.model_name, "fingerprint": self.engine.fingerprint},
            "isa": self.engine.isa,
            "threads": self.engine.threads,
            "version": self.engine.version,
        }


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """A piece of a stream; the texts of all events join to `Completion.text`.

    One event per token: ``text`` may be empty (half a character, or the start of what may be a
    stop string), ``timing`` is None for the first token, whose logits came with the prompt,
    and ``logprobs`` unless they were asked for.
    The last event has no token: it carries held-back text and the `completion`.
    """

    text: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    timing: TokenTiming | None = None
    completion: Completion | None = None


def _per_second(count: int, milliseconds: float) -> float:
    return count / milliseconds * 1e3 if milliseconds > 0 else 0.0
