"""The comparison as Markdown for people and JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from peers.figures import PHASES, Comparison, Ratio, Spread, per_token_ms, tokens_per_second

METHOD = """\
Every round runs every engine once at every depth, in an order that rotates; each engine had a short
run before. Prefill: the prompt's tokens by the time to the first token. Decode: the mean over the
tokens after it. A figure is the median over rounds, with the lowest and highest in brackets; a
ratio is the median of the ratios within rounds."""


def to_markdown(comparison: Comparison, ratios: Sequence[Ratio]) -> str:
    facts = {**comparison.machine, **comparison.settings}
    parts = [
        "# Speed beside other engines",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        METHOD,
        "## Speed",
        _speeds(comparison),
        "## kvsieve, times as fast",
        _ratios(ratios),
    ]
    if comparison.answers:
        parts += ["## Pass key", _answers(comparison)]
    if comparison.left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in comparison.left_out)]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _spread(spread: Spread, digits: int) -> str:
    low, high = f"{spread.low:,.{digits}f}", f"{spread.high:,.{digits}f}"
    return f"{spread.median:,.{digits}f} ({low} to {high})"


def _speeds(comparison: Comparison) -> str:
    versions = {engine.name: engine.version for engine in comparison.engines}
    rows = []
    for depth, by_engine in comparison.speeds.items():
        for name, speeds in by_engine.items():
            mark = " (loses the answer)" if comparison.loses_the_answer(name) else ""
            decode_ms = Spread.of([per_token_ms(speed, "decode") for speed in speeds])
            rows.append(
                [
                    f"{depth:,}",
                    f"{name}{mark}",
                    versions[name],
                    f"{speeds[0].prompt_tokens:,}",
                    _spread(tokens_per_second(speeds, "prefill"), 0),
                    _spread(decode_ms, 2),
                ]
            )
    head = ["depth", "engine", "version", "prompt tokens", "prefill tokens/s", "decode ms/token"]
    return _table(head, rows)


def _ratios(ratios: Sequence[Ratio]) -> str:
    rows = [
        [
            f"{row.depth:,}",
            row.phase,
            row.engine,
            row.base or "no peer is left",
            _spread(row.spread, 2) if row.spread else "",
        ]
        for phase in PHASES
        for row in ratios
        if row.phase == phase
    ]
    return _table(["depth", "phase", "engine", "against", "times as fast"], rows)


def _answers(comparison: Comparison) -> str:
    rows = []
    for engine in comparison.engines:
        hits, asked = comparison.found(engine.name)
        replies = [answer for answer in comparison.answers if answer.engine == engine.name]
        lost = [f"{answer.key} at {answer.depth:g}" for answer in replies if not answer.hit]
        lengths = sorted({f"{answer.prompt_tokens:,}" for answer in replies})
        found = f"{hits} of {asked}" if asked else "cannot be asked"
        rows.append([engine.name, found, ", ".join(lengths), ", ".join(lost)])
    return _table(["engine", "found", "prompt tokens", "lost"], rows)


def to_json(comparison: Comparison, ratios: Sequence[Ratio]) -> str:
    """Every round's figures, so that other tables can be made of them."""
    plain = asdict(comparison)
    plain["ratios"] = [asdict(row) for row in ratios]
    return json.dumps(plain, indent=1) + "\n"
