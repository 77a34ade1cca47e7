"""Plots of a sweep's rows: pass key by length and depth, mass, divergence and speed."""

import re
from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import Any

from kvsieve.attention.config import SparseAttention
from kvsieve.plotting import new_figure

Row = dict[str, Any]

COLOURS = (
    "#1d3557", "#c1121f", "#2a9d8f", "#e09f3e", "#6d597a", "#457b9d", "#8ab17d", "#b08968",
    "#5f0f40", "#9a031e", "#0f4c5c", "#a8dadc",
)  # fmt: skip
MARKERS = "osD^vPX*<>hd"
"""A marker each beside the colour, for who cannot tell colours apart."""

LOST, FOUND = (0.76, 0.07, 0.12), (0.16, 0.55, 0.42)
PANELS_ACROSS = 4
MOST_TICKS = 9


def family(attn: str) -> str:
    """An arm without its budget: arms of one family differ in k alone."""
    if attn == "exact":
        return attn
    settings = [part for part in attn.removeprefix("sparse").lstrip(":").split(",") if part]
    rest = [part for part in settings if not part.startswith("k=")]
    if not any(part.startswith("selector=") for part in rest):
        rest.insert(0, f"selector={SparseAttention().selector}")
    return ", ".join(part.removeprefix("selector=") for part in sorted(rest, key=_selector_first))


def budget(attn: str) -> int:
    """k of a sparse arm; the default where it is not said."""
    found = re.search(r"\bk=(\d+)", attn)
    return int(found.group(1)) if found else SparseAttention().k


def heat_map(rows: Sequence[Row]) -> Any:
    """Share of right answers by length (across) and depth (down), a panel per arm and setting."""
    panels = _grouped(rows, lambda row: (row["attn"], row["setting"]))
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    across = min(PANELS_ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure, axes = new_figure(
        width_inches=3.3 * across,
        height_inches=0.95 * down + 0.32 * len(depths) * down,
        rows=down,
        columns=across,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, ((attn, setting), mine) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(_titled(attn, setting), fontsize=8.5, loc="left")
        for (length, depth), cell in _grouped(mine, lambda r: (r["length"], r["depth"])).items():
            x, y = lengths.index(length), depths.index(depth)
            score = sum(row["score"] for row in cell) / len(cell)
            colour = [a + (b - a) * score for a, b in zip(LOST, FOUND, strict=True)]
            axis.bar(x, 0.94, 0.96, bottom=y - 0.47, color=colour)
            text = f"{sum(row['hit'] for row in cell)}/{len(cell)}"
            axis.text(x, y, text, ha="center", va="center", color="white", fontsize=8)
        axis.set_xlim(-0.5, len(lengths) - 0.5)
        axis.set_ylim(len(depths) - 0.5, -0.5)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.supxlabel("prompt tokens", fontsize=9)
    figure.supylabel("depth", fontsize=9)
    return figure


def mass_by_bytes(rows: Sequence[Row]) -> Any:
    """Kept mass against bytes read per token, layer and KV head: a line per selector over k."""

    styles = _styles(rows)

    def draw(axis: Any, mine: Sequence[Row]) -> None:
        for name, line in _lines(mine):
            style = styles[name]
            points = [(_kib_read(row), row) for row in line]
            axis.plot([x for x, _ in points], [row["kept_mass"] for _, row in points], **style)
            for x, row in points:
                axis.annotate(
                    f"{budget(row['attn'])}", (x, row["kept_mass"]), (3, -9),
                    textcoords="offset points", fontsize=7, color="#555555",
                )  # fmt: skip
            oracle = {**style, "label": None, "linestyle": ":", "marker": "", "linewidth": 1}
            axis.plot([x for x, _ in points], [row["oracle_mass"] for _, row in points], **oracle)
        axis.set_xlabel("KiB read per token, layer and KV head, choosing included")
        axis.set_ylabel("kept mass (dotted: block oracle)")

    return _small_multiples(rows, draw)


def divergence_by_budget(rows: Sequence[Row]) -> Any:
    """Mean KL divergence from exact attention against k, a line per selector."""

    styles = _styles(rows)
    ticks, low, high = _readable_ticks([0.01, *(row["kl"] for row in rows)])

    def draw(axis: Any, mine: Sequence[Row]) -> None:
        for name, line in _lines(mine):
            kl = [row["kl"] for row in line]
            axis.plot([budget(row["attn"]) for row in line], kl, **styles[name])
        budgets = sorted({budget(row["attn"]) for row in mine})
        axis.axhline(0.01, color="#999999", linewidth=1, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(budgets, [str(k) for k in budgets])
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ylim(low, high)
        axis.minorticks_off()
        axis.set_xlabel("budget k, blocks of 32")
        axis.set_ylabel("mean KL from exact, nats (dashed: .01)")

    return _small_multiples(rows, draw)


def speed_by_length(rows: Sequence[Row]) -> Any:
    """Prefill and decode in tokens per second against length, a line per arm."""
    figure, axes = new_figure(width_inches=11, height_inches=4.4, columns=2)
    figures: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("prefill", lambda row: float(row["prefill_tokens_per_second"])),
        ("decode", lambda row: 1e3 / float(row["decode_ms"])),
    )
    arms = _grouped(rows, lambda row: row["attn"])
    lengths = sorted({row["length"] for row in rows})
    for axis, (title, value) in zip(axes.flat, figures, strict=True):
        for i, (attn, line) in enumerate(arms.items()):
            points = sorted(line, key=lambda row: int(row["length"]))
            style = _style(i, attn)
            axis.plot([row["length"] for row in points], [value(row) for row in points], **style)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.set_ylim(bottom=0)
        axis.minorticks_off()
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel("tokens per second")
        _finish(axis)
    _legend(figure, axes)
    return figure


def _small_multiples(rows: Sequence[Row], draw: Callable[[Any, Sequence[Row]], None]) -> Any:
    """A panel per text, length and setting, on one scale."""
    panels = _grouped(rows, lambda row: (row["text"].split(":")[0], row["length"], row["setting"]))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = new_figure(
        width_inches=max(6.0, 4.6 * across),
        height_inches=3.8 * down + 0.5,
        rows=down,
        columns=across,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, ((text, length, setting), mine) in zip(axes.flat, panels.items(), strict=False):
        draw(axis, mine)
        axis.set_title(f"{text}, {length:,} tokens, {setting}", loc="left", fontsize=9)
        _finish(axis)
    _legend(figure, axes)
    return figure


def _lines(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Families of sparse arms in a fixed order, each with its rows by rising k."""
    families = _grouped(
        sorted(rows, key=lambda row: (family(row["attn"]), budget(row["attn"]))),
        lambda row: family(row["attn"]),
    )
    return list(families.items())


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """How each family is drawn: the same in all panels of a figure, whoever is missing there."""
    return {name: _style(i, name) for i, (name, _) in enumerate(_lines(rows))}


def _readable_ticks(values: Sequence[float]) -> tuple[list[float], float, float]:
    """1, 2 and 5 times powers of ten about the positive values, and the axis's ends.

    Powers of ten alone, where the others would be too many.
    """
    positive = [value for value in values if value > 0]
    first, last = floor(log10(min(positive))) - 1, ceil(log10(max(positive))) + 1
    steps = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5)]
    low = max(step for step in steps if step < min(positive))
    high = min(step for step in steps if step > max(positive))
    within = [step for step in steps if low <= step <= high]
    tens = [step for step in within if f"{step:e}".startswith("1.0")]
    return (within if len(within) <= MOST_TICKS else tens), low, high


def _style(i: int, label: str) -> dict[str, Any]:
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    return {"color": colour, "marker": marker, "label": label, "linewidth": 1.8, "markersize": 5}


def _finish(axis: Any) -> None:
    axis.grid(color="#e3e3e3", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Any) -> None:
    """One legend for all panels, each line once."""
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )


def _kib_read(row: Row) -> float:
    return float(row["read_bytes"] + row["choose_bytes"] * row["length"]) / 1024


def _titled(attn: str, setting: str) -> str:
    return attn if attn == "exact" else f"{family(attn)}, k={budget(attn)} ({setting})"


def _selector_first(part: str) -> bool:
    return not part.startswith("selector=")


def _grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
