"""`KVSieveCache`: our pages behind the `Cache` interface of Transformers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError, ShapeError
from kvsieve.integrations.paged.batch import BatchLayer
from kvsieve.integrations.paged.host import AttentionHost, make_host
from kvsieve.integrations.paged.padding import read_mask
from kvsieve.integrations.paged.recorder import HostReport, ReadBlocks
from kvsieve.kernels.backends import BackendName
from kvsieve.types import F32, AnyArray, CacheType


class KVSieveCache(Cache):
    """Keys and values in pages of 32 tokens, read by kvsieve's attention and nothing else.

    For a model with ``attn_implementation="kvsieve"``; `sparse` and `exact` make caches by
    themselves. Layers with a sliding window keep Transformers' own tensors: they read their
    window exactly.

    config      of the model
    sparse      None: exact attention
    cache_type  of keys and values, or a pair (keys, values)
    threads     None: one per fast core that this process may use
    prompt_len  positions of the prompt, padding included, where it comes in pieces or is followed
                by several tokens at once (assisted decoding). None: whatever comes together is a
                whole prompt, and a single token is decoded
    keep_masks  keep what every query read in `masks`
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        sparse: SparseAttention | None = None,
        cache_type: CacheType | tuple[CacheType, CacheType] = "q8_0",
        backend: BackendName = "native",
        threads: int | None = None,
        prompt_len: int | None = None,
        keep_masks: bool = False,
        host: AttentionHost | None = None,
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise ConfigError(
                f"[KVSieveCache] config: expected a model's config, got {type(config).__name__}"
            )
        self.host = host or make_host(
            sparse=sparse,
            cache_type=cache_type,
            backend=backend,
            threads=threads,
            keep_masks=keep_masks,
        )
        layers = [
            self._layer(index, layer)
            for index, layer in enumerate(DynamicCache(config=config).layers)
        ]
        super().__init__(layers=layers)
        if self.paged:
            head_dim = _head_dim(config.get_text_config(decoder=True))
            if head_dim is not None:
                self.host.settings.layout(head_dim)  # refuses now what no page holds
        self.prompt_len = prompt_len

    def _layer(self, index: int, layer: CacheLayerMixin) -> CacheLayerMixin:
        if type(layer) is DynamicLayer:
            return PagedLayer(self.host, index)
        window = getattr(layer, "sliding_window", None)
        kind = f"a window of {window} tokens" if window else type(layer).__name__
        self.host.recorder.host_layer(index, f"{kind}, kept and read by Transformers")
        return layer

    @property
    def paged(self) -> "list[PagedLayer]":
        """The layers that are ours."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def prompt_len(self) -> int | None:
        """Positions of the prompt, padding included, where known."""
        return self._prompt_len

    @prompt_len.setter
    def prompt_len(self, prompt_len: int | None) -> None:
        if prompt_len is not None and (type(prompt_len) is not int or prompt_len < 1):
            raise ConfigError(
                f"[KVSieveCache] prompt_len: expected at least 1 or None, got {prompt_len!r}"
            )
        self._prompt_len = prompt_len
        for layer in self.paged:
            layer.prompt_len = prompt_len

    @property
    def num_bytes(self) -> int:
        """Memory of the pages in use, all layers together."""
        return sum(layer.num_bytes for layer in self.paged)

    @property
    def masks(self) -> list[ReadBlocks]:
        """What every query read, in the order it ran; empty without ``keep_masks``."""
        return self.host.recorder.masks

    def report(self) -> HostReport:
        """What attention read so far: mode, density, blocks, and why it was exact if it was."""
        return self.host.recorder.report()


@dataclass(kw_only=True)
class NewRows:
    """Keys and values on their way from `PagedLayer.update` to the attention function."""

    layer: "PagedLayer"
    num_rows: int
    q_len: int
    states: tuple[torch.Tensor, torch.Tensor] | None
    """None once they are in pages: a long prompt's would stay until the next step."""


class PagedLayer(CacheLayerMixin):
    """One layer of a `KVSieveCache`.

    `update` learns of new keys before anyone says which are padding, so it hands them on: what
    it returns has the shape of all keys and no numbers, and only kvsieve's attention can open it.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, host: AttentionHost, index: int) -> None:
        super().__init__()
        self.host = host
        self.index = index
        self.prompt_len: int | None = None
        self._num_positions = 0
        self._batch: BatchLayer | None = None
        self._pending: NewRows | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the pages in use."""
        return 0 if self._batch is None else self._batch.rows.num_bytes

    # -- as Transformers calls it --------------------------------------------------------------
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _check_states(self.index, key_states, value_states)
        num_rows, num_kv_heads, _, head_dim = key_states.shape
        self._batch = BatchLayer(
            self.host,
            layer=self.index,
            num_rows=num_rows,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        self.batch_size = num_rows
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_settled()
        _check_states(self.index, key_states, value_states)
        if self._batch is None:
            self.lazy_initialization(key_states, value_states)
        num_rows, num_kv_heads, q_len, head_dim = key_states.shape
        rows = self._opened.rows
        expected = (rows.num_rows, rows.num_kv_heads, rows.layout.head_dim)
        if (num_rows, num_kv_heads, head_dim) != expected:
            raise ShapeError(
                f"[KVSieveCache] layer {self.index}: expected (rows, KV heads, head_dim) = "
                f"{expected}, got {(num_rows, num_kv_heads, head_dim)}"
            )
        self._num_positions += q_len
        new = NewRows(layer=self, num_rows=num_rows, q_len=q_len, states=(key_states, value_states))
        self._pending = new
        shape = (num_rows, num_kv_heads, self._num_positions, head_dim)
        return _closed(new, shape, key_states.dtype), _closed(new, shape, value_states.dtype)

    def get_seq_length(self) -> int:
        return self._num_positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_positions + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name that releases before 5.2 ask by."""
        return -1

    def offload(self) -> None:
        """Pages are in main memory already."""

    def prefetch(self) -> None:
        """Pages are in main memory already."""

    def reset(self) -> None:
        self._num_positions = 0
        self._batch = None
        self._pending = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions; a positive number is what to keep."""
        self._check_settled()
        keep = tokens_to_remove if tokens_to_remove > 0 else self._num_positions + tokens_to_remove
        if self._batch is None or keep >= self._num_positions:
            return
        self._num_positions = max(0, keep)
        self._batch.truncate(self._num_positions)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._batch is not None:
            self._pick(np.repeat(np.arange(self._batch.rows.num_rows), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._batch is not None:
            self._pick(np.arange(self._batch.rows.num_rows)[np.asarray(indices.cpu())])

    def _pick(self, rows: AnyArray) -> None:
        self._check_settled()
        self._opened.pick(rows.tolist())
        self.batch_size = len(rows)

    # -- as our attention calls it ---------------------------------------------------------------
    def attend(self, new: NewRows, q: F32, mask: AnyArray | None, *, scale: float) -> F32:
        """Write `new` unless that was done, and read: q f32 ``[B, T, Hq, D]``, same shape out.

        Layers that share one layer's keys read them again under their own queries.
        """
        batch, q_len, states = self._opened, new.q_len, new.states
        if q.shape[:2] != (new.num_rows, q_len):
            raise ShapeError(
                f"[kvsieve attention] query: expected {new.num_rows} rows of {q_len} tokens as "
                f"the keys have, got {q.shape[:2]}"
            )
        past = batch.real[:, : self._num_positions - q_len]
        masks = read_mask(mask, past=past, q_len=q_len)
        if states is not None:
            batch.append(as_rows(states[0]), as_rows(states[1]), masks)
            new.states = None
        record = states is not None  # of several readers one adds to the importance
        return batch.attend(q, masks, prompt_len=self.prompt_len, scale=scale, record=record)

    @property
    def _opened(self) -> BatchLayer:
        if self._batch is None:
            raise ConfigError(f"[KVSieveCache] layer {self.index}: expected keys, got none yet")
        return self._batch

    def _check_settled(self) -> None:
        if self._pending is not None and self._pending.states is not None:
            raise ConfigError(
                f"[KVSieveCache] layer {self.index}: expected kvsieve's attention to read the "
                "last step's keys, which it never did: use attn_implementation='kvsieve', and a "
                "new cache after a step that failed"
            )


class ClosedStates(torch.Tensor):
    """Keys or values that are in pages: the shape of them all, and no numbers.

    Any computation with it is an error, so that no other attention reads it by mistake.
    """

    new: NewRows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let shape, dtype and the like be asked for, and refuse the rest."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "size", "dim", "numel", "stride", "element_size", "__len__"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ConfigError(
            f"[KVSieveCache] attention: expected attn_implementation='kvsieve', got {name} on "
            "keys or values that only kvsieve's attention can read"
        )


def as_rows(states: torch.Tensor) -> F32:
    """States ``[B, H, T, D]`` of any float type as the kernels take them, f32 ``[B, T, H, D]``."""
    moved = states.detach().permute(0, 2, 1, 3).to(torch.float32).contiguous()
    array: F32 = moved.numpy()
    return array


def _closed(new: NewRows, shape: tuple[int, ...], dtype: torch.dtype) -> ClosedStates:
    states: ClosedStates
    states = torch.empty(shape, dtype=dtype, device="meta").as_subclass(ClosedStates)
    states.new = new
    return states


def _check_states(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    for name, states in (("keys", keys), ("values", values)):
        if states.device.type != "cpu":
            raise ConfigError(
                f"[KVSieveCache] layer {layer}: expected {name} on the CPU, got {states.device}"
            )
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ShapeError(
            f"[KVSieveCache] layer {layer}: expected keys and values of one shape (rows, heads, "
            f"tokens, head_dim), got {tuple(keys.shape)} and {tuple(values.shape)}"
        )


def _head_dim(config: PretrainedConfig) -> int | None:
    given = getattr(config, "head_dim", None)
    if given is not None:
        return int(given)
    hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return hidden // heads if hidden and heads else None
