"""The front door: a loaded model that turns prompts into completions."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from enum import Enum
from os import PathLike
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import blocks_for
from kvsieve.engine.chat_template import ChatTemplate, encode_messages
from kvsieve.engine.generation import Generation, Progress
from kvsieve.engine.model_loader import load_model, resolve_model
from kvsieve.engine.no_vocabulary import AnyTokenizer, NoVocabulary
from kvsieve.engine.outputs import Completion, EngineInfo, StreamEvent
from kvsieve.engine.preparation import Preparation, checked_sparse
from kvsieve.engine.reply import Engine
from kvsieve.engine.runner import Runner
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.scheduler import Scheduler
from kvsieve.engine.walk import Walk
from kvsieve.errors import CapacityError, ConfigError, TemplateError
from kvsieve.kernels.backends import BackendName, make_backend
from kvsieve.kernels.layout import PageLayout
from kvsieve.models.config import ModelConfig
from kvsieve.models.model_file import ModelFile
from kvsieve.models.weights import WeightMode
from kvsieve.types import CACHE_TYPES, F32, CacheType
from kvsieve.version import __version__


class Unset(Enum):
    """Type of `UNSET`: "as the LLM was made", where None already means exact attention."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
SparseChoice: TypeAlias = SparseAttention | Literal[Unset.UNSET] | None
CacheTypes: TypeAlias = CacheType | tuple[CacheType, CacheType]


class LLM:
    """A model in memory, its cache, and the loop that runs prompts through it.

    model          path of a GGUF file or of a folder in Transformers' layout (``config.json``,
                   safetensors), ``hf:user/repo[:file]`` from the Hugging Face Hub, or ``smollm2``
    sparse         None: exact attention; each call may ask for something else
    cache_type     of keys and values, or a pair (keys, values)
    threads        None: as many as this process may use
    ctx_size       tokens a prompt and its completion may have; None or 0: the model's own length
    backend        ``native``, or ``reference`` (NumPy: slow, and the specification)
    isa            None: the best instruction set this machine has
    weights        how matrices are packed: ``auto`` (4 bits where the file has them, else 8),
                   ``q4``, ``q8``, or ``f32`` (slow and large, for comparison)
    offline        of the Hub, only what is in the local cache
    on_load        called while weights are packed, with (tensors done, all of them)
    prefill_chunk  prompt tokens per step, rounded up to 32; it changes no result

    One call runs at a time; streams may be left unfinished or interleaved in one thread.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2",
        *,
        sparse: SparseAttention | None = None,
        cache_type: CacheTypes = "q8_0",
        threads: int | None = None,
        ctx_size: int | None = None,
        backend: BackendName = "native",
        isa: str | None = None,
        prefill_chunk: int = 512,
        weights: WeightMode = "auto",
        offline: bool = False,
        on_load: Progress | None = None,
    ) -> None:
        self.sparse = checked_sparse(sparse)
        scheduler = Scheduler(prefill_chunk=prefill_chunk)
        cache_types = _cache_types(cache_type)
        path = resolve_model(model, offline=offline)
        kernels = make_backend(backend, threads=threads, isa=isa)
        loaded = load_model(
            path,
            backend=kernels,
            cache_types=cache_types,
            ctx_size=ctx_size,
            prefill_chunk=scheduler.prefill_chunk,
            sparse=sparse,
            weights=weights,
            on_progress=on_load,
        )
        self._loaded = loaded
        self.preparation = Preparation(loaded)
        config = loaded.config
        self._pool = BlockPool(
            loaded.layout,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            num_blocks=blocks_for(loaded.ctx_size),
        )
        self.engine = Engine(
            scheduler=scheduler,
            runner=Runner(loaded.decoder),
            tokenizer=loaded.tokenizer,
            info=EngineInfo(
                model_name=config.name,
                fingerprint=loaded.decoder.fingerprint,
                isa=kernels.isa,
                threads=kernels.threads,
                version=__version__,
            ),
        )

    # -- what was loaded -----------------------------------------------------------------
    @property
    def tokenizer(self) -> AnyTokenizer:
        """Text to token ids and back; a `NoVocabulary` where the file has no texts."""
        return self._loaded.tokenizer

    @property
    def file(self) -> ModelFile:
        """The model file: its metadata, the list of its tensors."""
        return self._loaded.file

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""
        return self._loaded.config

    @property
    def chat_template(self) -> str | None:
        """The chat template that came with the model, if any."""
        return self._loaded.chat_template

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the file: parts of it that are left out."""
        return self._loaded.notes

    @property
    def ctx_size(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return self._loaded.ctx_size

    @property
    def info(self) -> EngineInfo:
        """Model, instruction set and threads, as every completion reports them."""
        return self.engine.info

    @property
    def cache_layout(self) -> PageLayout:
        """How a block of keys and values lies in memory."""
        return self._loaded.layout

    @property
    def cache_types(self) -> tuple[CacheType, CacheType]:
        """How keys and values are stored."""
        return self._loaded.layout.k_type, self._loaded.layout.v_type

    # -- what it does ----------------------------------------------------------------------
    def generate(
        self,
        prompt: str | Items[int],
        params: SamplingParams | None = None,
        *,
        sparse: SparseChoice = UNSET,
        on_progress: Progress | None = None,
        should_cancel: Callable[[], bool] | None = None,
    ) -> Completion:
        """Complete `prompt`, text or token ids; see `stream` for the arguments and errors."""
        events = self.stream(
            prompt,
            params,
            sparse=sparse,
            on_progress=on_progress,
            should_cancel=should_cancel,
        )
        *_, last = events
        if last.completion is None:
            raise RuntimeError("a stream ended without its completion")
        return last.completion

    def stream(
        self,
        prompt: str | Items[int],
        params: SamplingParams | None = None,
        *,
        sparse: SparseChoice = UNSET,
        on_progress: Progress | None = None,
        should_cancel: Callable[[], bool] | None = None,
    ) -> Iterator[StreamEvent]:
        """Complete `prompt` token by token; the last event carries the `Completion`.

        on_progress    called after each chunk of the prompt with (tokens read, all its tokens)
        should_cancel  asked between layers; True ends the stream with finish reason ``cancelled``

        Ctrl-C, or a stream that is dropped, gives its cache back; the LLM stays usable.
        Raises, before anything runs: CapacityError (the prompt is longer than the context),
        ConfigError (an empty prompt without a BOS token, an id that is not in the vocabulary, or
        text where the model file has no vocabulary).
        """
        preparation = self.preparation
        ids = preparation.prompt_ids(prompt)
        params = preparation.checked_params(params)
        sequence, max_new_tokens = preparation.sequence_for(
            ids, params, sparse=self._chosen(sparse), pool=self._pool
        )
        generation = Generation(
            sequence,
            params,
            engine=self.engine,
            max_new_tokens=max_new_tokens,
            on_progress=on_progress,
            should_cancel=should_cancel,
        )
        return generation.events()

    def logits(
        self,
        token_ids: Items[int],
        *,
        prompt_len: int | None = None,
        sparse: SparseChoice = UNSET,
    ) -> F32:
        """Next-token logits after each of `token_ids`, for evaluation.

        Tokens from position `prompt_len` on are decoded one by one, as if they had been generated;
        None: all are read as one prompt. In exact mode this changes no bit.

        Returns ``f32 [len(token_ids), vocab_size]``.
        """
        ids = self.preparation.prompt_ids(token_ids)
        prompt_len = len(ids) if prompt_len is None else prompt_len
        if not 1 <= prompt_len <= len(ids):
            raise ConfigError(
                f"[LLM.logits] prompt_len: expected 1 to {len(ids)} (tokens), got {prompt_len}"
            )
        logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        with self.walk(ids[:prompt_len].tolist(), max_tokens=len(ids), sparse=sparse) as walk:
            for first, rows in walk.prompt_logits(start=0):
                logits[first : first + len(rows)] = rows
            for position in range(prompt_len, len(ids)):
                logits[position] = walk.step(int(ids[position]))
        return logits

    def walk(
        self, prompt: str | Items[int], *, max_tokens: int, sparse: SparseChoice = UNSET
    ) -> Walk:
        """A sequence of at most `max_tokens` tokens that the caller leads, for evaluation."""
        ids = self.preparation.prompt_ids(prompt)
        if not len(ids) <= max_tokens <= self.ctx_size:
            raise CapacityError(
                f"[LLM.walk] max_tokens: expected {len(ids)} (the prompt) to {self.ctx_size} "
                f"(ctx_size), got {max_tokens}"
            )
        sequence = self.preparation.sequence(
            ids, sparse=self._chosen(sparse), max_tokens=max_tokens, pool=self._pool
        )
        return Walk(sequence, engine=self.engine)

    def chat_prompt(self, messages: Items[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in the model's own template, ready to be answered."""
        source = self._loaded.chat_template
        if source is None:
            raise TemplateError(
                f"[LLM.chat_prompt] model: expected a chat template, got none in {self.config.name}"
            )
        tokenizer = self.tokenizer
        if isinstance(tokenizer, NoVocabulary):
            raise tokenizer.error("messages", got="a conversation")
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        template = ChatTemplate(
            source,
            bos_token="" if bos is None else tokenizer.token_text(bos),
            eos_token="" if eos is None else tokenizer.token_text(eos),
        )
        return encode_messages(tokenizer, template, messages)

    def close(self) -> None:
        """Give the memory back; the LLM is of no use afterwards."""
        self._loaded.file.close()

    def _chosen(self, choice: SparseChoice) -> SparseAttention | None:
        return self.sparse if choice is UNSET else checked_sparse(choice)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cache_types(cache_type: CacheTypes) -> tuple[CacheType, CacheType]:
    pair = cache_type if isinstance(cache_type, (tuple, list)) else (cache_type, cache_type)
    if len(pair) != 2 or any(one not in CACHE_TYPES for one in pair):
        raise ConfigError(
            f"[LLM] cache_type: expected one of {', '.join(CACHE_TYPES)}, or a pair "
            f"(keys, values) of them, got {cache_type!r}"
        )
    return pair[0], pair[1]
