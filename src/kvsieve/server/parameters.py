"""From the fields of a request to the engine's parameters, within the operator's limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvsieve.engine.constraint import Constraint
from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.engine.sampling import SamplingParams
from kvsieve.server.config import RequestLimits, SamplingDefaults
from kvsieve.server.errors import invalid
from kvsieve.server.protocol import Common

NO_LIMIT = 2**31 - 1
"""Tokens of a reply without a limit: the engine ends it where the context is full."""

_SEED_BITS = 64
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "grammar": ("",),
    "typical_p": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "samplers": ([],),
    "t_max_predict_ms": (0, -1),
    "lora": ([],),
    "suffix": ("",),
    "post_sampling_probs": (False,),
    "functions": ([],),
    "modalities": (["text"],),
}
"""Fields we cannot follow, and the values with which they ask for nothing."""

_AS_NAMED = (
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "min_tokens",
)
"""Fields that the engine's parameters have by the same name, and no default of the server."""

_ALL_SAMPLERS = {
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    "temperature",
}


def refuse_unsupported(request: Common) -> None:
    """ApiError 400 for a field that asks for what cannot be done: nothing is ignored silently."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is None or any(value == one for one in neutral):
            continue
        if name == "samplers" and set(map(str, value)) == _ALL_SAMPLERS:
            continue
        raise invalid(name, expected=f"none ({name} is not supported)", got=value)
    best_of = getattr(request, "best_of", None)
    if best_of is not None and best_of != (request.n or 1):
        raise invalid("best_of", expected="none (only n is supported)", got=best_of)


def choice_count(request: Common, *, prompts: int, limits: RequestLimits) -> int:
    """Completions per prompt."""
    count = 1 if request.n is None else request.n
    most = limits.choices // prompts
    if not 1 <= count <= most:
        beside = f" beside {prompts} prompts" if prompts > 1 else ""
        raise invalid("n", expected=f"1 to {most}{beside}", got=count)
    return count


def reply_limit(given: Mapping[str, int | None], *, default: int, unlimited: bool = False) -> int:
    """Most tokens of a reply. Of several names the first that is given counts.

    `unlimited`: -1 means "until the context is full" (llama.cpp's `n_predict`).
    """
    name, value = next(
        ((name, value) for name, value in given.items() if value is not None), ("", default)
    )
    if name in ("", "n_predict") and value == -1:
        return NO_LIMIT
    if value < 0:
        allowed = "0 or more tokens" + (", or -1" if unlimited else "")
        raise invalid(name, expected=allowed, got=value)
    return min(value, NO_LIMIT)


def sampling(
    request: Common,
    *,
    defaults: SamplingDefaults,
    limits: RequestLimits,
    tokenizer: AnyTokenizer,
    max_tokens: int,
    logprobs: int | None,
    schema: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Parameters of the first completion; ConfigError or ApiError on a value out of range."""
    asked: dict[str, Any] = {
        "temperature": _first(request.temperature, defaults.temperature),
        "top_k": _first(request.top_k, defaults.top_k),
        "top_p": _first(request.top_p, defaults.top_p),
        "min_p": _first(request.min_p, defaults.min_p),
        "seed": _seed(_first(request.seed, defaults.seed)),
        "max_tokens": max_tokens,
        "stop": _stops(request.stop, limits),
        "ignore_eos": bool(request.ignore_eos),
        "logprobs": logprobs,
        "constraint": None if schema is None else Constraint.json_schema(schema),
        "logit_bias": logit_biases(request.logit_bias, limits=limits, tokenizer=tokenizer),
    }
    for name in _AS_NAMED:
        value = getattr(request, name)
        if value is not None:
            asked[name] = value
    return SamplingParams(**asked)


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of the n-th completion of a prompt: its seed is the request's, plus n."""
    if choice == 0 or params.seed is None or params.seed < 0:
        return params
    return replace(params, seed=(params.seed + choice) % 2**_SEED_BITS)


def logit_biases(
    given: dict[str, float] | list[list[Any]] | None,
    *,
    limits: RequestLimits,
    tokenizer: AnyTokenizer,
) -> dict[int, float]:
    """Bias by token id. OpenAI's keys are strings; llama.cpp's pairs may hold text, and false."""
    if not given:
        return {}
    if len(given) > limits.logit_biases:
        raise invalid(
            "logit_bias", expected=f"at most {limits.logit_biases} entries", got=len(given)
        )
    pairs = given.items() if isinstance(given, dict) else map(_pair, given)
    biases: dict[int, float] = {}
    for key, bias in pairs:
        value = float("-inf") if bias is False else bias
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid("logit_bias", expected="numbers, or false to ban a token", got=bias)
        for token in _biased_tokens(key, is_text=isinstance(given, list), tokenizer=tokenizer):
            if not 0 <= token < tokenizer.vocab_size:
                raise invalid(
                    "logit_bias",
                    expected=f"token ids from 0 to {tokenizer.vocab_size - 1}",
                    got=key,
                )
            biases[token] = float(value)
    return biases


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _seed(seed: int) -> int | None:
    if not -(2 ** (_SEED_BITS - 1)) <= seed < 2**_SEED_BITS:
        raise invalid("seed", expected="a number of 64 bits", got=seed)
    # -1 draws a seed, as in llama.cpp; other negative ones are OpenAI's signed seeds.
    return None if seed == -1 else seed % 2**_SEED_BITS


def _stops(given: str | list[str] | None, limits: RequestLimits) -> Sequence[str]:
    stops = [given] if isinstance(given, str) else list(given or [])
    if len(stops) > limits.stops:
        raise invalid("stop", expected=f"at most {limits.stops} strings", got=len(stops))
    for text in stops:
        if not 1 <= len(text) <= limits.stop_chars:
            raise invalid(
                "stop", expected=f"strings of 1 to {limits.stop_chars} characters", got=text[:40]
            )
    return stops


def _pair(entry: object) -> tuple[Any, Any]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise invalid("logit_bias", expected="pairs [token, bias]", got=entry)
    return entry[0], entry[1]


def _biased_tokens(key: object, *, is_text: bool, tokenizer: AnyTokenizer) -> Sequence[int]:
    if isinstance(key, int) and not isinstance(key, bool):
        return [key]
    if isinstance(key, str) and is_text:
        return tokenizer.encode(key, add_special=False)
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
        return [int(key)]
    raise invalid("logit_bias", expected="token ids as keys", got=key)
