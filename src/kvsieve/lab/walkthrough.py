"""The lab's run in text: tensors, masks, one query step by step, checks."""

from collections.abc import Sequence
from textwrap import wrap

import numpy as np

from kvsieve.attention.dense import dense_attention
from kvsieve.lab.checks import Check
from kvsieve.lab.experiment import (
    BLOCK_TOKENS,
    GLOBAL_POSITION,
    HEAD_DIM,
    N_TOKENS,
    SCALE,
    SELECTOR,
    WHY,
    WINDOW_TOKENS,
    Experiment,
)
from kvsieve.types import AnyArray

EXAMPLE_QUERY = 18


def walkthrough(experiment: Experiment, checks: Sequence[Check], *, seed: int) -> str:
    """Everything that `kvsieve lab` prints."""
    parts = [
        _tensors(experiment, seed),
        _masks(experiment),
        _blocks(experiment),
        _example(experiment),
    ]
    if experiment.broken is not None:
        why = "\n".join(f"  {line}" for line in wrap(WHY[experiment.broken], 76))
        parts.append(f"Broken on purpose: {experiment.broken}\n{why}")
    parts.append("\n".join(check.line() for check in checks))
    return "\n\n".join(parts)


def _tensors(experiment: Experiment, seed: int) -> str:
    tensors = experiment.tensors
    names = "".join(f" | {name:^{6 * HEAD_DIM - 1}}" for name in ("query", "key", "value"))
    lines = [
        f"{N_TOKENS} tokens, one head of {HEAD_DIM}, seed {seed}; every logit is q . k x {SCALE:g}",
        f"  token{names}",
    ]
    for token in range(N_TOKENS):
        rows = (tensors.q, tensors.k, tensors.v)
        cells = "".join(f" | {_numbers(array[0, token], '5.1f')}" for array in rows)
        lines.append(f"  {token:>5}{cells}")
    return "\n".join(lines)


def _masks(experiment: Experiment) -> str:
    lines = [
        f"What each query reads: its own block of {BLOCK_TOKENS} and the {SELECTOR.k - 1} that "
        f"scores best, the last {WINDOW_TOKENS} tokens, token {GLOBAL_POSITION}",
        "  # read   o in a block that is loaded, but not read   . not loaded",
    ]
    for row in experiment.rows:
        marks = [
            "#" if read else "o" if loaded else "."
            for read, loaded in zip(
                experiment.mask[row.query], experiment.loaded[row.query], strict=True
            )
        ]
        groups = ["".join(marks[i : i + BLOCK_TOKENS]) for i in range(0, N_TOKENS, BLOCK_TOKENS)]
        chosen = ", ".join(map(str, row.blocks))
        lines.append(f"  query {row.query:>2}  |{'|'.join(groups)}|  blocks chosen: {chosen}")
    read, loaded = int(experiment.mask.sum()), int(experiment.loaded.sum())
    lines.append(
        f"  {read} pairs read of {N_TOKENS * (N_TOKENS + 1) // 2} causal ones; {loaded} loaded, "
        f"{read / loaded:.1%} of them useful"
    )
    return "\n".join(lines)


def _blocks(experiment: Experiment) -> str:
    mask = experiment.block_mask
    return "\n".join(
        [
            f"As a kernel takes it: the blocks that each tile of {BLOCK_TOKENS} queries touches",
            f"  indptr  {mask.indptr.tolist()}",
            f"  indices {mask.indices.tolist()}",
            *(
                f"  tile {tile}: indices[{mask.indptr[tile]}:{mask.indptr[tile + 1]}] = "
                f"{mask.blocks(0, tile).tolist()}"
                for tile in range(mask.num_tiles)
            ),
        ]
    )


def _example(experiment: Experiment) -> str:
    row, tensors = experiment.rows[EXAMPLE_QUERY], experiment.tensors
    tokens = list(row.tokens)
    read = slice(EXAMPLE_QUERY, EXAMPLE_QUERY + 1)
    weights = dense_attention(
        tensors.q[:, read], tensors.k[:, tokens], tensors.v[:, tokens],
        np.ones((1, len(tokens)), np.bool_), scale=SCALE,
    ).probs[0, 0]  # fmt: skip
    every = dense_attention(tensors.q, tensors.k, tensors.v, scale=SCALE).probs[0, EXAMPLE_QUERY]
    kept = every[sorted(set(tokens))].sum()
    outputs = (experiment.gathered()[EXAMPLE_QUERY], experiment.masked_dense()[EXAMPLE_QUERY])
    steps = {
        "1 score the blocks it sees (2 keys each)": _numbers(row.scores, ".2f"),
        f"2 choose {SELECTOR.k}": ", ".join(map(str, row.blocks)),
        f"3 with the window and token {GLOBAL_POSITION}": ", ".join(map(str, tokens)),
        "4 softmax over these alone": _numbers(weights, ".2f"),
        "  their share of attention over everything": f"{kept:.1%}",
        "5 gathered, through the kernels": _numbers(outputs[0], "7.4f"),
        "  masked, densely in float64": _numbers(outputs[1], "7.4f"),
    }
    lines = [f"  {what:<46}{shown}" for what, shown in steps.items()]
    return "\n".join([f"Query {EXAMPLE_QUERY}, step by step", *lines])


def _numbers(values: AnyArray, form: str) -> str:
    return " ".join(f"{value:{form}}" for value in values.tolist())
