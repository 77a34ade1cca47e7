"""The attention function and the masks that Transformers calls by the name ``kvsieve``."""

import atexit
import warnings
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvsieve.errors import ConfigError, KvsieveError, ShapeError
from kvsieve.integrations.paged.batch import BatchLayer
from kvsieve.integrations.paged.host import AttentionHost, make_host
from kvsieve.integrations.paged.padding import read_mask
from kvsieve.integrations.transformers.cache import ClosedStates, as_rows
from kvsieve.types import F32, AnyArray

NAME = "kvsieve"
"""What to give as ``attn_implementation``."""

HOST_ATTRIBUTE = "kvsieve_host"
"""Where a run puts its settings on a model's attention modules."""

_NOT_COMPUTED = {
    "softcap": "logits with a soft cap",
    "s_aux": "learned attention sinks",
    "position_bias": "a position bias",
}
"""Arguments that change the result and that no kernel of ours computes."""


def register() -> None:
    """Make the name known to Transformers. Doing it twice is harmless."""
    AttentionInterface.register(NAME, KVSieveAttention())
    AttentionMaskInterface.register(NAME, kvsieve_mask)


def kvsieve_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of one forward pass, in the smallest form that says everything.

    Causal attention over all tokens: None, or which tokens are real, ``bool [B, kv_length]``.
    Everything else (windows, image tokens that see each other, packed sequences, caches with
    room to spare): what each query reads, ``bool [B, 1, q_length, kv_length]``, as for ``sdpa``.
    """
    whole = kv_offset == 0 and q_offset + q_length == kv_length
    if mask_function is causal_mask_function and whole:
        if attention_mask is None:
            return None
        if attention_mask.shape[-1] < kv_length:
            raise ShapeError(
                f"[kvsieve attention] attention_mask: expected {kv_length} columns (earlier and "
                f"new tokens), got {attention_mask.shape[-1]}"
            )
        real = attention_mask[:, :kv_length]
        return None if bool(real.all()) else real
    # Without its mask a window would look like causal attention.
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


class KVSieveAttention:
    """What Transformers calls for every layer of a model with ``attn_implementation="kvsieve"``."""

    @cached_property
    def _default_host(self) -> AttentionHost:
        # Transformers keeps this object until the interpreter is gone; the kernels must go before.
        atexit.register(self.__dict__.clear)
        return make_host(
            sparse=None, cache_type="q8_0", backend="native", threads=None, keep_masks=False
        )

    def __call__(  # noqa: PLR0917 (as Transformers calls it)
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of query ``[B, Hq, T, D]``: ``[B, T, Hq, D]`` of its dtype, and no weights.

        key, value  from a `KVSieveCache`; or ``[B, Hkv, Tkv, D]`` with the queries at the end
        """
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        _check_arguments(module, kwargs)
        if not isinstance(key, ClosedStates) and (not causal or _is_token_mask(attention_mask)):
            # A vision tower, or a window whose keys the host's own cache holds: not ours to touch.
            if causal:
                _record_host_layer(module)
            return sdpa_attention_forward(  # type: ignore[no-any-return]
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **kwargs,
            )
        _check_call(module, query, causal=causal, dropout=dropout)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        q, mask = as_rows(query), _as_array(attention_mask)
        if isinstance(key, ClosedStates):
            out = key.new.layer.attend(key.new, q, mask, scale=scale)
        else:
            host = getattr(module, HOST_ATTRIBUTE, None) or self._default_host
            layer = getattr(module, "layer_idx", None) or 0
            out = _attend_plain(host, q, (key, value), mask, layer=layer, scale=scale)
        result = torch.from_numpy(out).to(query.dtype)
        if torch.is_grad_enabled() and query.requires_grad:
            result = _WithoutGradient.apply(query, result)
        return result, None


def _attend_plain(
    host: AttentionHost,
    q: F32,
    states: tuple[torch.Tensor, torch.Tensor],
    mask: AnyArray | None,
    *,
    layer: int,
    scale: float,
) -> F32:
    """Keys and values of no cache or of another one: put into pages, read, and forgotten."""
    keys, values = (as_rows(one) for one in states)
    num_rows, kv_len, num_kv_heads, head_dim = keys.shape
    if values.shape != keys.shape or q.shape[0] != num_rows or q.shape[1] > kv_len:
        raise ShapeError(
            f"[kvsieve attention] key, value: expected one shape with at least the query's "
            f"{q.shape[1]} tokens, got {keys.shape} and {values.shape} (rows, tokens, heads, "
            "head_dim)"
        )
    past = kv_len - q.shape[1]
    if past:
        _warn_of_another_cache(host)
    real = np.ones((num_rows, kv_len), np.bool_) if mask is None else mask != 0
    batch = BatchLayer(
        host, layer=layer, num_rows=num_rows, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    if past:
        before = batch.real
        earlier = read_mask(real[:, :past], past=before, q_len=past)
        batch.append(keys[:, :past], values[:, :past], earlier)
    masks = read_mask(mask, past=batch.real, q_len=q.shape[1])
    batch.append(keys[:, past:], values[:, past:], masks)
    return batch.attend(q, masks, prompt_len=None, scale=scale)


def _warn_of_another_cache(host: AttentionHost) -> None:
    text = (
        "keys came from another cache, so pages were built anew for every call: correct, but slow "
        "and without importance"
    )
    host.recorder.note(text)
    warnings.warn(
        f"[kvsieve attention] {text}. Use kvsieve.transformers.sparse(model), or give a "
        "KVSieveCache(model.config) to generate",
        UserWarning,
        stacklevel=4,
    )


def _check_arguments(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse by name what would change the result and is not computed."""
    where = f"[kvsieve attention] {type(module).__name__}"
    for name, what in _NOT_COMPUTED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"{where}: expected plain softmax attention, got {name} ({what})")
    if kwargs.get("output_attentions"):
        raise ConfigError(
            f"{where}: expected output_attentions=False, got True: the weights are never formed "
            "(attn_implementation='eager' gives them)"
        )


def _record_host_layer(module: torch.nn.Module) -> None:
    host, layer = getattr(module, HOST_ATTRIBUTE, None), getattr(module, "layer_idx", None)
    if host is not None and layer is not None:
        host.recorder.host_layer(
            layer, "keys of another cache under a mask of its own, read by Transformers"
        )


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    *,
    causal: bool,
    dropout: float,
) -> None:
    """Refuse what only another attention can do."""
    where = f"[kvsieve attention] {type(module).__name__}"
    if not causal:
        raise ConfigError(f"{where}: expected causal attention over a KVSieveCache, got another")
    if query.device.type != "cpu":
        raise ConfigError(f"{where}: expected a model on the CPU, got {query.device}")
    if dropout:
        raise ConfigError(f"{where}: expected dropout 0 (model.eval()), got {dropout}")
    if module.training and torch.is_grad_enabled() and query.requires_grad:
        raise ConfigError(
            f"{where}: expected inference (model.eval() and torch.no_grad()), got training: "
            "kvsieve computes no gradients"
        )


class _WithoutGradient(torch.autograd.Function):
    """Keeps the graph connected, so that asking for a gradient is an error and not a wrong one."""

    @staticmethod
    def forward(_: Any, query: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The result as it is."""
        return result

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        """Refuse."""
        raise KvsieveError(
            "[kvsieve attention] backward: expected no gradient to be asked for, got one: kvsieve "
            "computes none (use attn_implementation='sdpa' to train)"
        )


def _is_token_mask(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.ndim == 4


def _as_array(mask: torch.Tensor | None) -> AnyArray | None:
    if mask is None:
        return None
    array: AnyArray = (mask.float() if mask.is_floating_point() else mask).cpu().numpy()
    return array
