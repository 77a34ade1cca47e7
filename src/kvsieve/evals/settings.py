"""The three ways to put sparse attention to the test, and proof that it was.

Source: docs/selection.md, section 8. ``A`` flatters: the prompt, question included, is read exactly
and only generated tokens are sparse. ``B``: the context is read exactly, question and answer are
decoded sparsely. ``C`` is what a user gets: sparse prefill with its exact tail, then sparse decode.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvsieve.engine.outputs import AttentionReport
from kvsieve.engine.plan import why_exact
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import Arm

Setting = Literal["A", "B", "C"]

ANY = "any"
"""Setting of a row of exact attention: it gives the same bits in all three, and runs once."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One arm in one setting: what every row of a result names."""

    arm: Arm
    setting: str

    @property
    def name(self) -> str:
        """For people: the arm, and the setting where it has one."""
        return self.arm.label if self.setting == ANY else f"{self.arm.label} ({self.setting})"

    def prompt_len(self, num_tokens: int, context_tokens: int) -> int:
        """Tokens read as a prompt; those after them are decoded one by one.

        num_tokens      of context and question together
        context_tokens  of the context alone, where there is a question
        """
        return context_tokens if self.setting == "B" else num_tokens

    def check_sparse(self, report: AttentionReport) -> None:
        """Raise ConfigError if this arm was asked to be sparse and read everything.

        An evaluation that compares exact with exact finds every selector perfect.
        """
        if self.arm.sparse is None:
            return
        phases = [report.decode] + ([report.prefill] if self.setting == "C" else [])
        if report.mode == "exact" or all(one.attended >= one.causal for one in phases):
            because = report.exact_because or "every block was read"
            raise ConfigError(
                f"[eval] {self.name}: expected sparse attention, got exact: {because}"
            )

    def refuse(self, because: str | None, *, num_tokens: int) -> None:
        """Raise ConfigError, before anything runs, for what `why_exact` found, if anything."""
        if because is not None:
            raise ConfigError(
                f"[eval] {self.name}: expected a setting that is sparse at {num_tokens} tokens "
                f"(--skip-exact leaves it out), got one that stays exact: {because}"
            )

    def why_exact(self, *, prompt_len: int, num_tokens: int) -> str | None:
        """Why a sparse arm would read everything; None: it is sparse, or asked to be exact."""
        if self.arm.sparse is None:
            return None
        return why_exact(self.arm.sparse, prompt_len=prompt_len, num_tokens=num_tokens)


def trials(arms: Iterable[Arm], settings: Sequence[str]) -> list[Trial]:
    """Every arm in every setting; an exact arm once.

    Raises ConfigError for an unknown setting, or a sparse arm that names a phase of its own: the
    setting decides where an arm is sparse.
    """
    unknown = [setting for setting in settings if setting not in get_args(Setting)]
    if unknown or not settings or len(set(settings)) != len(settings):
        raise ConfigError(
            f"[eval] settings: expected different ones of {', '.join(get_args(Setting))}, "
            f"got {', '.join(settings) or 'none'}"
        )
    found: list[Trial] = []
    for arm in arms:
        if arm.sparse is None:
            found.append(Trial(arm=arm, setting=ANY))
            continue
        if arm.sparse.phase != "both":
            raise ConfigError(
                f"[eval] {arm.label}: expected no phase beside a setting (A, B, C), which says "
                f"where attention is sparse, got phase={arm.sparse.phase}"
            )
        for setting in settings:
            sparse = replace(arm.sparse, phase="both" if setting == "C" else "decode")
            found.append(Trial(arm=Arm(label=arm.label, sparse=sparse), setting=setting))
    return found
