"""Any decoder of Hugging Face Transformers on kvsieve's attention and cache.

Importing this registers the attention ``kvsieve`` with Transformers, which is how a model is
loaded with ``attn_implementation="kvsieve"``; `sparse` and `exact` change a loaded model for a
while. See docs/transformers.md.
"""

from importlib import import_module

from kvsieve.errors import MissingPackageError

try:
    for _package in ("torch", "transformers"):
        _version = import_module(_package).__version__
    if tuple(map(int, _version.split(".")[:2])) < (5, 4):  # the oldest that the tests ran with
        raise ImportError(f"transformers {_version}")
except ImportError as error:
    raise MissingPackageError(
        "[kvsieve.transformers] packages: expected torch and transformers 5.4 or newer "
        f"(pip install 'kvsieve[transformers]'), got {error}"
    ) from error

from kvsieve.integrations.paged.recorder import HostReport, ReadBlocks
from kvsieve.integrations.transformers.attention import register
from kvsieve.integrations.transformers.cache import KVSieveCache
from kvsieve.integrations.transformers.runs import Run, exact, sparse

__all__ = ["HostReport", "KVSieveCache", "ReadBlocks", "Run", "exact", "register", "sparse"]

register()
