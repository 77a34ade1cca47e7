"""`sparse` and `exact`: a model's attention and cache taken over for a while."""

import inspect
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError
from kvsieve.integrations.paged.host import AttentionHost, make_host, sparse_settings
from kvsieve.integrations.paged.recorder import HostReport, ReadBlocks
from kvsieve.integrations.transformers.attention import HOST_ATTRIBUTE, NAME
from kvsieve.integrations.transformers.cache import KVSieveCache
from kvsieve.kernels.backends import BackendName
from kvsieve.types import CacheType

_CACHE_NAMES = ("cache", "past_key_values")
"""What releases of Transformers call the cache, newest first."""


def sparse(
    model: PreTrainedModel,
    settings: SparseAttention | None = None,
    *,
    cache_type: CacheType | tuple[CacheType, CacheType] = "q8_0",
    backend: BackendName = "native",
    threads: int | None = None,
    keep_masks: bool = False,
    **fields: Any,
) -> "Run":
    """Let `model` read only the best blocks: ``with sparse(model, k=32) as run: ...``.

    Inside, `model.generate` and calls of the model use kvsieve's attention and cache, unless
    they are given another cache. At the end the model is as it was.

    settings, fields  a `SparseAttention`, or its fields (``k=32, selector="even"``)
    cache_type        of keys and values, or a pair (keys, values)
    threads           None: one per fast core that this process may use
    keep_masks        keep what every query read in `Run.masks`

    Raises
    ------
    ConfigError
        An option out of range or unknown, a model that is no decoder or has no replaceable
        attention, or a head size that no page holds.
    """
    host = make_host(
        sparse=sparse_settings(settings, fields),
        cache_type=cache_type,
        backend=backend,
        threads=threads,
        keep_masks=keep_masks,
    )
    return Run(model, host)


def exact(
    model: PreTrainedModel,
    *,
    cache_type: CacheType | tuple[CacheType, CacheType] = "q8_0",
    backend: BackendName = "native",
    threads: int | None = None,
    keep_masks: bool = False,
) -> "Run":
    """The same with everything read: what a sparse run is compared with. See `sparse`."""
    host = make_host(
        sparse=None,
        cache_type=cache_type,
        backend=backend,
        threads=threads,
        keep_masks=keep_masks,
    )
    return Run(model, host)


class Run:
    """A model while kvsieve serves its attention. Counts go on over several ``with`` blocks."""

    def __init__(self, model: PreTrainedModel, host: AttentionHost) -> None:
        _check_model(model)
        self.model = model
        self.host = host
        self._undo: list[Callable[[], object]] = []
        self.new_cache()  # refuses now what no cache of this model could hold

    def new_cache(self, prompt_len: int | None = None) -> KVSieveCache:
        """An empty cache with the settings of this run, counted with it."""
        return KVSieveCache(self.model.config, host=self.host, prompt_len=prompt_len)

    def report(self) -> HostReport:
        """What attention read so far: mode, density, blocks, and why it was exact if it was."""
        return self.host.recorder.report()

    @property
    def masks(self) -> list[ReadBlocks]:
        """What every query read, in the order it ran; empty without ``keep_masks``."""
        return self.host.recorder.masks

    # -- taking over, and giving back -----------------------------------------------------------
    def __enter__(self) -> "Run":
        if self._undo:
            raise ConfigError("[kvsieve.transformers] run: expected one that has ended, got itself")
        try:
            self._take_attention()
            self._take_forward()
            self._take_generate()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _take_attention(self) -> None:
        """Only the decoder's: a vision tower keeps the attention it has."""
        decoder = self.model.config.get_text_config(decoder=True)
        before = decoder._attn_implementation
        name = next(
            (n for n in self.model.config.sub_configs if getattr(self.model.config, n) is decoder),
            None,
        )

        def give(implementation: str) -> None:
            self.model.set_attn_implementation(
                implementation if name is None else {name: implementation}
            )

        self._undo.append(lambda: give(before))
        give(NAME)
        if decoder._attn_implementation != NAME:
            raise ConfigError(
                f"[kvsieve.transformers] model: expected one whose attention Transformers can "
                f"replace, got {type(self.model).__name__}, which keeps "
                f"{decoder._attn_implementation!r}"
            )
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                self._undo.append(_setting(module, HOST_ATTRIBUTE, self.host))

    def _take_forward(self) -> None:
        """A call of the model that would make a cache gets one of ours."""
        signature = inspect.signature(self.model.forward)
        name = next((n for n in _CACHE_NAMES if n in signature.parameters), None)
        if name is None:
            raise ConfigError(
                f"[kvsieve.transformers] model: expected a forward that takes a cache, got "
                f"{type(self.model).__name__}"
            )

        def with_cache(
            _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = {**signature.bind_partial(*args).arguments, **kwargs}
            use_cache = given.get("use_cache")
            if use_cache is None:
                use_cache = getattr(self.model.config.get_text_config(), "use_cache", True)
            if use_cache and all(given.get(n) is None for n in _CACHE_NAMES):
                kwargs[name] = self.new_cache()
            return args, kwargs

        # Before the hook of a run around this one, which would give it a cache of its own.
        hook = self.model.register_forward_pre_hook(with_cache, with_kwargs=True, prepend=True)
        self._undo.append(hook.remove)

    def _take_generate(self) -> None:
        """`generate` makes its cache before it calls the model: give it one of ours."""
        generate = getattr(self.model, "generate", None)
        if generate is None:
            return

        def with_cache(*args: Any, **kwargs: Any) -> Any:
            cache = next((kwargs[n] for n in _CACHE_NAMES if kwargs.get(n) is not None), None)
            past = 0 if cache is None else int(cache.get_seq_length())
            prompt_len = _prompt_positions(args, kwargs, past=past)
            if cache is None and self._wants_cache(args, kwargs):
                for name in _CACHE_NAMES:
                    kwargs.pop(name, None)
                name = next(
                    n for n in _CACHE_NAMES if n in inspect.signature(self.model.forward).parameters
                )
                kwargs[name] = self.new_cache(prompt_len)
            elif isinstance(cache, KVSieveCache):
                cache.prompt_len = prompt_len
            return generate(*args, **kwargs)

        self._undo.append(_setting(self.model, "generate", with_cache))

    def _wants_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = config or self.model.generation_config
        for name in ("use_cache", "cache_implementation"):
            value = kwargs.get(name, getattr(config, name, None))
            if value is False or (name == "cache_implementation" and value is not None):
                return False
        return True


def _setting(module: torch.nn.Module, name: str, value: Any) -> Callable[[], object]:
    """Set an attribute of this very object; gives what puts back the one it had, or none."""
    own = module.__dict__
    undo = partial(own.__setitem__, name, own[name]) if name in own else partial(own.pop, name)
    own[name] = value
    return undo


def _prompt_positions(args: tuple[Any, ...], kwargs: dict[str, Any], *, past: int) -> int | None:
    """Positions that `generate` starts from, the `past` ones in a given cache included."""
    names = ("attention_mask", "input_ids", "inputs", "inputs_embeds")
    given = [args[0]] if args else []
    given += [kwargs[name] for name in names if kwargs.get(name) is not None]
    lengths = [int(tensor.shape[1]) for tensor in given if tensor is not None and tensor.ndim > 1]
    longest = max(lengths, default=None)
    # `generate` also takes new tokens alone, without the ones that the cache holds.
    return longest if longest is None or longest > past else past + longest


def _check_model(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"[kvsieve.transformers] model: expected a Transformers model, "
            f"got {type(model).__name__}"
        )
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"[kvsieve.transformers] model: expected a decoder, got {type(model).__name__}, which "
            "has an encoder"
        )
