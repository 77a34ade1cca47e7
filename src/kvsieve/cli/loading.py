"""From options to a loaded model. The only place that reads the environment for the engine."""

import os
from typing import TYPE_CHECKING, cast

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.options import ModelOptions
from kvsieve.cli.progress import StatusBar

if TYPE_CHECKING:
    from kvsieve.engine.generation import Progress
    from kvsieve.engine.llm import LLM
    from kvsieve.kernels.backends import BackendName


def forced_isa(options: ModelOptions) -> str | None:
    """The instruction set that KVSIEVE_ISA asks for; it concerns the native backend alone."""
    return (os.environ.get("KVSIEVE_ISA") or None) if options.backend == "native" else None


def open_model(
    options: ModelOptions,
    *,
    bar: StatusBar,
    sparse: SparseAttention | None = None,
    on_load: "Progress | None" = None,
) -> "LLM":
    """Load the model that the options name; `sparse` is how its memory is counted.

    `on_load` is called as the bar is; what it raises ends the loading.
    """
    from kvsieve.engine.llm import LLM

    def advance(done: int, total: int) -> None:
        bar.advance(done, total)
        if on_load is not None:
            on_load(done, total)

    bar.begin(f"loading {options.source}")
    return LLM(
        options.source,
        weights=options.weight_mode,
        offline=options.offline,
        on_load=advance,
        sparse=sparse,
        cache_type=options.cache_types,
        threads=options.threads,
        ctx_size=options.ctx_size or None,
        backend=cast("BackendName", options.backend),
        isa=forced_isa(options),
    )
