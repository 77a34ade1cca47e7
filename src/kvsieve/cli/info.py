"""``kvsieve info``: what a model is, what its cache costs, and what it would run on."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import forced_isa
from kvsieve.cli.options import ModelOptions, option
from kvsieve.errors import ConfigError
from kvsieve.kernels.layout import LANES, IndexLayout, PageLayout, VectorRule, summary_layout
from kvsieve.types import BLOCK_SIZE
from kvsieve.version import __version__

if TYPE_CHECKING:
    from kvsieve.kernels.backend import Backend
    from kvsieve.kernels.backends import BackendName
    from kvsieve.models.config import ModelConfig
    from kvsieve.models.model_file import ModelFile

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """How the facts are printed."""

    as_json: Annotated[
        bool, option("--json", panel="Output", help="Print one JSON object instead of lines.")
    ] = False


@grouped
def info(output: InfoOptions, model: ModelOptions) -> None:
    """Show a model, what its cache takes per token, and what it would run on.

    The file is looked at, not loaded. KVSIEVE_ISA=NAME forces an instruction
    set; here you see which one is used and why.

    \b
    Examples:
      kvsieve info
      kvsieve info -m model.gguf -ctk q8_0 -ctv q4_0
      KVSIEVE_ISA=avx2 kvsieve info --json
    """
    from kvsieve.engine.memory import available_memory, weights_bytes
    from kvsieve.engine.model_loader import resolve_model
    from kvsieve.kernels.backends import make_backend
    from kvsieve.models.model_file import open_model_file, read_config

    isa = forced_isa(model)
    backend = make_backend(cast("BackendName", model.backend), threads=model.threads, isa=isa)
    file = open_model_file(resolve_model(model.source, offline=model.offline))
    try:
        config = read_config(file)
        cache = cache_facts(config, model)
        facts = {
            "model": model_facts(file, config),
            "cache": cache,
            "machine": machine_facts(backend, forced=isa),
            "memory": {
                "weights_bytes": weights_bytes(file.tensors, config, model.weight_mode),
                "cache_bytes": cache["bytes_per_token"] * cache["ctx_size"],
                "available_bytes": available_memory(),
            },
        }
    finally:
        file.close()
    print(json.dumps(facts, ensure_ascii=False, indent=2) if output.as_json else as_lines(facts))


def model_facts(file: "ModelFile", config: "ModelConfig") -> Facts:
    """What the file says about its model."""
    from kvsieve.engine.no_vocabulary import chat_template_of
    from kvsieve.models.model_file import notes

    types = Counter(tensor.ggml_type for tensor in file.tensors.values())
    return {
        "name": config.name,
        "file": str(file.path),
        "size_bytes": file.file_bytes,
        "architecture": config.architecture,
        "layers": config.num_layers,
        "sparse_layers": layer_ranges(config.full_layers),
        "window": max(config.windows) or "none",
        "hidden_size": config.hidden_size,
        "query_heads": config.num_q_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "context_length": config.context_length,
        "vocabulary": config.vocab_size,
        "tokenizer": tokenizer_fact(file),
        "tensors": dict(types.most_common()),
        "output_matrix": "the embedding's" if config.tie_embeddings else "its own",
        "chat_template": chat_template_of(file) is not None,
        "notes": "; ".join(notes(file)) or "none",
    }


def layer_ranges(layers: Sequence[int]) -> str:
    """``0-3, 5`` for layers 0, 1, 2, 3 and 5."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    ranges = zip(starts, ends, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges) or "none"


def tokenizer_fact(file: "ModelFile") -> str:
    """Kind of the vocabulary and its rule for cutting text, as the file names them."""
    from kvsieve.engine.folder_tokenizer import has_tokenizer
    from kvsieve.engine.vocabulary import has_vocabulary
    from kvsieve.models.checkpoint import Checkpoint

    if isinstance(file, Checkpoint):
        return "tokenizer.json" if has_tokenizer(file.path) else "none: prompts are token ids"
    metadata = file.metadata
    if not has_vocabulary(metadata):
        return "none (no_vocab): prompts are token ids"
    keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    return " ".join(str(metadata[key]) for key in keys if key in metadata) or "none"


def cache_facts(config: "ModelConfig", options: ModelOptions) -> Facts:
    """Bytes per token of the cache, and of what sparse attention keeps beside it."""
    if options.ctx_size > config.context_length:
        raise ConfigError(
            f"-c/--ctx-size: expected at most {config.context_length} tokens, the context length "
            f"of {config.name}, got {options.ctx_size}"
        )
    k_type, v_type = options.cache_types
    pages = config.num_layers * config.num_kv_heads
    layout = PageLayout(k_type=k_type, v_type=v_type, head_dim=config.head_dim)
    sparse = SparseAttention()
    strided = IndexLayout(
        head_dim=config.head_dim, block_size=sparse.block_size, num_probes=sparse.num_probes
    )
    summaries = {
        name: summary_layout(name, head_dim=config.head_dim)
        for name in ("anchors", *get_args(VectorRule))
    }
    per_token = LANES * BLOCK_SIZE
    return {
        "key_type": k_type,
        "value_type": v_type,
        "ctx_size": options.ctx_size or config.context_length,
        "bytes_per_token": pages * layout.page_bytes // BLOCK_SIZE,
        **{
            f"{name}_index_bytes_per_token": pages * summary.record_bytes // per_token
            for name, summary in summaries.items()
            if summary is not None
        },
        "even_index_bytes_per_token": pages * strided.record_bytes // per_token
        if k_type == "q8_0"
        else 0,
        "importance_bytes_per_token": 8 * config.num_layers,
    }


def machine_facts(backend: "Backend", *, forced: str | None) -> Facts:
    """What computes, and why it was chosen."""
    if backend.name == "reference":
        why = "NumPy, whatever the machine has"
    elif forced is not None:
        why = "KVSIEVE_ISA asks for it"
    else:
        why = "the best that this build and this machine have"
    facts: Facts = {
        "version": __version__,
        "backend": backend.name,
        "isa": backend.isa,
        "isa_because": why,
        "threads": backend.threads,
    }
    describe = getattr(backend, "describe", None)
    if describe is not None:
        facts["instruction_sets"] = describe()
    return facts


def as_lines(facts: Facts) -> str:
    """The facts as aligned lines under headings, bytes in the unit that reads best."""
    lines: list[str] = []
    for heading, section in facts.items():
        lines.append(heading)
        for name, value in section.items():
            label, shown = name.replace("_", " "), _shown(value)
            if name.endswith("_bytes") or "_bytes_" in name:
                label, shown = label.replace(" bytes", ""), _size(value)
            lines.append(f"  {label:<22} {shown}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 20:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / 2**20:,.0f} MiB"
