"""``kvsieve cost``: what a plan reads and computes, exact beside sparse, before anything runs."""

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

from kvsieve.attention.config import SelectorName
from kvsieve.cli.cost_options import (
    DEFAULT_CONTEXT,
    MEASURED_CONTEXTS,
    CostOutput,
    PlanOptions,
    ShapeOptions,
    TimeOptions,
)
from kvsieve.cli.groups import grouped
from kvsieve.cli.progress import StatusBar
from kvsieve.errors import ConfigError

if TYPE_CHECKING:
    from kvsieve.lab.shape import ModelShape


@grouped
def cost(plan: PlanOptions, shape: ShapeOptions, times: TimeOptions, output: CostOutput) -> None:
    """Count what exact and sparse attention read and compute, side by side.

    Pairs (query, token), FLOP and bytes, for one token and for a prompt, and
    the context from which on sparse costs less. Nothing runs, unless you ask
    for --measure: then the kernels do, on random caches of that shape, and a
    fixed time and a bandwidth per kernel, found at other contexts, predict
    how much faster sparse attention is.

    \b
    Examples:
      kvsieve cost --context 32768 --k 16 --explain
      kvsieve cost -m folder --context 32768
      kvsieve cost --head-dim 128 --num-q-heads 16 --num-kv-heads 8 --layers 28
      kvsieve cost --window 256 --context 4096
      kvsieve cost --measure --selector even --share group
      kvsieve cost --attention-ms 2.0 --select-ms .35 --gather-ms .25 \\
        --sparse-ms .5 --other-ms 6
      kvsieve cost --total-ms 52.5,92.3,155.2 --attention-ms 9.7,48.9,110.7
    """
    said = times.lines()
    if said is not None:
        print("\n".join(said))
    elif output.measure:
        _measure(plan, shape.shape(), output)
    else:
        _count(plan, shape.shape(), output)


def _count(plan: PlanOptions, shape: "ModelShape", output: CostOutput) -> None:
    from kvsieve.lab.ledger import break_even, ledger
    from kvsieve.lab.statement import break_even_lines, explanation_lines, ledger_lines

    rule = plan.rule()
    counted = [ledger(shape, rule, n_tokens=n) for n in plan.contexts(DEFAULT_CONTEXT)]
    found = break_even(shape, rule)
    for each in counted:
        if output.as_json:
            facts = asdict(each) | {"break_even": asdict(found)}
            print(json.dumps(facts))
            continue
        lines = ledger_lines(each)
        if output.explain:
            lines += ["", *explanation_lines(each)]
        print("\n".join([*lines, ""]))
    if not output.as_json:
        print("\n".join(break_even_lines(found)))


def _measure(plan: PlanOptions, shape: "ModelShape", output: CostOutput) -> None:
    from kvsieve.kernels.backends import make_backend
    from kvsieve.lab.prediction import DEFAULT_ROUNDS, measure_and_predict
    from kvsieve.lab.statement import measured_lines

    rule = plan.rule()
    if rule.sparse is None or rule.scan_dims is not None or rule.window_tokens is not None:
        raise ConfigError(
            "--measure: expected a selector of the kernels "
            f"({', '.join(get_args(SelectorName))}) and no --window, got another rule"
        )
    contexts = plan.contexts(MEASURED_CONTEXTS)
    backend = make_backend(
        "native", threads=output.threads, isa=os.environ.get("KVSIEVE_ISA") or None
    )
    rounds = output.rounds or DEFAULT_ROUNDS
    with StatusBar() as bar:
        result = measure_and_predict(
            shape,
            rule.sparse,
            contexts,
            backend=backend,
            rounds=rounds,
            on_round=lambda i: bar.begin(f"round {i + 1} of at most {rounds}"),
        )
    head = f"{backend.isa}, {backend.threads} threads"
    print("\n".join([head, *measured_lines(result)]))
