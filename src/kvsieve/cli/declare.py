"""How options are declared and their values read."""

from collections.abc import Callable
from typing import Any, TypeVar

import typer

from kvsieve.errors import ConfigError

Number = TypeVar("Number", int, float)


def option(*names: str, help: str, panel: str, **more: Any) -> Any:
    """One option of a group; `panel` is its heading in the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _whole(text: object) -> int:
    """Parser of integer options: says what was expected and what came."""
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"expected an integer, got {text!r}") from None


def _real(text: object) -> float:
    """Parser of options that take any number; their range is checked later."""
    try:
        return float(str(text))
    except ValueError:
        raise typer.BadParameter(f"expected a number, got {text!r}") from None


def integer(*names: str, help: str, panel: str, **more: Any) -> Any:
    """An option whose value is an integer."""
    return option(*names, help=help, panel=panel, **{"metavar": "N", "parser": _whole, **more})


def real(*names: str, help: str, panel: str, **more: Any) -> Any:
    """An option whose value is a number."""
    return option(*names, help=help, panel=panel, **{"metavar": "X", "parser": _real, **more})


def rows_format(panel: str) -> Any:
    """The option that says how rows are printed."""
    return option("-o", "--output", panel=panel, metavar="FORMAT", help="json, md or csv.")


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Read ``1,2,3``; ConfigError names the option and the part that is no number."""
    values = []
    for part in text.split(","):
        try:
            values.append(kind(part))
        except ValueError:
            raise ConfigError(
                f"{name}: expected numbers separated by commas, got {part!r}"
            ) from None
    return values


def one_of(names: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless the option's value is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{names}: expected one of {', '.join(choices)}, got {value!r}")


def at_least(name: str, value: int | None, minimum: int = 1) -> None:
    """Raise ConfigError for a number that is given and under `minimum`."""
    if value is not None and value < minimum:
        raise ConfigError(f"{name}: expected at least {minimum}, got {value}")
