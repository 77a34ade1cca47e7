import json

import pytest

from peers.figures import ratios
from peers.plot import write_plot
from peers.report import to_json, to_markdown
from tests.benchmarks.comparisons import comparison


def rows(markdown, title):
    section = markdown.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def markdown():
    return to_markdown(comparison(), ratios(comparison()))


def test_every_engine_has_its_figures(markdown):
    table = rows(markdown, "Speed")
    assert table[0] == [
        "1,000",
        "ours",
        "1",
        "1,000",
        "1,000 (500 to 1,000)",
        "10.00 (10.00 to 20.00)",
    ]
    assert [row[:2] for row in table] == [
        ["1,000", "ours"],
        ["1,000", "quick (loses the answer)"],
        ["1,000", "slow"],
        ["1,000", "timed only"],
        ["4,000", "ours"],
    ]


def test_ratios_name_the_peer(markdown):
    assert rows(markdown, "kvsieve, times as fast") == [
        ["1,000", "prefill", "ours", "slow", "3.00 (2.00 to 4.00)"],
        ["4,000", "prefill", "ours", "no peer is left", ""],
        ["1,000", "decode", "ours", "slow", "2.50 (1.50 to 4.00)"],
        ["4,000", "decode", "ours", "no peer is left", ""],
    ]


def test_answers_tell_lost_from_not_asked(markdown):
    assert rows(markdown, "Pass key") == [
        ["ours", "1 of 1", "990", ""],
        ["quick", "0 of 1", "990", "12345 at 0.5"],
        ["slow", "1 of 1", "990", ""],
        ["timed only", "cannot be asked", "", ""],
    ]


def test_machine_and_what_was_left_out_are_told(markdown):
    assert "- processor: a processor" in markdown
    assert "- absent: no such package" in markdown


def test_json_has_every_round():
    plain = json.loads(to_json(comparison(), ratios(comparison())))
    assert [run["decode_ms"] for run in plain["speeds"]["1000"]["slow"]] == [15, 50, 40]
    assert plain["ratios"][0]["spread"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert plain["answers"][1]["hit"] is False


def test_the_plot_is_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    write_plot(comparison(), tmp_path / "speed.png")
    image = (tmp_path / "speed.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 10_000
