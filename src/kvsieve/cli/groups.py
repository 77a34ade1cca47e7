"""Options in groups: a command takes a few frozen dataclasses, typer sees one option per field."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Spread every dataclass parameter of `command` over its fields, in order.

    A field is declared like a parameter of a typer command, ``name: Annotated[type, Option(...)] =
    default``. When the command runs, each dataclass is built from what was given, so its
    ``__post_init__`` is the place to check values.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hints[name] for name in hints if is_dataclass(hints[name])}
    spread: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            spread += _parameters_of(groups[parameter.name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            spread.append(parameter.replace(kind=kind, annotation=hints[parameter.name]))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            taken = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(**taken)
        command(**values)

    run.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in spread}
    return run


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
