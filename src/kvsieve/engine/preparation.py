"""From what a caller gives to a sequence: everything is checked before anything is allocated."""

from collections.abc import Sequence as Items

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache
from kvsieve.engine.model_loader import LoadedModel
from kvsieve.engine.no_vocabulary import NoVocabulary
from kvsieve.engine.plan import can_be_sparse, selector_index
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.sequence import Sequence
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.types import I32


class Preparation:
    """Checks prompts and parameters against one loaded model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def prompt_ids(self, prompt: str | Items[int]) -> I32:
        """Ids of text or of ids, i32; BOS for an empty prompt.

        CapacityError: longer than the context. ConfigError: neither text nor ids of the
        vocabulary, or empty for a model without BOS.
        """
        tokenizer, ctx_size = self._loaded.tokenizer, self._loaded.ctx_size
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(ids, (Items, np.ndarray)):
            raise ConfigError(f"[LLM] prompt: expected text or a list of token ids, got {ids!r}")
        if len(ids) == 0:
            if tokenizer.bos_id is None:
                raise ConfigError(
                    "[LLM] prompt: expected at least one token, got none, and "
                    f"{self._loaded.config.name} has no BOS token to start from"
                )
            ids = [tokenizer.bos_id]
        if len(ids) > ctx_size:
            raise CapacityError(
                f"[LLM] prompt: expected at most {ctx_size} tokens (ctx_size), got {len(ids)}"
            )
        return _checked_ids(ids, self._loaded.config.vocab_size)

    def checked_params(self, params: SamplingParams | None) -> SamplingParams:
        """The parameters, or the usual ones. ConfigError if this model cannot follow them."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"[LLM] params: expected SamplingParams, got {params!r}")
        tokenizer = self._loaded.tokenizer
        if isinstance(tokenizer, NoVocabulary):
            for name, value in (("stop", params.stop), ("constraint", params.constraint)):
                if value:
                    raise tokenizer.error(name, got=repr(value))
        params.check_vocabulary(self._loaded.config.vocab_size)
        return params

    def sequence_for(
        self,
        ids: I32,
        params: SamplingParams,
        *,
        sparse: SparseAttention | None,
        pool: BlockPool,
    ) -> tuple[Sequence, int]:
        """A sequence with room for the reply, and how many tokens the reply may have."""
        # The last token generated is never read back, so it needs no place in the context.
        room = self._loaded.ctx_size - len(ids) + 1
        max_new_tokens = min(params.max_tokens, room)
        max_tokens = len(ids) + max(0, max_new_tokens - 1)
        sequence = self.sequence(ids, sparse=sparse, max_tokens=max_tokens, pool=pool)
        sequence.scores_prompt = params.prompt_logprobs is not None
        return sequence, max_new_tokens

    def sequence(
        self, ids: I32, *, sparse: SparseAttention | None, max_tokens: int, pool: BlockPool
    ) -> Sequence:
        """A sequence of at most `max_tokens` tokens that owns no page yet."""
        _check_layers(sparse, num_layers=self._loaded.config.num_layers)
        index_layout = None
        keeps_importance = False
        if sparse is not None and can_be_sparse(sparse, max_tokens=max_tokens):
            keeps_importance = sparse.uses_importance
            index_layout = selector_index(sparse, pool.layout)
        cache = KVCache(
            pool,
            max_tokens=max_tokens,
            index_layout=index_layout,
            keeps_importance=keeps_importance,
        )
        return Sequence(
            prompt_ids=ids,
            cache=cache,
            sparse=sparse,
            full_layers=self._loaded.config.full_layers,
        )


def checked_sparse(sparse: SparseAttention | None) -> SparseAttention | None:
    """`sparse` as it came; ConfigError for anything else than its type or None."""
    if sparse is None or isinstance(sparse, SparseAttention):
        return sparse
    raise ConfigError(f"[LLM] sparse: expected SparseAttention or None (exact), got {sparse!r}")


def _check_layers(sparse: SparseAttention | None, *, num_layers: int) -> None:
    wrong = [layer for layer in (sparse.layers if sparse else ()) if layer >= num_layers]
    if wrong:
        name = "exact_layers" if sparse and wrong[0] in sparse.exact_layers else "layer_k"
        raise ConfigError(
            f"[LLM] sparse.{name}: expected layers from 0 to {num_layers - 1}, got {wrong[0]}"
        )


def _checked_ids(ids: Items[int], vocab_size: int) -> I32:
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            "[LLM] prompt: expected text or a list of token ids, "
            f"got {array.dtype} of shape {array.shape}"
        )
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        raise ConfigError(
            f"[LLM] prompt: expected token ids from 0 to {vocab_size - 1}, got {array[wrong][0]}"
        )
    return array.astype(np.int32)
