import pytest

from kvsieve.lab.units import shown_bytes, shown_count, shown_ratio


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (16_777_216, "16,777,216"), (10**10, "10 G"), (2_320_000_000_000, "2.32 T")],
)
def test_counts(count: int, shown: str) -> None:
    assert shown_count(count) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1,023 B"), (512 << 10, "512 KiB"), (16 << 20, "16 MiB"),
     (1023 << 20, "1023 MiB"), (3 << 29, "1.5 GiB"), (1 << 41, "2 TiB")],
)  # fmt: skip
def test_bytes(size: int, shown: str) -> None:
    assert shown_bytes(size) == shown


def test_ratios() -> None:
    assert shown_ratio(8_390_656, 1_015_936) == "8.26x"
    assert shown_ratio(5000, 1) == "5,000x"
    assert shown_ratio(0, 3) == shown_ratio(3, 0) == "-"
