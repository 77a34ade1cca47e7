import sys
from pathlib import Path

import pytest

from kvsieve.errors import ConfigError
from kvsieve.plotting import check_can_plot, new_figure, write_figure

FIRST_BYTES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", FIRST_BYTES)
def test_the_same_figure_is_the_same_file(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    files = []
    for i in range(2):
        path = tmp_path / f"{i}{suffix}"
        check_can_plot(path)
        figure, axes = new_figure(width_inches=3, height_inches=2, columns=2)
        assert axes.shape == (1, 2)
        axes[0, 0].plot([1, 2, 4], [3, 1, 2], label="a line")
        axes[0, 1].hist([1, 2, 2])
        axes[0, 0].legend()
        write_figure(figure, path)
        files.append(path.read_bytes())
    assert files[0].startswith(FIRST_BYTES[suffix])
    assert files[0] == files[1]


def test_pyplot_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the figure, and look for a display."""
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    figure, _ = new_figure(width_inches=2, height_inches=2)
    write_figure(figure, tmp_path / "plot.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"\[plot\] matplotlib: .*kvsieve\[plot\]"):
        check_can_plot(tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plot.jpg", r"ends in \.png, \.svg, \.pdf, got .*plot\.jpg"),
        ("plot", r"ends in .* got .*plot"),
        ("missing/plot.png", r"folder to write in, got .*missing"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=rf"\[plot\] path: .*{message}"):
        check_can_plot(tmp_path / name)
    figure, _ = new_figure(width_inches=2, height_inches=2)
    with pytest.raises(ConfigError, match=r"\[plot\] path"):
        write_figure(figure, tmp_path / name)
