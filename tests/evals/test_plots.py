import pytest

from kvsieve.evals.plots import (
    budget,
    divergence_by_budget,
    family,
    heat_map,
    mass_by_bytes,
    speed_by_length,
)

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("attn", "name", "k"),
    [
        ("exact", "exact", 32),
        ("sparse", "anchors", 32),
        ("sparse:k=8", "anchors", 8),
        ("sparse:k=16,share=group,selector=even", "even, share=group", 16),
    ],
)
def test_arms_of_one_family_differ_in_budget_alone(attn: str, name: str, k: int) -> None:
    assert (family(attn), budget(attn)) == (name, k)


def test_a_cell_of_the_heat_map_counts_right_answers() -> None:
    rows = [
        {
            "attn": "exact",
            "setting": "any",
            "length": length,
            "depth": depth,
            "score": hit,
            "hit": hit,
        }
        for length in (1000, 2000)
        for depth, hit in ((0.1, 1), (0.9, 0), (0.9, 1))
    ]
    figure = heat_map(rows)
    (axis,) = figure.axes
    cells = {(text.get_position(), text.get_text()) for text in axis.texts}
    assert cells == {((0, 0), "1/1"), ((0, 1), "1/2"), ((1, 0), "1/1"), ((1, 1), "1/2")}
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1,000", "2,000"]


def test_a_line_per_family_by_rising_budget() -> None:
    rows = [
        {
            "attn": f"sparse:k={k},selector={selector}", "setting": "B", "text": "natural:x:0",
            "length": 1024, "kept_mass": k / 100, "oracle_mass": k / 50, "read_bytes": 1024.0 * k,
            "choose_bytes": 17.0,
        }
        for k in (32, 8, 16)
        for selector in ("even", "probe")
    ]  # fmt: skip
    (axis,) = mass_by_bytes(rows).axes
    lines = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
    assert set(lines) == {"even", "probe"}
    # 17 bytes a token of 1,024 to choose.
    assert lines["even"].get_xdata().tolist() == [25.0, 33.0, 49.0]
    assert lines["even"].get_ydata().tolist() == [0.08, 0.16, 0.32]


def test_a_family_looks_the_same_in_every_panel_and_the_axis_has_numbers() -> None:
    rows = [
        {"attn": f"sparse:k={k},selector={selector}", "setting": setting, "text": "natural:x:0",
         "length": 1024, "kl": kl}
        for k, kl in ((8, 0.03), (16, 0.004))
        for selector, setting in (("anchors", "B"), ("even", "B"), ("even", "C"))
    ]  # fmt: skip
    figure = divergence_by_budget(rows)
    both, alone = figure.axes
    colours = {line.get_label(): line.get_color() for line in both.lines}
    assert colours["even"] != colours["anchors"]
    assert {line.get_color() for line in alone.lines if line.get_label() == "even"} == {
        colours["even"]
    }
    ticks = [label.get_text() for label in both.get_yticklabels()]
    assert ticks == ["0.002", "0.005", "0.01", "0.02", "0.05"]
    assert both.get_ylim() == pytest.approx((0.002, 0.05))


def test_speed_is_in_tokens_per_second() -> None:
    rows = [
        {"attn": "exact", "length": length, "prefill_tokens_per_second": 100.0, "decode_ms": 4.0}
        for length in (2000, 1000)
    ]
    prefill, decode = speed_by_length(rows).axes
    assert prefill.lines[0].get_ydata().tolist() == [100.0, 100.0]
    assert decode.lines[0].get_xdata().tolist() == [1000, 2000]
    assert decode.lines[0].get_ydata().tolist() == [250.0, 250.0]
