"""Typed, range-checked access to what a model file says about its model."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsieve.errors import ModelFileError


class Keys:
    """Values by name; `prefix` stands before each name, None and null count as absent.

    Every wrong value raises `ModelFileError`, which names the key as the file has it.
    """

    def __init__(self, values: Mapping[str, Any], *, prefix: str = "", where: str = "") -> None:
        self.values = values
        self.prefix = prefix
        self.where = where

    def get(self, name: str) -> Any:
        return self.values.get(self.prefix + name)

    def error(self, name: str, expected: str, got: object) -> ModelFileError:
        """What to raise where a key holds something else than expected."""
        return config_error(self.where + self.prefix + name, expected, got)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.error(name, "a string", describe(value))
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false", describe(value))
        return value

    def integer(
        self, name: str, low: int, high: int, *, multiple: int = 1, default: int | None = None
    ) -> int:
        value = self.get(name)
        if value is None and default is not None:
            value = default
        if type(value) is not int or not low <= value <= high or value % multiple:
            step = f", a multiple of {multiple}" if multiple > 1 else ""
            raise self.error(name, f"an integer from {low} to {high}{step}", describe(value))
        return value

    def number(self, name: str, low: float, high: float, *, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            value = default
        # The comparison is false for NaN too.
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high
        ):
            raise self.error(name, f"a number from {low} to {high}", describe(value))
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(name, "an object", describe(value))
        return value

    def only(self, name: str, *neutral: object) -> None:
        """Refuse a key that changes the result and is not computed, unless it changes nothing."""
        value = self.get(name)
        if value is None or (isinstance(value, bool | int | float | str) and value in neutral):
            return
        expected = f"{neutral[-1]!r} (no other is supported)" if neutral else "none (unsupported)"
        raise self.error(name, expected, describe(value))


def describe(value: object) -> str:
    """A value as an error message shows it."""
    if value is None:
        return "nothing"
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    return f"{value!r:.100}"


def config_error(key: str, expected: str, got: object) -> ModelFileError:
    """The error of a key that holds something else than expected."""
    return ModelFileError(f"[ModelConfig] {key}: expected {expected}, got {got}")
