"""The one door to matplotlib: figures that become files, without a window or global state."""

from importlib import import_module
from pathlib import Path
from typing import Any

from kvsieve.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
"""Of the files that `write_figure` writes."""


def check_can_plot(path: Path) -> None:
    """Raise now what `new_figure` and `write_figure` would raise after all the work.

    Raises
    ------
    ConfigError
        matplotlib is not installed, or `path` has no known suffix or no folder to be in.
    """
    _figure_class()
    _check_path(path)


def new_figure(
    *, width_inches: float, height_inches: float, rows: int = 1, columns: int = 1
) -> tuple[Any, Any]:
    """A matplotlib ``Figure`` and its axes, an object array ``[rows, columns]``.

    Made without pyplot, so that neither a display nor a user's own figures are touched.
    """
    figure = _figure_class()(figsize=(width_inches, height_inches), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def write_figure(figure: Any, path: Path, *, dots_per_inch: int = 130) -> None:
    """Write the figure in the format of the suffix; the same figure gives the same bytes."""
    _check_path(path)
    # What matplotlib would add on its own account: the date, and in SVG random names.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with import_module("matplotlib").rc_context({"svg.hashsalt": "kvsieve"}):
        figure.savefig(path, dpi=dots_per_inch, metadata=metadata)


def _figure_class() -> Any:
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            "[plot] matplotlib: expected it to be installed (pip install 'kvsieve[plot]'), "
            f"got {error}"
        ) from error


def _check_path(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"[plot] path: expected a name that ends in {', '.join(SUFFIXES)}, got {path}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"[plot] path: expected a folder to write in, got {path.parent}")
