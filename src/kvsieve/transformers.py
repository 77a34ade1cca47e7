"""Hugging Face Transformers on kvsieve: ``pip install 'kvsieve[transformers]'``.

The public name of `kvsieve.integrations.transformers`.
"""

from kvsieve.integrations.transformers import (
    HostReport,
    KVSieveCache,
    ReadBlocks,
    Run,
    exact,
    register,
    sparse,
)

__all__ = ["HostReport", "KVSieveCache", "ReadBlocks", "Run", "exact", "register", "sparse"]
