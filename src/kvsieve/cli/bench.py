"""``kvsieve bench``: speed by depth, attention settings side by side."""

import sys
from dataclasses import dataclass
from typing import Annotated

from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions, at_least, integer, numbers, option, rows_format
from kvsieve.cli.profiles import profiled_arms
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.sparse_options import ArmOptions, SparseOptions
from kvsieve.errors import ConfigError
from kvsieve.evals.results import RowWriter, check_format

_RUN = "Measurement"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is timed, how often, and how it is printed."""

    depths: Annotated[
        str,
        option(
            "-d",
            "--depths",
            panel=_RUN,
            metavar="N,N,...",
            help="Prompt lengths in tokens; tokens are decoded after each.",
        ),
    ] = "512,2048,4096"
    predict: Annotated[
        int,
        integer("-n", "--predict", panel=_RUN, help="Tokens to decode at each depth."),
    ] = 32
    rounds: Annotated[
        int,
        integer("-r", "--repetitions", panel=_RUN, help="Rounds; medians are reported."),
    ] = 5
    output: Annotated[str, rows_format(_RUN)] = "md"

    def __post_init__(self) -> None:
        check_format(self.output)
        if min(numbers("-d/--depths", self.depths, int)) < 1:
            raise ConfigError(f"-d/--depths: expected 1 token or more, got {self.depths}")
        at_least("-n/--predict", self.predict)
        at_least("-r/--repetitions", self.rounds)


@grouped
def bench(
    run: BenchOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Time reading a prompt (pp) and decoding after it (tg), side by side.

    The settings take turns in every round. Times are medians over the rounds:
    of the whole prompt for pp, per token for tg. attention_ms leaves out
    select_ms (choosing the blocks); density is the share of the cache read.
    A model without a vocabulary reads random token ids.
    With -o md two more tables follow, exact beside sparse.

    \b
    Examples:
      kvsieve bench -d 512,4096 -n 32
      kvsieve bench -d 8000 --attn exact --attn sparse:k=16,selector=even
      kvsieve bench -d 4096 -ctk f16 -ctv f16 -t 4 -o json
    """
    arms = compare.arms(sparse)
    depths = numbers("-d/--depths", run.depths, int)

    from kvsieve.evals.bench import BenchRow, run_bench
    from kvsieve.evals.tables import decode_table, prefill_table

    results = []
    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        bar.close()
        arms = profiled_arms(arms, compare=compare, options=sparse, llm=llm, model=model)
        measured = run_bench(
            llm,
            arms=arms,
            depths=depths,
            decode_tokens=run.predict,
            rounds=run.rounds,
            on_run=bar.begin,
            on_progress=bar.advance,
        )
        with RowWriter(sys.stdout, BenchRow, form=run.output) as rows:
            for result in measured:
                bar.close()
                rows.write(result.prefill)
                rows.write(result.decode)
                results.append(result)
    if run.output == "md":
        print("\nReading the prompt (attention with choosing the blocks; GEMM: all dense work)\n")
        print(prefill_table(results))
        print("Per decoded token (attention with choosing the blocks)\n")
        print(decode_table(results), end="")
