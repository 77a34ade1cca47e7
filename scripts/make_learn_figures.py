"""Draw the figures of docs/learn: ``python scripts/make_learn_figures.py [FOLDER]``.

Everything drawn is computed by the package; matplotlib comes with ``pip install 'kvsieve[plot]'``.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvsieve import SparseAttention, select_blocks
from kvsieve.attention.dense import dense_attention
from kvsieve.attention.stats import kept_mass
from kvsieve.kernels.backends import make_backend
from kvsieve.lab import ModelShape, Rule, break_even, ledger
from kvsieve.lab.drawing import draw_masks
from kvsieve.lab.experiment import Break, Experiment, Tensors
from kvsieve.plotting import new_figure, write_figure

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "learn" / "figures"
SEED = 7
EXACT, GROUP, HEAD = "#1d3557", "#c1121f", "#f4a261"


def masks(path: Path, broken: Break | None = None) -> None:
    """What ``kvsieve lab --seed 7 --plot`` draws."""
    backend = make_backend("reference")
    draw_masks(Experiment(tensors=Tensors.drawn(SEED), backend=backend, broken=broken), path)


def diagonal(path: Path) -> None:
    """The same with ``--break diagonal``."""
    masks(path, broken="diagonal")


def bytes_by_context(path: Path) -> None:
    """Bytes that one token reads, by context: exact, sparse per group, sparse per head."""
    shape = ModelShape(head_dim=128, num_q_heads=16, num_kv_heads=8, num_layers=28)
    contexts = [256 * i for i in range(1, 65)]
    figure, axes = new_figure(width_inches=7.5, height_inches=4)
    axis = axes[0, 0]
    settings = {
        "group": (GROUP, "sparse, one choice per group", (4, -16)),
        "head": (HEAD, "sparse, one choice per query head", (-72, 10)),
    }
    exact: list[float] = []
    for share, (color, label, offset) in settings.items():
        rule = Rule(sparse=SparseAttention(k=32, selector="even", share=share))
        counted = [ledger(shape, rule, n_tokens=n) for n in contexts]
        exact = [each.exact_token.total_bytes / 2**20 for each in counted]
        sparse = [each.rule_token.total_bytes / 2**20 for each in counted]
        axis.plot(contexts, sparse, color=color, linewidth=2.2, label=label)
        at = break_even(shape, rule).token_bytes_at_tokens or 0
        axis.plot(at, np.interp(at, contexts, exact), "o", color=color)
        axis.annotate(f"less from {at:,}", (at, np.interp(at, contexts, exact)), color=color,
                      xytext=offset, fontsize=9, textcoords="offset points")  # fmt: skip
    axis.plot(contexts, exact, color=EXACT, linewidth=2.2, label="exact")
    axis.set_xlabel("tokens in context")
    axis.set_ylabel("MiB read per token")
    axis.set_title("28 layers, 8 KV heads of 128, q8_0, k = 32", loc="left", fontweight="bold")
    _finish(figure, axis, path)


def mass_by_budget(path: Path) -> None:
    """Mass that selector ``even`` keeps on one query, beside the best any choice could keep."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 1, 64), np.float32)
    k, v = rng.standard_normal((2, 1, 2048, 64), np.float32)
    for block in range(3, 59, 7):
        k[:, 32 * block + rng.integers(32, size=6)] += 0.7 * q[:, 0]
    probs = dense_attention(q, k, v).probs
    budgets = list(range(1, 65))
    kept = []
    for budget in budgets:
        sparse = SparseAttention(k=budget, selector="even")
        mask = select_blocks(q, k, sparse=sparse, prompt_len=2047)
        kept.append(kept_mass(probs, mask.to_dense())[0, 0])
    best = np.cumsum(np.sort(probs.reshape(64, 32).sum(axis=1))[::-1])
    figure, axes = new_figure(width_inches=7.5, height_inches=4)
    axis = axes[0, 0]
    axis.plot(budgets, best, color=EXACT, linewidth=2.2, label="the best blocks, known afterwards")
    axis.plot(budgets, kept, color=GROUP, linewidth=2.2, label="even: 8 keys looked at per block")
    axis.set_xlabel("blocks read, of 64")
    axis.set_ylabel("share of full attention kept")
    axis.set_ylim(0, 1.02)
    axis.set_title("Kept mass of one query", loc="left", fontweight="bold")
    _finish(figure, axis, path)


def _finish(figure: Any, axis: Any, path: Path) -> None:
    axis.grid(color="#dddddd", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    axis.set_xlim(left=0)
    write_figure(figure, path, dots_per_inch=90)


FIGURES: dict[str, Callable[[Path], None]] = {
    "masks.png": masks,
    "diagonal.png": diagonal,
    "bytes.png": bytes_by_context,
    "mass.png": mass_by_budget,
}


def main(folder: Path = FOLDER) -> None:
    """Write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(folder / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
