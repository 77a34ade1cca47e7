"""Any decoder of Hugging Face Transformers on kvsieve's attention and cache.

Importing this registers the attention ``kvsieve`` with Transformers, which is how a model is
loaded with ``attn_implementation="kvsieve"``; `sparse` and `exact` change a loaded model for a
while. See docs/transformers.md.
"""

from importlib import import_module

from kvsieve.errors import MissingPackageError

OLDEST = (5, 4)
"""The first release of Transformers that the tests have run with."""

try:
    for _package in ("torch", "transformers"):
        _version = import_module(_package).__version__
except ImportError as error:
    raise MissingPackageError(
        "[kvsieve.transformers] torch, transformers: expected both to be installed "
        f"(pip install 'kvsieve[transformers]'), got {error}"
    ) from error
if tuple(map(int, _version.split(".")[:2])) < OLDEST:
    raise MissingPackageError(
        f"[kvsieve.transformers] transformers: expected {OLDEST[0]}.{OLDEST[1]} or newer "
        f"(pip install 'kvsieve[transformers]'), got {_version}"
    )

from kvsieve.integrations.paged.recorder import HostReport, ReadBlocks
from kvsieve.integrations.transformers.attention import register
from kvsieve.integrations.transformers.cache import KVSieveCache
from kvsieve.integrations.transformers.runs import Run, exact, sparse

__all__ = ["HostReport", "KVSieveCache", "ReadBlocks", "Run", "exact", "register", "sparse"]

register()
