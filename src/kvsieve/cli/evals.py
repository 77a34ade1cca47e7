"""``kvsieve eval passkey``: a key hidden in filler, asked for at the end."""

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ArmOptions, ModelOptions, SparseOptions, integer, numbers, option
from kvsieve.cli.progress import StatusBar
from kvsieve.errors import ConfigError
from kvsieve.evals.results import RowWriter, check_format

_RUN = "Questions"


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions:
    """Which questions are asked, and how the rows are printed."""

    lengths: Annotated[
        str,
        option(
            "--lengths",
            panel=_RUN,
            metavar="N,N,...",
            help="Prompt lengths in tokens; a prompt falls short by less than a sentence.",
        ),
    ] = "1000,2000,4000"
    depths: Annotated[
        str,
        option(
            "--depths",
            panel=_RUN,
            metavar="X,X,...",
            help="Where the key is hidden: 0 at the start, 1 just before the question.",
        ),
    ] = "0.1,0.5,0.9"
    predict: Annotated[
        int, integer("-n", "--predict", panel=_RUN, help="Tokens of each answer.")
    ] = 12
    seed: Annotated[int, integer("-s", "--seed", panel=_RUN, help="Draws keys and filler.")] = 0
    output: Annotated[
        str,
        option("-o", "--output", panel=_RUN, metavar="FORMAT", help="json, md or csv."),
    ] = "md"

    def __post_init__(self) -> None:
        check_format(self.output)
        if min(numbers("--lengths", self.lengths, int)) < 1:
            raise ConfigError(f"--lengths: expected 1 token or more, got {self.lengths}")
        if not all(0 <= depth <= 1 for depth in numbers("--depths", self.depths, float)):
            raise ConfigError(f"--depths: expected numbers from 0 to 1, got {self.depths}")
        if self.predict < 1:
            raise ConfigError(f"-n/--predict: expected at least 1, got {self.predict}")


@grouped
def passkey(
    run: PasskeyOptions, compare: ArmOptions, sparse: SparseOptions, model: ModelOptions
) -> None:
    """Hide a five-digit key in filler text and ask for it at the end.

    One row per length, depth and setting: the answer, whether its first
    number is the key (hit), what ran (mode), which share of the cache was
    read (density), and why a sparse setting stayed exact if it did.

    \b
    Examples:
      kvsieve eval passkey
      kvsieve eval passkey --lengths 2000,6000 --depths 0.1,0.9
      kvsieve eval passkey --attn exact --attn sparse:k=1 -o json
    """
    arms = compare.arms(sparse)
    lengths = numbers("--lengths", run.lengths, int)
    depths = numbers("--depths", run.depths, float)

    from kvsieve.evals.passkey import PasskeyRow, run_passkey

    hits: Counter[str] = Counter()
    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        answered = run_passkey(
            llm,
            arms=arms,
            lengths=lengths,
            depths=depths,
            seed=run.seed,
            max_tokens=run.predict,
            on_run=bar.begin,
            on_progress=bar.advance,
        )
        with RowWriter(sys.stdout, PasskeyRow, form=run.output) as rows:
            for row in answered:
                bar.close()
                rows.write(row)
                hits[row.attn] += row.hit
    for arm in arms:
        found = f"{hits[arm.label]} of {len(lengths) * len(depths)}"
        print(f"kvsieve: {arm.label}: {found} found", file=sys.stderr)
