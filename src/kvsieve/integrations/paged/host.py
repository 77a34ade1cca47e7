"""What all caches of one run share: how to attend, on which kernels, and the counts."""

from dataclasses import dataclass
from typing import Any

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError
from kvsieve.integrations.paged.layer_rows import HostSettings
from kvsieve.integrations.paged.recorder import Recorder
from kvsieve.kernels.backends import BackendName, make_backend
from kvsieve.types import CACHE_TYPES, CacheType


@dataclass(frozen=True, kw_only=True)
class AttentionHost:
    """Settings, and where what ran is counted."""

    settings: HostSettings
    recorder: Recorder

    def __deepcopy__(self, _: dict[int, Any]) -> "AttentionHost":
        """Itself: the copy of a cache (a way to reuse a prompt) runs on the same kernels."""
        return self


def make_host(
    *,
    sparse: SparseAttention | None,
    cache_type: CacheType | tuple[CacheType, CacheType],
    backend: BackendName,
    threads: int | None,
    keep_masks: bool,
) -> AttentionHost:
    """Check what a user asked for, and start the kernels."""
    if sparse is not None and not isinstance(sparse, SparseAttention):
        raise ConfigError(
            f"[kvsieve] sparse: expected SparseAttention or None (exact), got {sparse!r}"
        )
    pair = cache_type if isinstance(cache_type, (tuple, list)) else (cache_type, cache_type)
    if len(pair) != 2 or any(one not in CACHE_TYPES for one in pair):
        raise ConfigError(
            f"[kvsieve] cache_type: expected one of {', '.join(CACHE_TYPES)}, or a "
            f"pair (keys, values) of them, got {cache_type!r}"
        )
    settings = HostSettings(
        backend=make_backend(backend, threads=threads),
        sparse=sparse,
        cache_types=(pair[0], pair[1]),
    )
    return AttentionHost(settings=settings, recorder=Recorder(sparse=sparse, keep_masks=keep_masks))


def sparse_settings(given: SparseAttention | None, fields: dict[str, Any]) -> SparseAttention:
    """`SparseAttention` itself, or its fields; both together, or an unknown one, are refused."""
    if given is not None and fields:
        raise ConfigError(
            f"[kvsieve.transformers.sparse] settings: expected a SparseAttention or its fields, "
            f"got both ({', '.join(fields)})"
        )
    if given is not None:
        return given
    known = SparseAttention.__dataclass_fields__
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ConfigError(
            f"[kvsieve.transformers.sparse] {unknown[0]}: expected one of {', '.join(known)}, "
            f"got {unknown[0]!r}"
        )
    return SparseAttention(**fields)
