"""The bench runs the engine's own step; no time is looked at, only which kernels took part."""

from dataclasses import replace

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.kernels.backends import make_backend
from kvsieve.lab import kernel_times
from kvsieve.lab.kernel_times import ContextTime, KernelBench, KernelTime, measure
from kvsieve.lab.shape import ModelShape

SHAPE = ModelShape(head_dim=32, num_q_heads=4, num_kv_heads=2)
SPARSE = SparseAttention(k=3)
REFERENCE = make_backend("reference")


@pytest.fixture(autouse=True)
def _small_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "EVICT_BYTES", 1)


@pytest.mark.parametrize("selector", ["probe", "even"])
@pytest.mark.parametrize("cache_type", ["q8_0", "f16"])
def test_a_step_of_each_arm(selector: str, cache_type: str) -> None:
    shape = replace(SHAPE, k_type=cache_type, v_type=cache_type)
    sparse = SparseAttention(k=3, selector=selector)
    bench = KernelBench(shape, sparse, max_tokens=200, backend=REFERENCE)
    read = []
    stats = REFERENCE.step_stats

    def noted(step):
        result = stats(step)
        read.append(result.segments[0].pairs_attended)
        return result

    bench._backend = type("Noting", (), {
        "begin_step": staticmethod(REFERENCE.begin_step),
        "run_layer": staticmethod(REFERENCE.run_layer),
        "step_stats": staticmethod(noted),
    })()  # fmt: skip
    times = [bench.exact(97), bench.sparse(97), bench.exact(200), bench.sparse(200)]
    assert all(time.attention_us > 0 for time in times)
    assert all(time.step_us >= time.total_us for time in times)
    # Each timed step comes after one exact step over all 200 tokens in the other layer.
    assert read[::2] == [2 * 7] * 4
    assert read[1] == 2 * 4
    assert read[5] == 2 * 7
    for sparse_pairs, blocks in ((read[3], 4), (read[7], 7)):
        assert 2 * 3 <= sparse_pairs <= 2 * min(blocks, 2 * 3)


class Scripted:
    """A bench whose steps take the times given, in order."""

    def __init__(self, exact, sparse) -> None:
        self._times = {"exact": iter(exact), "sparse": iter(sparse)}
        self.calls: list[str] = []

    def exact(self, n_tokens: int) -> KernelTime:
        return self._next("exact")

    def sparse(self, n_tokens: int) -> KernelTime:
        return self._next("sparse")

    def _next(self, arm: str) -> KernelTime:
        self.calls.append(arm)
        step_us, attention_us = next(self._times[arm])
        return KernelTime(attention_us=attention_us, select_us=0, step_us=step_us)


def test_the_fastest_step_counts_and_steady_cells_are_left_alone() -> None:
    steady = [(9.0, 6.0)] * 30
    # A thread that was held up makes attention look quick, but not the step.
    noisy = [(20.0 + i, 1.0 if i == 3 else 15.0) for i in range(39)] + [(10.0, 7.0)]
    bench = Scripted(exact=steady, sparse=noisy)
    rounds: list[int] = []
    (time,) = measure(bench, [100], rounds=40, on_round=rounds.append)
    assert (time.exact.attention_us, time.sparse.attention_us) == (6.0, 7.0)
    assert bench.calls.count("exact") == 30
    assert bench.calls.count("sparse") == 40
    assert rounds == list(range(40))
    assert not time.settled
    (time,) = measure(Scripted(exact=steady, sparse=steady), [100], rounds=40)
    assert time.settled


def test_ratio() -> None:
    exact = KernelTime(attention_us=12, select_us=0)
    sparse = KernelTime(attention_us=2, select_us=1)
    assert ContextTime(n_tokens=1, exact=exact, sparse=sparse).speedup_ratio == 4


def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"\[measure\] cache type: .*got 'bf16'"):
        KernelBench(replace(SHAPE, k_type="bf16"), SPARSE, max_tokens=100, backend=REFERENCE)
    monkeypatch.setattr(kernel_times, "available_memory", lambda: 100_000)
    with pytest.raises(CapacityError, match=r"\[measure\] contexts: .*for 400 tokens"):
        KernelBench(SHAPE, SPARSE, max_tokens=400, backend=REFERENCE)
