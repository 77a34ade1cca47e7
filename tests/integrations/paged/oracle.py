"""What `kvsieve.integrations.paged` must give, by float64 NumPy on plain arrays."""

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.integrations.paged.host import AttentionHost
from kvsieve.integrations.paged.layer_rows import HostSettings
from kvsieve.integrations.paged.recorder import Recorder
from kvsieve.kernels.backends import make_backend


def host(
    sparse: SparseAttention | None = None,
    *,
    cache_type: str = "f32",
    keep_masks: bool = False,
    backend: str = "reference",
) -> AttentionHost:
    """A host on the specification's kernels, or on the core's."""
    settings = HostSettings(
        backend=make_backend(backend), sparse=sparse, cache_types=(cache_type, cache_type)
    )
    return AttentionHost(settings=settings, recorder=Recorder(sparse=sparse, keep_masks=keep_masks))


def states(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """``q [T, Hq, D]``, ``k``, ``v`` ``[n, Hkv, D]``, ``seen [T, n]`` or ``[Hq, T, n]``."""
    num_q_heads, head_dim = q.shape[1:]
    group = num_q_heads // k.shape[1]
    out = np.empty(q.shape)
    for head in range(num_q_heads):
        logits = q[:, head].astype(np.float64) @ k[:, head // group].T / np.sqrt(head_dim)
        visible = seen if seen.ndim == 2 else seen[head]
        weights = np.where(visible, np.exp(logits - logits.max()), 0.0)
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group]
    return out


def causal(q_len: int, n: int) -> np.ndarray:
    return np.arange(n)[None, :] <= np.arange(n - q_len, n)[:, None]
