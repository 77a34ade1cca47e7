"""Long-context language models on CPUs, reading only the part of the KV cache a query needs.

The public names are loaded when they are first used, so that importing the package is quick
and does nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvsieve.version import __version__

if TYPE_CHECKING:
    from kvsieve.attention.block_mask import BlockMask
    from kvsieve.attention.config import SparseAttention
    from kvsieve.attention.selection import attend, select_blocks
    from kvsieve.engine.llm import LLM
    from kvsieve.engine.sampling import SamplingParams

__all__ = [
    "LLM",
    "BlockMask",
    "SamplingParams",
    "SparseAttention",
    "__version__",
    "attend",
    "select_blocks",
]

_HOMES = {
    "LLM": "kvsieve.engine.llm",
    "SamplingParams": "kvsieve.engine.sampling",
    "SparseAttention": "kvsieve.attention.config",
    "BlockMask": "kvsieve.attention.block_mask",
    "attend": "kvsieve.attention.selection",
    "select_blocks": "kvsieve.attention.selection",
}


def __getattr__(name: str) -> Any:
    if name == "transformers":  # a module; its own packages are imported with it and not before
        return import_module("kvsieve.transformers")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvsieve' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
