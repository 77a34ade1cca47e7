"""Options that the evaluations share."""

from dataclasses import dataclass
from typing import Annotated, get_args

from kvsieve.cli.options import at_least, integer, numbers, option, rows_format
from kvsieve.errors import ConfigError
from kvsieve.evals.corpus import TEXT_KINDS
from kvsieve.evals.results import check_format
from kvsieve.evals.settings import Setting

RUN = "Evaluation"


def names(option_name: str, text: str, choices: tuple[str, ...]) -> list[str]:
    """Read ``B,C``: different words out of `choices`; ConfigError says which is none."""
    words = text.split(",")
    wrong = [word for word in words if word not in choices]
    if wrong or len(set(words)) != len(words):
        raise ConfigError(
            f"{option_name}: expected different ones of {', '.join(choices)}, "
            f"got {(wrong or [text])[0]!r}"
        )
    return words


def lengths_of(text: str, *, option_name: str = "--lengths") -> list[int]:
    """Read lengths in tokens."""
    lengths = numbers(option_name, text, int)
    if min(lengths) < 1:
        raise ConfigError(f"{option_name}: expected 1 token or more, got {text}")
    return lengths


def depths_of(text: str) -> list[float]:
    """Read depths, 0 to 1."""
    depths = numbers("--depths", text, float)
    if not all(0 <= depth <= 1 for depth in depths):
        raise ConfigError(f"--depths: expected numbers from 0 to 1, got {text}")
    return depths


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """How settings are put to the test."""

    settings: Annotated[
        str,
        option(
            "--settings",
            panel=RUN,
            metavar="X,X,...",
            help="Where attention is sparse. A: generated tokens only (flatters). B: question and "
            "answer, the context is read exactly. C: as a user gets it, prompt included.",
        ),
    ] = "B,C"
    skip_exact: Annotated[
        bool,
        option(
            "--skip-exact",
            panel=RUN,
            help="Leave out a sparse setting at lengths that fit its budget; else that is an "
            "error, for it would compare exact with exact.",
        ),
    ] = False

    def __post_init__(self) -> None:
        names("--settings", self.settings, get_args(Setting))

    @property
    def setting_names(self) -> list[str]:
        """The settings, one by one."""
        return self.settings.split(",")


@dataclass(frozen=True, kw_only=True)
class AskedOptions(SettingOptions):
    """Which questions are asked, and how often."""

    lengths: Annotated[
        str,
        option(
            "--lengths",
            panel=RUN,
            metavar="N,N,...",
            help="Tokens of a text, or of a prompt, which falls short by less than a sentence.",
        ),
    ] = "2000,4000"
    depths: Annotated[
        str,
        option(
            "--depths",
            panel=RUN,
            metavar="X,X,...",
            help="Where the answer is hidden: 0 at the start, 1 just before the question.",
        ),
    ] = "0.1,0.5,0.9"
    samples: Annotated[
        int,
        integer("--samples", panel=RUN, help="Different questions at each length and depth."),
    ] = 1
    seed: Annotated[int, integer("-s", "--seed", panel=RUN, help="Draws answers and filler.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths_of(self.lengths)
        depths_of(self.depths)
        at_least("--samples", self.samples)

    @property
    def seeds(self) -> list[int]:
        """One seed per sample."""
        return list(range(self.seed, self.seed + self.samples))


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(AskedOptions):
    """Questions, and how their rows are printed."""

    output: Annotated[str, rows_format(RUN)] = "md"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_format(self.output)


@dataclass(frozen=True, kw_only=True)
class PassageOptions(SettingOptions):
    """Which texts are read, and how rows are printed."""

    output: Annotated[str, rows_format(RUN)] = "md"
    text: Annotated[
        str,
        option(
            "--text",
            panel=RUN,
            metavar="KIND,...",
            help="natural (the standard library's pydoc topics; the row names its hash) or "
            "templated (filler sentences).",
        ),
    ] = "natural"
    lengths: Annotated[
        str,
        option("--lengths", panel=RUN, metavar="N,N,...", help="Tokens of the text."),
    ] = "4000"
    seed: Annotated[
        int, integer("-s", "--seed", panel=RUN, help="Where the text starts; draws filler.")
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_format(self.output)
        lengths_of(self.lengths)
        names("--text", self.text, TEXT_KINDS)

    @property
    def kinds(self) -> list[str]:
        """The kinds of text, one by one."""
        return self.text.split(",")


@dataclass(frozen=True, kw_only=True)
class RecallOptions(PassageOptions):
    """What is measured of kept mass."""

    queries: Annotated[
        int,
        integer("--queries", panel=RUN, help="Last tokens of the text, decoded and measured."),
    ] = 64
    by: Annotated[
        str,
        option("--by", panel=RUN, metavar="PART", help="A row over all, per layer, or per head."),
    ] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        names("--by", self.by, ("all", "layer", "head"))
        at_least("--queries", self.queries)


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions(PassageOptions):
    """Where next-token distributions are compared."""

    positions: Annotated[
        int,
        integer("--positions", panel=RUN, help="Last tokens of the text, decoded and compared."),
    ] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("--positions", self.positions, 2)


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(PassageOptions):
    """Where perplexity is measured; only setting C reads a prompt sparsely."""

    settings: Annotated[
        str,
        option("--settings", panel=RUN, metavar="C", help="C, in which the prompt is sparse."),
    ] = "C"
    start: Annotated[
        int | None,
        integer(
            "--start",
            panel=RUN,
            show_default="half of the length",
            help="First position whose next token counts.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names("--settings", self.settings, ("C",))
        at_least("--start", self.start, 0)

    def first_of(self, length: int) -> int:
        """First position that counts in a text of `length` tokens."""
        return length // 2 if self.start is None else self.start
