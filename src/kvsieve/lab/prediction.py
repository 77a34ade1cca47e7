"""Time from bytes: a fixed part and a bandwidth per kernel, calibrated here, then put to the test.

The calibration never sees the contexts that are predicted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.kernels.backend import Backend
from kvsieve.lab.kernel_times import ContextTime, KernelBench, KernelTime, measure
from kvsieve.lab.ledger import exact_token_costs, first_context, rule_token_costs
from kvsieve.lab.reading import Rule, first_sparse_tokens
from kvsieve.lab.shape import ModelShape

CALIBRATION_TOKENS = (1536, 6144, 14336)
"""A short, a middle and a long context; all three grow with a budget that is larger."""

DEFAULT_ROUNDS = 100
"""Most of them: a quiet machine needs a third of that, a few seconds."""


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """``fixed_us + bytes / bandwidth``: what one call costs, and what each byte adds."""

    fixed_us: float
    bytes_per_us: float

    def time_us(self, num_bytes: int) -> float:
        """Predicted time of a call that reads so many bytes."""
        return self.fixed_us + num_bytes / self.bytes_per_us

    @classmethod
    def fitted(cls, num_bytes: Sequence[int], times_us: Sequence[float]) -> "KernelCost":
        """The line through measured times with the least relative error, neither part negative."""
        x, y = np.asarray(num_bytes, np.float64), np.asarray(times_us, np.float64)
        if np.ptp(x) == 0:  # always the same bytes: no way to tell the parts from one another
            return cls(fixed_us=float(np.exp(np.log(y).mean())), bytes_per_us=float("inf"))
        rows = np.stack([1 / y, x / y], axis=1)
        fixed, per_byte = np.linalg.lstsq(rows, np.ones_like(y), rcond=None)[0]
        if fixed < 0 or per_byte <= 0:
            # Through zero: the best single factor for x / y.
            per_byte, fixed = (x / y).sum() / ((x / y) ** 2).sum(), 0.0
        return cls(fixed_us=float(fixed), bytes_per_us=float(1 / per_byte))


@dataclass(frozen=True, kw_only=True)
class TimeModel:
    """What the three kernels of a decoded token cost in one layer of a shape, on this machine."""

    shape: ModelShape
    sparse: SparseAttention
    exact: KernelCost
    select: KernelCost
    attend: KernelCost

    @classmethod
    def calibrated(
        cls, shape: ModelShape, sparse: SparseAttention, times: Sequence[ContextTime]
    ) -> "TimeModel":
        """From measured contexts, all of them beyond the budget."""
        layer, rule = _one_layer(shape), Rule(sparse=sparse)
        exact = [exact_token_costs(layer, n_tokens=time.n_tokens) for time in times]
        chosen = [rule_token_costs(layer, rule, n_tokens=time.n_tokens) for time in times]
        return cls(
            shape=shape,
            sparse=sparse,
            exact=KernelCost.fitted(
                [costs.cache_bytes for costs in exact], [time.exact.total_us for time in times]
            ),
            select=KernelCost.fitted(
                [costs.index_bytes + costs.selection_bytes for costs in chosen],
                [time.sparse.select_us for time in times],
            ),
            attend=KernelCost.fitted(
                [costs.cache_bytes for costs in chosen],
                [time.sparse.attention_us for time in times],
            ),
        )

    def predict(self, n_tokens: int) -> ContextTime:
        """Times of one layer at a context; where the gate says exact, both arms are."""
        layer = _one_layer(self.shape)
        reads = exact_token_costs(layer, n_tokens=n_tokens)
        exact_us = self.exact.time_us(reads.cache_bytes)
        exact = KernelTime(attention_us=exact_us, select_us=0.0)
        if n_tokens < first_sparse_tokens(self.sparse):
            return ContextTime(n_tokens=n_tokens, exact=exact, sparse=exact)
        costs = rule_token_costs(layer, Rule(sparse=self.sparse), n_tokens=n_tokens)
        sparse = KernelTime(
            attention_us=self.attend.time_us(costs.cache_bytes),
            select_us=self.select.time_us(costs.index_bytes + costs.selection_bytes),
        )
        return ContextTime(n_tokens=n_tokens, exact=exact, sparse=sparse)

    @property
    def break_even_tokens(self) -> int | None:
        """Smallest context from which on sparse attention is predicted to take less time."""
        return first_context(lambda n: self.predict(n).speedup_ratio > 1)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A calibration, and what it predicts beside what was measured, for each context."""

    model: TimeModel
    calibration: tuple[ContextTime, ...]
    measured: tuple[ContextTime, ...]

    @property
    def predicted(self) -> tuple[ContextTime, ...]:
        """One for each of `measured`."""
        return tuple(self.model.predict(time.n_tokens) for time in self.measured)


def measure_and_predict(
    shape: ModelShape,
    sparse: SparseAttention,
    contexts: Sequence[int],
    *,
    backend: Backend,
    rounds: int = DEFAULT_ROUNDS,
    on_round: Callable[[int], None] | None = None,
) -> Measured:
    """Run the kernels at calibration contexts and at `contexts`, interleaved, and compare.

    Raises
    ------
    ConfigError
        A cache type that the kernels do not run.
    CapacityError
        The cache would take more than half of the free memory.
    """
    calibration = calibration_contexts(sparse, avoid=contexts)
    longest = max(*contexts, *calibration)
    bench = KernelBench(shape, sparse, max_tokens=longest, backend=backend)
    times = measure(bench, [*calibration, *contexts], rounds=rounds, on_round=on_round)
    known, tested = times[: len(calibration)], times[len(calibration) :]
    model = TimeModel.calibrated(shape, sparse, known)
    return Measured(model=model, calibration=tuple(known), measured=tuple(tested))


def calibration_contexts(sparse: SparseAttention, *, avoid: Sequence[int]) -> list[int]:
    """Contexts beyond the budget, none of them to be predicted."""
    first = first_sparse_tokens(sparse)
    scale = max(1, -(-first // CALIBRATION_TOKENS[0]))
    chosen = [scale * tokens for tokens in CALIBRATION_TOKENS]
    return [tokens + sparse.block_size * (tokens in avoid) for tokens in chosen]


def _one_layer(shape: ModelShape) -> ModelShape:
    return replace(shape, num_layers=1)
