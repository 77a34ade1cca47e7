"""Rows of results, written one by one as they are measured: JSON, a Markdown table, or CSV."""

import csv
import json
from dataclasses import asdict, fields
from types import TracebackType
from typing import Any, Generic, Literal, TextIO, TypeVar, get_args

from kvsieve.errors import ConfigError

ResultFormat = Literal["json", "md", "csv"]

Row = TypeVar("Row")


class RowWriter(Generic[Row]):
    """Writes rows of one dataclass type; what was written is complete even if a run is cut short.

    Use it as a context manager: JSON needs its closing bracket.
    """

    def __init__(self, stream: TextIO, row_type: type[Row], *, form: str) -> None:
        check_format(form)
        self._stream = stream
        self._form = form
        self._columns = [field.name for field in fields(row_type)]  # type: ignore[arg-type]
        self._num_rows = 0

    def __enter__(self) -> "RowWriter[Row]":
        return self

    def write(self, row: Row) -> None:
        """Add a row and flush it."""
        values: dict[str, Any] = asdict(row)  # type: ignore[call-overload]
        if self._num_rows == 0:
            self._head()
        if self._form == "json":
            self._stream.write("  " if self._num_rows == 0 else ",\n  ")
            self._stream.write(json.dumps(values, ensure_ascii=False))
        elif self._form == "csv":
            csv.writer(self._stream, lineterminator="\n").writerow(values.values())
        else:
            self._stream.write(markdown_row([readable(value) for value in values.values()]))
        self._num_rows += 1
        self._stream.flush()

    def _head(self) -> None:
        """What comes before the first row; not written while a run may still be refused."""
        if self._form == "csv":
            csv.writer(self._stream, lineterminator="\n").writerow(self._columns)
        elif self._form == "md":
            self._stream.write(markdown_row(self._columns))
            self._stream.write(markdown_row(["---"] * len(self._columns)))
        else:
            self._stream.write("[\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._num_rows == 0:
            if kind is not None and issubclass(kind, Exception):
                return
            self._head()
        if self._form == "json":
            self._stream.write("\n]\n" if self._num_rows else "]\n")
        self._stream.flush()


def check_format(form: str) -> None:
    """Raise ConfigError unless rows can be written as `form`."""
    if form not in get_args(ResultFormat):
        choices = ", ".join(get_args(ResultFormat))
        raise ConfigError(f"-o/--output: expected one of {choices}, got {form!r}")


def markdown_row(cells: list[str]) -> str:
    """One line of a Markdown table; a bar or a line break in a cell is made harmless."""
    clean = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(clean) + " |\n"


def readable(value: object) -> str:
    """A value as a person wants it: about three significant digits, yes and no, blank for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        size = abs(value)
        if 0 < size < 0.01:
            return f"{value:.2g}"
        digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
        return f"{value + 0.0:,.{digits}f}"
    return str(value)
