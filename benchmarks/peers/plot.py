"""Speed against depth, a line per engine."""

from pathlib import Path
from typing import Any

from kvsieve.plotting import new_figure, write_figure
from peers.figures import PHASES, Comparison, Engine, tokens_per_second

OURS = ("#c1121f", "#f28482")
PEERS = ("#1d3557", "#457b9d", "#7ba7bc", "#2a9d8f", "#8ab17d", "#6d597a", "#b08968")
MARKERS = "osD^vPX*<>"


def write_plot(comparison: Comparison, path: Path) -> None:
    """Prefill and decode, both in tokens per second on logarithmic axes, as a PNG image."""
    figure, axes = new_figure(width_inches=12, height_inches=5.6, columns=2)
    panels = axes[0]
    styles = _styles(comparison.engines)
    depths = sorted(comparison.speeds)
    for panel, phase in zip(panels, PHASES, strict=True):
        for name, style in styles.items():
            points = [depth for depth in depths if comparison.speeds[depth].get(name)]
            if not points:
                continue
            spreads = [tokens_per_second(comparison.speeds[d][name], phase) for d in points]
            middle = [spread.median for spread in spreads]
            label = name + (" (loses the answer)" if comparison.loses_the_answer(name) else "")
            panel.plot(points, middle, label=label, **style)
            low, high = [s.low for s in spreads], [s.high for s in spreads]
            panel.vlines(points, low, high, color=style["color"], linewidth=1, alpha=0.5)
        panel.set_title(phase, loc="left", fontweight="bold")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(depths, [f"{depth:,}" for depth in depths])
        panel.minorticks_off()
        low, high = panel.get_ylim()
        steps = [m * 10**e for e in range(7) for m in (1, 2, 5)]
        panel.set_yticks([step for step in steps if low <= step <= high])
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.set_xlabel("prompt tokens")
        panel.set_ylabel("tokens per second")
        panel.grid(color="#dddddd", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    settings = comparison.settings
    figure.suptitle(
        f"{settings['model']}, {settings['threads']} threads, {comparison.machine['processor']}",
        x=0.01,
        ha="left",
    )
    write_figure(figure, path)


def _styles(engines: list[Engine]) -> dict[str, dict[str, Any]]:
    """Ours in red and drawn over the others; a marker each, for who cannot tell colours apart."""
    styles: dict[str, dict[str, Any]] = {}
    ours = peers = 0
    for i, engine in enumerate(engines):
        if engine.is_peer:
            look = {"color": PEERS[peers % len(PEERS)], "linewidth": 1.5, "zorder": 2}
            peers += 1
        else:
            look = {"color": OURS[ours % len(OURS)], "linewidth": 2.5, "zorder": 3}
            ours += 1
        styles[engine.name] = {**look, "marker": MARKERS[i % len(MARKERS)], "markersize": 6}
    return styles
