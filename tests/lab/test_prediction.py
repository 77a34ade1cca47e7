"""The time model on times that follow from known costs, and on the kernels."""

import importlib.util

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.kernels.backends import make_backend
from kvsieve.lab import kernel_times
from kvsieve.lab.kernel_times import ContextTime, KernelTime
from kvsieve.lab.prediction import (
    CALIBRATION_TOKENS,
    KernelCost,
    TimeModel,
    calibration_contexts,
    measure_and_predict,
)
from kvsieve.lab.shape import ModelShape

SHAPE = ModelShape(head_dim=64, num_q_heads=9, num_kv_heads=3, num_layers=30)
SPARSE = SparseAttention(selector="even", share="group")


def time_of(n: int) -> ContextTime:
    """Exact reads at 10 GB/s, choosing at 5 after 4 us, 32 blocks take 40 us: written out."""
    blocks, full = -(-n // 32), n // 32
    scored = 8 * blocks
    if full > 256:  # all by two keys, and 16 super-blocks of 16 by eight; n is a multiple of 512
        scored = 2 * full + 8 * (256 + blocks - full)
    chosen_bytes = 3 * (scored * 68 + 4 * (2 * blocks + 32))
    return ContextTime(
        n_tokens=n,
        exact=KernelTime(attention_us=7 + n * 408 / 10_000, select_us=0),
        sparse=KernelTime(attention_us=40, select_us=4 + chosen_bytes / 5_000),
    )


def test_known_costs_are_found_and_other_contexts_predicted() -> None:
    model = TimeModel.calibrated(SHAPE, SPARSE, [time_of(n) for n in CALIBRATION_TOKENS])
    assert model.exact.fixed_us == pytest.approx(7)
    assert model.exact.bytes_per_us == pytest.approx(10_000)
    assert model.select.fixed_us == pytest.approx(4)
    assert model.select.bytes_per_us == pytest.approx(5_000)
    assert model.attend.fixed_us == pytest.approx(40)
    for n in (2048, 8192, 32768):
        predicted, true = model.predict(n), time_of(n)
        assert predicted.exact.total_us == pytest.approx(true.exact.total_us)
        assert predicted.sparse.total_us == pytest.approx(true.sparse.total_us)
        assert predicted.speedup_ratio == pytest.approx(true.speedup_ratio)


def test_where_the_gate_says_exact_there_is_nothing_to_gain() -> None:
    model = TimeModel.calibrated(SHAPE, SPARSE, [time_of(n) for n in CALIBRATION_TOKENS])
    assert model.predict(1024).speedup_ratio == 1
    assert model.predict(1024).sparse.select_us == 0


def test_break_even_in_time() -> None:
    model = TimeModel.calibrated(SHAPE, SPARSE, [time_of(n) for n in CALIBRATION_TOKENS])
    found = model.break_even_tokens
    assert found is not None
    assert time_of(found).speedup_ratio > 1
    assert time_of(found - 1).speedup_ratio <= 1 or found == 1025


@pytest.mark.parametrize(
    ("sizes", "times", "fixed", "rate"),
    [
        ([100, 200, 400], [6, 11, 21], 1, 20),
        ([100, 200, 400], [4, 9, 19], 0, None),  # a negative fixed part: through zero
        ([100, 200, 400], [9, 8, 7], 0, None),  # faster with more bytes: noise
        ([300, 300], [4, 9], 6, float("inf")),
    ],
)
def test_a_line_that_makes_sense_is_fitted(sizes, times, fixed, rate) -> None:
    cost = KernelCost.fitted(sizes, times)
    assert cost.fixed_us == pytest.approx(fixed, abs=1e-9)
    assert cost.bytes_per_us > 0
    if rate is not None:
        assert cost.bytes_per_us == pytest.approx(rate)
    assert cost.time_us(300) > 0


@pytest.mark.parametrize("k", [1, 32, 200])
@pytest.mark.parametrize("avoid", [[2048, 8192], [1536, 6144, 14336]])
def test_calibration_never_sees_what_is_predicted(k: int, avoid: list[int]) -> None:
    sparse = SparseAttention(k=k)
    contexts = calibration_contexts(sparse, avoid=avoid)
    assert not set(contexts) & set(avoid)
    assert min(contexts) > 32 * k
    assert len(set(contexts)) == 3


@pytest.mark.skipif(
    importlib.util.find_spec("kvsieve._native") is None, reason="needs the C++ core"
)
def test_the_kernels_are_run_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "EVICT_BYTES", 1)
    monkeypatch.setattr("kvsieve.lab.prediction.CALIBRATION_TOKENS", (160, 320, 640))
    sparse = SparseAttention(k=4)
    shape = ModelShape(head_dim=32, num_q_heads=4, num_kv_heads=2)
    result = measure_and_predict(
        shape, sparse, [100, 256], backend=make_backend("native", threads=1), rounds=2
    )
    assert [time.n_tokens for time in result.calibration] == [160, 320, 640]
    assert [time.n_tokens for time in result.predicted] == [100, 256]
    assert result.measured[1].sparse.select_us > 0
    assert result.predicted[0].speedup_ratio == 1
    assert result.predicted[1].speedup_ratio > 0
