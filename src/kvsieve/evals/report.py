"""One self-contained HTML page of a sweep: plots, tables, and what they were measured with."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvsieve.errors import ConfigError
from kvsieve.evals import plots
from kvsieve.evals.results import readable
from kvsieve.evals.settings import ANY
from kvsieve.evals.store import ResultStore
from kvsieve.evals.sweep import QUESTIONS
from kvsieve.plotting import check_can_plot, write_figure

Row = dict[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
img { max-width: 100%; height: auto; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #e3e3e3; text-align: right; }
th { position: sticky; top: 0; background: #fff; }
td.text, th.text { text-align: left; }
p.note { color: #555; }
"""

_SETTINGS = (
    "Settings: A, the prompt is read exactly and only generated tokens are sparse (flatters); "
    "B, the context is read exactly, question and answer are decoded sparsely; C, as a user gets "
    "it, the prompt sparse but for its exact tail. Exact attention is the same in all three."
)

_PLOTS: dict[str, tuple[str, Callable[[Sequence[Row]], Any]]] = {
    "passkey": ("Pass key: right answers by length and depth", plots.heat_map),
    "kv": ("One number among many keys that look alike", plots.heat_map),
    "vartrack": ("Chains of assignments", plots.heat_map),
    "copy": ("Copying a list of words", plots.heat_map),
    "recall": ("Kept mass against bytes read", plots.mass_by_bytes),
    "divergence": ("Divergence from exact attention against budget", plots.divergence_by_budget),
    "speed": ("Speed against length", plots.speed_by_length),
}

_NOTES = {
    "passkey": "Right answers of those asked; blank: not asked.",
    "recall": "kept_mass: share of full attention's probability on the blocks read, mean over "
    "layers, query heads and decoded tokens; p5 its 5th percentile; oracle_mass: the best blocks "
    "of the same number; estimate: what the engine said as it went, its mean absolute error (mae) "
    "and its bias, above 0 too optimistic. Points carry their budget k.",
    "divergence": "kl: mean KL(exact || sparse) of the next-token distributions on the decode "
    "path, in nats; top1: share of positions with the same most likely token.",
    "perplexity": "The text read as a prompt; change: relative to exact prefill, 0.01 is 1 %.",
    "speed": "Compares within this table only: machines differ and share their cores.",
}


def write_report(store: ResultStore, folder: Path) -> list[Path]:
    """Write ``index.html``, which needs no other file, and each plot as a PNG beside it.

    Returns what was written. ConfigError: nothing to show, or no way to plot.
    """
    tasks = [task for task in [*_PLOTS, "perplexity"] if store.rows(task)]
    if not tasks:
        raise ConfigError("[report] results: expected at least one row, got none")
    if not folder.parent.is_dir():
        raise ConfigError(f"[report] --out: expected a folder to write in, got {folder.parent}")
    folder.mkdir(exist_ok=True)
    check_can_plot(folder / "passkey.png")
    written, sections = [], []
    for task in tasks:
        rows = store.rows(task)
        title, picture = "Perplexity of exact and sparse prefill", ""
        if task in _PLOTS:
            title, draw = _PLOTS[task]
            path = folder / f"{task}.png"
            write_figure(draw(rows), path)
            written.append(path)
            data = b64encode(path.read_bytes()).decode()
            picture = f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'
        shown = summary(rows) if task in QUESTIONS else rows
        note = f'<p class="note">{escape(_NOTES[task])}</p>' if task in _NOTES else ""
        sections.append(
            f"<h2>{escape(title)}</h2>\n{picture}\n{note}\n"
            f'<div class="wide">{html_table(shown)}</div>'
        )
    page = folder / "index.html"
    page.write_text(_page(str(store.identity), sections), encoding="utf-8")
    return [page, *written]


def summary(rows: Sequence[Row]) -> list[Row]:
    """Questions by arm and setting: right answers by length, agreement with exact, log-probability.

    ``as_exact``: share of questions answered word for word as exact attention answers them.
    """
    exact = {_question(row): row["answer"] for row in rows if row["setting"] == ANY}
    arms: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        arms.setdefault((row["attn"], row["setting"]), []).append(row)
    found = []
    for (attn, setting), mine in arms.items():
        line: Row = {"attn": attn, "setting": setting, "right": _share(mine)}
        for length in sorted({row["length"] for row in rows}):
            at = [row for row in mine if row["length"] == length]
            line[f"right at {length:,}"] = _share(at) if at else ""
        compared = [
            exact[_question(row)] == row["answer"] for row in mine if _question(row) in exact
        ]
        line["as_exact"] = sum(compared) / len(compared) if compared else None
        line["score"] = sum(row["score"] for row in mine) / len(mine)
        line["logprob"] = sum(row["logprob"] for row in mine) / len(mine)
        line["top1"] = sum(row["top1"] for row in mine) / len(mine)
        line["density"] = sum(row["density"] for row in mine) / len(mine)
        found.append(line)
    return found


def html_table(rows: Sequence[Row]) -> str:
    """Rows of one kind; words on the left, numbers on the right. Empty columns are left out."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    text = {name for name in columns if all(isinstance(row[name], str) for row in rows)}

    def cell(tag: str, name: str, value: object) -> str:
        kind = ' class="text"' if name in text else ""
        return f"<{tag}{kind}>{escape(readable(value))}</{tag}>"

    head = "".join(cell("th", name, name) for name in columns)
    body = "\n".join(
        f"<tr>{''.join(cell('td', name, row[name]) for name in columns)}</tr>" for row in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _page(identity: str, sections: Sequence[str]) -> str:
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>kvsieve: evaluation</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>Sparse attention beside exact attention</h1>\n<p>{escape(identity)}</p>\n"
        f'<p class="note">{escape(_SETTINGS)}</p>\n{body}\n</body></html>\n'
    )


def _question(row: Row) -> tuple[Any, ...]:
    return (row["task"], row["length"], row["depth"], row["seed"])


def _share(rows: Sequence[Row]) -> str:
    return f"{sum(row['hit'] for row in rows)} of {len(rows)}"
