"""From logits to the next token: biases, constraint and penalties, then greedy, or top-k, top-p,
min-p and temperature, in that order.

The order is llama.cpp's (its default chain, without the steps we do not have): top-p and min-p
look at probabilities at temperature 1, so a high temperature cannot widen what they let through.
"""

import secrets
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np

from kvsieve.engine.constraint import Constraint, Matcher
from kvsieve.engine.penalties import LogitBias, Penalties
from kvsieve.engine.stop import stop_strings
from kvsieve.errors import ConfigError, NumericalError, ShapeError
from kvsieve.types import F32, F64, I64, AnyArray

_SPANS = 512
"""Spans whose maxima bound the k-th largest logit from below: for k <= _SPANS, at least k logits
reach the k-th largest of the maxima. One pass over 49k logits instead of a partial sort of them
(31 us against 230 us without AVX-512)."""

LARGEST_PENALTY = 1000.0
"""Of every penalty and bias: far beyond any logit, and no sum overflows."""

_FIRST_NUCLEUS = 256
"""Tokens that top-p sorts first: in text, their mass nearly always suffices."""

_BINS, _BINNED_LOGITS = 4096, 32
"""Bins of top-p, and the distance from the best logit that they cover; beyond it, at 1e-14 of the
best one's weight, all share one bin."""

_SPAN = 256
"""Weights that are summed at once where a token is drawn: its square is about a vocabulary."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a completion is drawn and when it ends; checked when it is made (ConfigError).

    temperature  0 is greedy: the largest logit, ties to the lowest token id
    top_k        keep the k largest logits, ties to the lower id; 0, -1 or None: all
    top_p        keep the fewest most probable tokens whose mass reaches top_p, at least one; 1: all
    min_p        keep tokens at least min_p times as probable as the best; 0: all
    seed         0 to 2**64 - 1; None or -1 draws one, which `Sampler.seed` reports
    max_tokens   tokens to generate at most; 0 generates none
    stop         strings that end the text just before them; a bare string is one, None is none
    ignore_eos   go on after an end token
    min_tokens   draw no end token before so many tokens

    repeat_penalty, frequency_penalty, presence_penalty, repeat_last_n
                 make tokens less likely that are among the last `repeat_last_n`, those of the
                 prompt included (`Penalties`); 1, 0 and 0 change nothing
    logit_bias   added to the logits of token ids; -inf bans one
    logprobs     report the chosen token's log probability and those of so many best tokens
    prompt_logprobs  the same for every token of the prompt but the first, which nothing foretells;
                 the whole prompt then runs, whatever a prefix cache has of it
    constraint   what the reply has to match; it ends where nothing more may follow
    """

    temperature: float = 0.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: str | Sequence[str] | None = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name, maximum in (("temperature", sys.float_info.max), ("top_p", 1.0), ("min_p", 1.0)):
            object.__setattr__(self, name, _checked_real(name, getattr(self, name), maximum))
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, minimum=-1, maximum=None)
        if self.seed is not None:
            _check_integer("seed", self.seed, minimum=-1, maximum=2**64 - 1)
        _check_integer("max_tokens", self.max_tokens, minimum=0, maximum=None)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(
                f"[SamplingParams] ignore_eos: expected True or False, got {self.ignore_eos!r}"
            )
        object.__setattr__(self, "stop", stop_strings(self.stop))
        _check_integer("min_tokens", self.min_tokens, minimum=0, maximum=None)
        _check_integer("repeat_last_n", self.repeat_last_n, minimum=-1, maximum=None)
        for name in ("repeat_penalty", "frequency_penalty", "presence_penalty"):
            object.__setattr__(self, name, _checked_penalty(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), minimum=0, maximum=None)
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise ConfigError(
                f"[SamplingParams] constraint: expected a Constraint, got {self.constraint!r}"
            )

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were said before are less likely, or more."""
        changes = (self.repeat_penalty - 1, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n != 0 and any(changes)

    def check_vocabulary(self, vocab_size: int) -> None:
        """ConfigError unless every id of `logit_bias` is a token."""
        for token in self.logit_bias:
            if token >= vocab_size:
                raise ConfigError(
                    f"[SamplingParams] logit_bias: expected token ids from 0 to {vocab_size - 1}, "
                    f"got {token}"
                )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, in whatever form `stop` was given."""
        return stop_strings(self.stop)


class Sampler:
    """Draws the tokens of one request; its random numbers belong to it alone.

    The same seed, parameters and logits give the same tokens, whatever else runs.

    prompt_ids  what the penalties look back on first
    end_ids     tokens that are not drawn while `ignore_eos` or `min_tokens` forbids them
    matcher     of `params.constraint`, at the beginning of the reply
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Iterable[int] = (),
        end_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self._params = params
        self._end_ids = sorted(end_ids)
        self._matcher = matcher
        self._bias = LogitBias(params.logit_bias) if params.logit_bias else None
        self._penalties: Penalties | None = None
        if params.penalizes:
            self._penalties = Penalties(
                last_n=params.repeat_last_n,
                repeat=params.repeat_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
                seen=prompt_ids,
            )
        self._num_accepted = 0
        given = params.seed is not None and params.seed >= 0
        # 32 bits survive any JSON reader and are what llama.cpp prints.
        self._seed = int(params.seed) if given and params.seed is not None else secrets.randbits(32)
        self._random = np.random.Generator(np.random.PCG64(self._seed))
        self._work: F64 = np.empty(0, np.float64)

    @property
    def seed(self) -> int:
        """The seed in use, given or drawn: with it the run can be repeated."""
        return self._seed

    def sample(self, logits: F32) -> int:
        """Choose the next token.

        Parameters
        ----------
        logits : f32 ``[vocab]``, of any layout; -inf excludes a token. Not changed.

        Returns
        -------
        A token id. Greedy ties go to the lowest id. One random number is used per drawn token,
        none by a greedy one; candidates are laid out by ascending id, in float64.

        Raises
        ------
        ShapeError if `logits` is not a vector of floats; NumericalError on NaN, +inf, or if every
        token is excluded.
        """
        best = _best(logits)
        adjusted = self._adjusted(logits)
        if adjusted is not logits:
            logits, best = adjusted, _best(adjusted)
        if self._params.temperature == 0:
            return best
        kept = self._candidates(logits, float(logits[best]))
        if kept is None:
            return self._draw(logits, float(logits[best]))
        return int(kept[self._draw(logits[kept], float(logits[best]))])

    def accept(self, token: int) -> None:
        """Note the token that the reply goes on with, usually the one just sampled."""
        self._num_accepted += 1
        if self._penalties is not None:
            self._penalties.accept(token)
        if self._matcher is not None and token not in self._end_ids:
            self._matcher.accept(token)

    @property
    def is_done(self) -> bool:
        """Whether the constraint lets nothing more follow."""
        return self._matcher is not None and self._matcher.is_done

    def _adjusted(self, logits: F32) -> F32:
        """The logits with bans, biases, constraint and penalties: themselves if there are none."""
        params = self._params
        # As in llama.cpp, end tokens are never drawn, rather than drawn and passed over.
        bans_end = params.ignore_eos or self._num_accepted < params.min_tokens
        bans_end = bans_end and bool(self._end_ids)
        if not (bans_end or self._bias or self._matcher or self._penalties):
            return logits
        logits = logits.copy()
        if bans_end:
            logits[self._end_ids] = -np.inf
        if self._bias is not None:
            self._bias.apply(logits)
        if self._matcher is not None:
            self._matcher.exclude(logits)
        if self._penalties is not None:
            self._penalties.apply(logits)
        return logits

    def _candidates(self, logits: F32, best: float) -> I64 | None:
        """Ids left by top-k, top-p and min-p, ascending, the best one among them; None: all."""
        params = self._params
        kept: I64 | None = None
        if params.top_k is not None and 0 < params.top_k < logits.size:
            kept = np.sort(largest(logits, int(params.top_k)))
        if params.top_p < 1:
            few = logits if kept is None else logits[kept]
            weights = self._shifted(few, best)
            np.exp(weights, out=weights)
            nucleus = _nucleus(few, weights, float(params.top_p))
            kept = nucleus if kept is None else kept[nucleus]
        if params.min_p > 0:
            few = logits if kept is None else logits[kept]
            above = np.flatnonzero(self._shifted(few, best) >= np.log(params.min_p))
            kept = above if kept is None else kept[above]
        return kept

    def _draw(self, logits: F32, best: float) -> int:
        """Place drawn from softmax(logits / temperature) by inverting its cumulative sum."""
        scaled = self._shifted(logits, best)
        with np.errstate(over="ignore"):
            # A tiny temperature sends all but the best to -inf, whose exponential is 0.
            scaled /= self._params.temperature
        return _place_of(np.exp(scaled, out=scaled), self._random.random())

    def _shifted(self, logits: F32, best: float) -> F64:
        """Return ``logits - best`` in float64, in memory that the next call uses again."""
        if self._work.size < logits.size:
            self._work = np.empty(logits.size, np.float64)
        return np.subtract(logits, best, out=self._work[: logits.size], dtype=np.float64)


def sample_rows(logits: AnyArray, samplers: Sequence[Sampler]) -> list[int]:
    """Choose a token for each row of `logits`, f32 ``[B, vocab]``, by its own sampler.

    A row's token is what its sampler would choose alone. ShapeError if the numbers differ.
    """
    if logits.ndim != 2 or len(logits) != len(samplers):
        raise ShapeError(
            f"[sample_rows] logits: expected ({len(samplers)}, vocab), got {logits.shape}"
        )
    return [sampler.sample(row) for sampler, row in zip(samplers, logits, strict=True)]


def _best(logits: AnyArray) -> int:
    """Lowest id of the largest logit, which must be finite."""
    is_vector = isinstance(logits, np.ndarray) and logits.ndim == 1 and logits.size > 0
    if not is_vector or logits.dtype.kind != "f":
        came = (
            f"{logits.dtype} {logits.shape}"
            if isinstance(logits, np.ndarray)
            else type(logits).__name__
        )
        raise ShapeError(f"[sample] logits: expected float32 (vocab), got {came}")
    # argmax stops at the first NaN, so one look at its value finds NaN as well as infinities.
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise NumericalError(
            f"[sample] logits: expected a finite maximum, got {logits[best]} at token {best}"
        )
    return best


def largest(logits: F32, k: int) -> I64:
    """Ids of the k largest logits, largest first, ties to the lower id; 1 <= k <= size."""
    if k <= _SPANS < logits.size:
        starts = np.arange(_SPANS) * logits.size // _SPANS
        floor = np.partition(np.maximum.reduceat(logits, starts), _SPANS - k)[_SPANS - k]
    else:
        floor = np.partition(logits, logits.size - k)[logits.size - k]
    places = np.flatnonzero(logits >= floor)
    order: I64 = places[np.argsort(-logits[places], kind="stable")]
    return order[:k]


def _nucleus(logits: F32, weights: F64, top_p: float) -> I64:
    """Places of the fewest largest logits whose weights sum to at least top_p, ascending."""
    wanted = top_p * weights.sum()
    count = min(_FIRST_NUCLEUS, logits.size)
    order = largest(logits, count)
    reached = int(np.searchsorted(np.cumsum(weights[order]), wanted)) + 1
    if reached <= count or count == logits.size:
        return np.sort(order[: min(reached, count)])
    # A flat distribution. Instead of sorting it: bins of equal logits or nearly so, whole ones
    # until the next would do, and of that one the largest (9.5 ms -> 0.3 ms at 49k logits).
    shares = (logits.max() - logits) * np.float32(_BINS / _BINNED_LOGITS)
    bins = np.minimum(shares, np.float32(_BINS)).astype(np.int64)
    masses = np.cumsum(np.bincount(bins, weights, minlength=_BINS + 1))
    last = min(int(np.searchsorted(masses, wanted)), _BINS)
    within = np.flatnonzero(bins == last)
    within = within[np.argsort(-logits[within], kind="stable")]
    before = masses[last - 1] if last else 0.0
    reached = int(np.searchsorted(before + np.cumsum(weights[within]), wanted)) + 1
    kept = bins < last
    kept[within[:reached]] = True
    return np.flatnonzero(kept)


def _place_of(weights: F64, share: float) -> int:
    """First place at which the running sum of weights exceeds `share` (from 0 to below 1) of all.

    Sums of spans first: a running sum over all 49k would take longer than the exponentials.
    """
    starts = np.arange(0, weights.size, _SPAN)
    sums = np.cumsum(np.add.reduceat(weights, starts))
    wanted = share * sums[-1]
    span = int(np.searchsorted(sums, wanted, side="right"))
    if span == sums.size:
        # The product rounded up to the total: the last span that added to it.
        span = int(np.searchsorted(sums, sums[-1], side="left"))
    few = weights[starts[span] : starts[span] + _SPAN]
    before = sums[span - 1] if span else 0.0
    place = int(np.searchsorted(before + np.cumsum(few), wanted, side="right"))
    if place == few.size:
        place = int(np.flatnonzero(few)[-1])
    return int(starts[span]) + place


def _checked_real(name: str, value: object, maximum: float) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    except OverflowError:
        number = -1.0
    # Written so that NaN, which compares false with everything, is refused.
    if 0 <= number <= maximum:
        return number
    allowed = "from 0 to 1" if maximum == 1 else "of at least 0"
    raise ConfigError(f"[SamplingParams] {name}: expected a number {allowed}, got {value!r}")


def _checked_penalty(name: str, value: object) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else np.nan
    # Logits are divided by a repeat penalty.
    lowest = 1 / LARGEST_PENALTY if name == "repeat_penalty" else -LARGEST_PENALTY
    # Written so that NaN, which compares false with everything, is refused.
    if lowest <= number <= LARGEST_PENALTY:
        return number
    raise ConfigError(
        f"[SamplingParams] {name}: expected a number of at least {lowest:g} and at most "
        f"{LARGEST_PENALTY:g}, got {value!r}"
    )


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ConfigError(
            f"[SamplingParams] logit_bias: expected numbers by token id, got {bias!r}"
        )
    for token, value in bias.items():
        _check_integer("logit_bias", token, minimum=0, maximum=None)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not float(value) <= LARGEST_PENALTY:
            raise ConfigError(
                f"[SamplingParams] logit_bias: expected numbers of at most {LARGEST_PENALTY:g}, "
                f"or -inf, got {value!r} for token {token}"
            )
    return {int(token): float(value) for token, value in bias.items()}


def _check_integer(name: str, value: object, *, minimum: int, maximum: int | None) -> None:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):  # type: ignore[operator]
        allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ConfigError(f"[SamplingParams] {name}: expected an integer {allowed}, got {value!r}")
