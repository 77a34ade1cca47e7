"""Times of the attention kernels on a cache of a given shape: one decoded token in one layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache, blocks_for
from kvsieve.engine.memory import available_memory
from kvsieve.engine.plan import selector_index, sparse_plan
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.kernels.backend import Backend, LayerShape, LayerWeights, Segment, WeightSource
from kvsieve.lab.shape import ModelShape
from kvsieve.types import CACHE_TYPES

_HIDDEN = 64
"""Width of the model around the attention: small, because what it takes is not counted."""

EVICT_BYTES = 64 << 20
"""Read between two timed steps. In a model, the weights and caches of all other layers are: what a
step finds in the processor's caches otherwise would flatter it. Twice a large L3."""

_FILL_TOKENS = 2048
_FEWEST_ROUNDS = 30
_AGREEING = 4
_SETTLED = 1.05
"""A cell is measured until so many of its fastest steps are this close."""


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Microseconds of one layer's attention, and of choosing the blocks before it.

    ``step_us`` is the whole layer's time: where a thread was held up, it shows there alone.
    """

    attention_us: float
    select_us: float
    step_us: float = 0.0

    @property
    def total_us(self) -> float:
        """Both."""
        return self.attention_us + self.select_us


@dataclass(frozen=True, kw_only=True)
class ContextTime:
    """The fastest step of each arm at one context.

    ``settled``: several steps were as fast; otherwise other programs may have held up all of them.
    """

    n_tokens: int
    exact: KernelTime
    sparse: KernelTime
    settled: bool = True

    @property
    def speedup_ratio(self) -> float:
        """Exact over sparse, choosing included."""
        return self.exact.total_us / self.sparse.total_us


class KernelBench:
    """A cache of random keys and values, and a layer that is little but its attention.

    A step is the engine's own: `Backend.run_layer` with the core's timers around the choice of
    blocks and around attention. Random keys spread the chosen blocks over the whole context.
    """

    def __init__(
        self, shape: ModelShape, sparse: SparseAttention, *, max_tokens: int, backend: Backend
    ) -> None:
        for side in (shape.k_type, shape.v_type):
            if side not in CACHE_TYPES:
                raise ConfigError(
                    f"[measure] cache type: expected one that the kernels run, "
                    f"{', '.join(CACHE_TYPES)}, got {side!r}"
                )
        self._backend = backend
        self._plan = sparse_plan(sparse, prompt_len=0, is_prefill=False)
        self._max_tokens = max_tokens
        self._random = np.random.default_rng(0)
        self._segment = _filled_cache(shape, sparse, backend, max_tokens=max_tokens)
        self._layer = _layer(shape, backend, self._random)
        self._angles = np.zeros((1, shape.head_dim // 2), np.float32)

    def exact(self, n_tokens: int) -> KernelTime:
        """One step that reads everything."""
        return self._timed(replace(self._segment, start=n_tokens - 1))

    def sparse(self, n_tokens: int) -> KernelTime:
        """One step that chooses blocks and reads them; exact where the gate says so."""
        return self._timed(replace(self._segment, start=n_tokens - 1, sparse=self._plan))

    def _timed(self, segment: Segment) -> KernelTime:
        for other_layer in range(1, len(segment.pages)):
            self._step(self._segment, other_layer)
        return self._step(segment, 0)

    def _step(self, segment: Segment, layer: int) -> KernelTime:
        step = self._backend.begin_step([segment], np.cos(self._angles), self._angles)
        hidden = self._random.standard_normal((1, _HIDDEN), np.float32)
        self._backend.run_layer(self._layer, layer, hidden, step)
        stats = self._backend.step_stats(step)
        return KernelTime(
            attention_us=stats.attention_ns / 1e3,
            select_us=stats.select_ns / 1e3,
            step_us=(stats.attention_ns + stats.select_ns + stats.dense_ns) / 1e3,
        )


def measure(
    bench: KernelBench,
    contexts: Sequence[int],
    *,
    rounds: int,
    on_round: Callable[[int], None] | None = None,
) -> list[ContextTime]:
    """The fastest step of each arm at each context; the arms take turns.

    The fastest, because other programs on the machine can only add time. A cell is done when its
    four fastest steps agree within 5 %, or after `rounds`.
    """
    arms = (bench.exact, bench.sparse)
    cells: dict[tuple[int, int], list[KernelTime]] = {
        (n, arm): [] for n in contexts for arm in range(len(arms))
    }
    for i in range(rounds):
        if on_round is not None:
            on_round(i)
        for (n, arm), steps in cells.items():
            if not _settled(steps):
                steps.append(arms[arm](n))
    return [
        ContextTime(
            n_tokens=n,
            exact=_fastest(cells[n, 0]),
            sparse=_fastest(cells[n, 1]),
            settled=_settled(cells[n, 0]) and _settled(cells[n, 1]),
        )
        for n in contexts
    ]


def _settled(steps: Sequence[KernelTime]) -> bool:
    if len(steps) < _FEWEST_ROUNDS:
        return False
    fastest = sorted(step.step_us for step in steps)[:_AGREEING]
    return fastest[-1] <= _SETTLED * fastest[0]


def _fastest(steps: Sequence[KernelTime]) -> KernelTime:
    return min(steps, key=lambda step: step.step_us)


def _filled_cache(
    shape: ModelShape, sparse: SparseAttention, backend: Backend, *, max_tokens: int
) -> Segment:
    """The last of `max_tokens` tokens as an exact step; layer 0 and enough copies to evict it."""
    layer_bytes = shape.layer_bytes_per_token * max_tokens
    num_layers = 1 + -(-EVICT_BYTES // layer_bytes)
    need, available = num_layers * layer_bytes, available_memory()
    if 2 * need > available:
        raise CapacityError(
            f"[measure] contexts: expected a cache within half of the {available / 2**20:,.0f} MiB "
            f"of memory that are free, got {need / 2**20:,.0f} MiB for {max_tokens:,} tokens"
        )
    pool = BlockPool(
        shape.layout,
        num_layers=num_layers,
        num_kv_heads=shape.num_kv_heads,
        num_blocks=blocks_for(max_tokens),
    )
    cache = KVCache(
        pool,
        max_tokens=max_tokens,
        index_layout=selector_index(sparse, shape.layout),
        keeps_importance=sparse.uses_importance,
    )
    cache.reserve(max_tokens)
    random = np.random.default_rng(1)
    while cache.num_tokens < max_tokens:
        count = min(_FILL_TOKENS, max_tokens - cache.num_tokens)
        size = (count, shape.num_kv_heads, shape.head_dim)
        k, v = (random.standard_normal(size, np.float32) for _ in range(2))
        segment = cache.segment(start=cache.num_tokens, q_len=count, is_prefill=True)
        backend.append(segment, 0, k, v)
        cache.commit(cache.num_tokens + count)
    pool.pages[1:] = pool.pages[:1]
    if cache.importance is not None:
        cache.importance[:] = random.integers(0, 1 << 24, cache.importance.shape)
    return replace(segment, start=max_tokens - 1, q_len=1, is_prefill=False)


def _layer(shape: ModelShape, backend: Backend, random: np.random.Generator) -> Any:
    sizes = LayerShape(
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        rope_interleaved=False,
        rope_dim=shape.head_dim,
        attention_scale=shape.head_dim**-0.5,
    )

    def packed(rows: int, cols: int) -> Any:
        matrix = random.standard_normal((rows, cols), np.float32) / np.float32(cols**0.5)
        source = WeightSource(data=matrix, format="f32", rows=rows, cols=cols)
        return backend.pack_weight(source, kind="q8")

    matrices = {name: packed(*size) for name, size in sizes.matrix_shapes.items()}
    norm = np.ones(_HIDDEN, np.float32)
    return backend.build_layer(sizes, LayerWeights(attn_norm=norm, ffn_norm=norm, **matrices))
