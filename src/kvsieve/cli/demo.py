"""``kvsieve demo``: one long prompt with a needle, read exactly and sparsely, as a table."""

import sys
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions, integer, real
from kvsieve.cli.progress import StatusBar
from kvsieve.evals.arms import Arm
from kvsieve.evals.corpus import passkey_prompt
from kvsieve.evals.results import readable

if TYPE_CHECKING:
    from kvsieve.engine.llm import LLM
    from kvsieve.engine.outputs import Completion
    from kvsieve.evals.corpus import PasskeyPrompt

BUDGETS = (32, 16, 8, 1)
REPLY_TOKENS = 32
ANSWER_WIDTH = 11
TABLE_WIDTH = 90
"""Columns of the table where stdout is no terminal; it takes 80 with narrow gaps."""

_DEMO = "Demonstration"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The prompt of the demonstration."""

    length: Annotated[int, integer("--length", panel=_DEMO, help="Tokens of the prompt.")] = 4000
    depth: Annotated[
        float,
        real("--depth", panel=_DEMO, help="Where the key is hidden, from 0 to 1."),
    ] = 0.5
    seed: Annotated[
        int, integer("-s", "--seed", panel=_DEMO, help="Draws the key and the filler.")
    ] = 0


@grouped
def demo(options: DemoOptions, model: ModelOptions) -> None:
    """Find a key in a long prompt: exactly, then with 32, 16, 8 and 1 blocks.

    \b
    Examples:
      kvsieve demo
      kvsieve demo --length 6000 --depth 0.1 -t 4
    """
    from kvsieve.evals.passkey import check_room

    began = perf_counter()
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    arms = [Arm.of(None), *(Arm.parse(f"sparse:k={k}") for k in BUDGETS)]
    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        check_room(llm, task="demo", length=options.length, reply_tokens=REPLY_TOKENS)
        prompt = passkey_prompt(
            llm.tokenizer, length=options.length, depth=options.depth, seed=options.seed
        )
        table = _table(llm, prompt, width=console.width)
        notes = []
        for arm in arms:
            completion = _ask(llm, prompt, arm=arm, bar=bar)
            table.add_row(*map(Text, _cells(arm, completion, key=prompt.key)))
            if completion.attention.exact_because is not None:
                notes.append(f"Stayed exact: {arm.label} ({completion.attention.exact_because})")
    console.print(table)
    print(*notes, sep="\n", end="\n" if notes else "")
    print(f"{perf_counter() - began:.1f} s in all")


def _ask(llm: "LLM", prompt: "PasskeyPrompt", *, arm: Arm, bar: StatusBar) -> "Completion":
    from kvsieve.engine.sampling import SamplingParams

    what = f"{arm.label}: reading {len(prompt.token_ids):,} tokens"
    bar.begin(what, total=len(prompt.token_ids))
    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
    params = SamplingParams(max_tokens=REPLY_TOKENS, ignore_eos=True)
    return llm.generate(prompt.token_ids, params, sparse=arm.sparse, on_progress=bar.advance)


def _table(llm: "LLM", prompt: "PasskeyPrompt", *, width: int) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0 if width < TABLE_WIDTH else 1),
        collapse_padding=True,
        title=f"{llm.info.model_name}: the key {prompt.key} in {len(prompt.token_ids):,} tokens "
        f"({llm.info.isa}, threads: {llm.info.threads})",
        caption="Attention includes choosing the blocks; times per token are medians. Blocks read: "
        "mean per token of the reply, layer and KV head, whose query heads choose together "
        "(k=32) or, with fewer blocks, on their own. "
        "Density: share of the cache read.",
    )
    table.add_column("attention", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    table.add_column("needle\nfound", justify="center")
    table.add_column("prefill\ns", justify="right")
    table.add_column("attention\nms/token", justify="right")
    table.add_column("total\nms/token", justify="right")
    table.add_column("blocks\nread", justify="right")
    table.add_column("density\nprompt", justify="right")
    table.add_column("density\nreply", justify="right")
    return table


def _cells(arm: Arm, completion: "Completion", *, key: str) -> list[str]:
    from kvsieve.evals.passkey import is_hit

    report, steps = completion.attention, completion.tokens
    answer = " ".join(completion.text.split())
    return [
        arm.label,
        answer if len(answer) <= ANSWER_WIDTH else answer[: ANSWER_WIDTH - 1] + "…",
        readable(is_hit(completion.text, key)),
        f"{completion.timings.prompt_ms / 1e3:.2f}",
        readable(median(step.attention_ms + step.select_ms for step in steps)),
        readable(median(step.total_ms for step in steps)),
        readable(report.decode.blocks_per_query),
        readable(report.prefill.density),
        readable(report.decode.density),
    ]
