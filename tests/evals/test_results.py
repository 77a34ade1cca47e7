import csv
import io
import json
from dataclasses import dataclass

import pytest

from kvsieve.errors import ConfigError
from kvsieve.evals.results import RowWriter, markdown_row, readable


@dataclass(frozen=True, kw_only=True)
class Fruit:
    name: str
    weight: float | None
    ripe: bool


ROWS = [
    Fruit(name="pear | plum, é", weight=0.25, ripe=True),
    Fruit(name="fig", weight=None, ripe=False),
]


def written(form: str, rows: list[Fruit]) -> str:
    stream = io.StringIO()
    with RowWriter(stream, Fruit, form=form) as writer:
        for row in rows:
            writer.write(row)
    return stream.getvalue()


def test_json_is_a_list_of_objects() -> None:
    assert json.loads(written("json", ROWS)) == [
        {"name": "pear | plum, é", "weight": 0.25, "ripe": True},
        {"name": "fig", "weight": None, "ripe": False},
    ]


def test_json_without_rows_is_an_empty_list() -> None:
    assert json.loads(written("json", [])) == []


def test_json_of_a_run_cut_short_still_reads() -> None:
    stream = io.StringIO()

    def cut_short() -> None:
        with RowWriter(stream, Fruit, form="json") as writer:
            writer.write(ROWS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short()
    assert len(json.loads(stream.getvalue())) == 1


def test_csv_reads_back() -> None:
    rows = list(csv.reader(io.StringIO(written("csv", ROWS))))
    assert rows == [
        ["name", "weight", "ripe"],
        ["pear | plum, é", "0.25", "True"],
        ["fig", "", "False"],
    ]


def test_markdown_keeps_its_columns_whatever_a_cell_holds() -> None:
    lines = written("md", ROWS).splitlines()
    assert lines == [
        "| name | weight | ripe |",
        "| --- | --- | --- |",
        r"| pear \| plum, é | 0.250 | yes |",
        "| fig |  | no |",
    ]
    assert markdown_row(["a\nb"]) == "| a b |\n"


def test_a_row_is_out_before_the_next_one_is_measured() -> None:
    stream = io.StringIO()
    with RowWriter(stream, Fruit, form="md") as writer:
        writer.write(ROWS[1])
        assert "fig" in stream.getvalue()


@pytest.mark.parametrize("form", ["json", "md", "csv"])
@pytest.mark.parametrize(
    ("failure", "empty_json"), [(ConfigError, ""), (KeyboardInterrupt, "[\n]\n")]
)
def test_nothing_is_written_by_a_run_that_is_refused(
    form: str, failure: type[BaseException], empty_json: str
) -> None:
    stream = io.StringIO()
    with pytest.raises(failure), RowWriter(stream, Fruit, form=form):
        raise failure("refused before the first row")
    if form == "json":
        assert stream.getvalue() == empty_json
    else:
        assert bool(stream.getvalue()) == (failure is KeyboardInterrupt)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of json, md, csv, got 'xml'"):
        RowWriter(io.StringIO(), Fruit, form="xml")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (1.2345, "1.23"),
        (123.456, "123.5"),
        (12345.6, "12,346"),
        (0.000421234, "0.00042"),
        (-0.0, "0.000"),
        (7, "7"),
        (True, "yes"),
    ],
)
def test_readable(value: object, text: str) -> None:
    assert readable(value) == text
