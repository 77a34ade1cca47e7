"""Any decoder of Hugging Face Transformers on kvsieve's attention and cache.

Importing this registers the attention ``kvsieve`` with Transformers, which is how a model is
loaded with ``attn_implementation="kvsieve"``; `sparse` and `exact` change a loaded model for a
while. See docs/transformers.md.
"""

from importlib import import_module

from kvsieve.errors import MissingPackageError

try:
    for _package in ("torch", "transformers"):
        import_module(_package)
except ImportError as error:
    raise MissingPackageError(
        "[kvsieve.transformers] torch, transformers: expected both to be installed "
        f"(pip install 'kvsieve[transformers]'), got {error}"
    ) from error

from kvsieve.integrations.paged.recorder import HostReport, ReadBlocks
from kvsieve.integrations.transformers.attention import register
from kvsieve.integrations.transformers.cache import KVSieveCache
from kvsieve.integrations.transformers.runs import Run, exact, sparse

__all__ = ["HostReport", "KVSieveCache", "ReadBlocks", "Run", "exact", "register", "sparse"]

register()
