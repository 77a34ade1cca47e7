"""The lab's masks as a figure."""

from pathlib import Path
from typing import Any

import numpy as np

from kvsieve.lab.experiment import BLOCK_TOKENS, N_TOKENS, Experiment
from kvsieve.plotting import new_figure, write_figure
from kvsieve.types import AnyArray

READ, UNUSED, NOT_LOADED = "#1d3557", "#f4a261", "#f1f1ee"
FUTURE = "#c1121f"


def draw_masks(experiment: Experiment, path: Path) -> None:
    """Token mask, block mask, and what was loaded without being read, as one image."""
    figure, axes = new_figure(width_inches=12, height_inches=4.9, columns=3)
    mask, loaded = experiment.mask, experiment.loaded
    tokens, blocks, useful = axes[0]
    _grid(tokens, mask.astype(int), (NOT_LOADED, READ), step=BLOCK_TOKENS)
    read, causal = int(mask.sum()), N_TOKENS * (N_TOKENS + 1) // 2
    _label(tokens, f"Tokens read: {read} of {causal} causal pairs", "token", "query")
    if np.triu(mask, 1).any():
        _mark_future(tokens, mask)
    grid = experiment.block_mask.to_blocks()[0]
    _grid(blocks, grid.astype(int), (NOT_LOADED, READ), step=1)
    causal_blocks = grid.shape[0] * (grid.shape[0] + 1) // 2
    _label(
        blocks,
        f"Block mask: {int(grid.sum())} of {causal_blocks} causal blocks",
        f"block of {BLOCK_TOKENS} tokens",
        f"tile of {BLOCK_TOKENS} queries",
    )
    _grid(useful, loaded.astype(int) + mask, (NOT_LOADED, UNUSED, READ), step=BLOCK_TOKENS)
    _label(useful, f"Loaded but unused: {int((loaded & ~mask).sum())}", "token", "query")
    handles = [
        tokens.scatter([], [], marker="s", s=70, color=color, edgecolor="#999999", label=label)
        for color, label in (
            (READ, "read"),
            (UNUSED, "loaded with its block, not read"),
            (NOT_LOADED, "not loaded"),
        )
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    write_figure(figure, path)


def _grid(axis: Any, values: AnyArray, colors: tuple[str, ...], *, step: int) -> None:
    """Squares in the color of their value, with a thicker line every `step`."""
    rgb = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors], np.uint8)
    axis.imshow(rgb[values])
    size = len(values)
    for edge in range(size + 1):
        width = 1.6 if edge % step == 0 else 0.6
        axis.axhline(edge - 0.5, color="white", linewidth=width)
        axis.axvline(edge - 0.5, color="white", linewidth=width)
    ticks = range(0, size, step)
    axis.set_xticks(ticks)
    axis.set_yticks(ticks)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel(x)
    axis.set_ylabel(y)


def _mark_future(axis: Any, mask: AnyArray) -> None:
    """A cross on every token that is read before it exists."""
    queries, tokens = np.nonzero(np.triu(mask, 1))
    axis.scatter(tokens, queries, marker="x", s=30, color=FUTURE)
    axis.set_xlabel("token (crosses: the query's future)")
