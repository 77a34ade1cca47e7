"""What an engine has to do to be compared, and the arms of kvsieve itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from kvsieve import LLM, SamplingParams, SparseAttention


class ArmError(Exception):
    """This engine, or this run of it, has no figure; the message says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The same prompt for every engine; `text` is None for a model without a vocabulary."""

    token_ids: list[int]
    text: str | None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One run: seconds until the first token, then the mean over the decoded tokens.

    `prompt_tokens` is what the engine counted: one that takes text may differ by a few.
    """

    prompt_tokens: int
    prefill_s: float
    decode_ms: float

    @property
    def prefill_ms(self) -> float:
        """Milliseconds per prompt token: comparable where the counts differ a little."""
        return 1e3 * self.prefill_s / self.prompt_tokens


class Arm(Protocol):
    """One engine in one setting."""

    name: str
    version: str
    is_peer: bool
    prompts_per_run: int
    """How often a run reads the prompt, for the estimate of the time."""

    def measure(self, prompt: Prompt, decode_tokens: int) -> Speed:
        """Read the prompt from nothing, then decode. Raises ArmError."""
        ...

    def answer(self, prompt: Prompt, max_tokens: int) -> str | None:
        """The greedy reply; None from an engine that can only be timed. Raises ArmError."""
        ...

    def close(self) -> None:
        """Give back memory and processes."""
        ...


class KvsieveArm:
    """Our engine with one attention setting; the arms share a model."""

    is_peer = False
    prompts_per_run = 1

    def __init__(self, llm: LLM, name: str, sparse: SparseAttention | None) -> None:
        self.name, self._llm, self._sparse = name, llm, sparse
        self.version = f"{llm.info.version}, {llm.info.isa}"

    def measure(self, prompt: Prompt, decode_tokens: int) -> Speed:
        # The first token comes with the prompt: one more than the steps that are timed.
        params = SamplingParams(max_tokens=decode_tokens + 1, ignore_eos=True)
        done = self._llm.generate(prompt.token_ids, params, sparse=self._sparse)
        if self._must_be_sparse(prompt.token_ids) and done.attention.mode != "sparse":
            raise ArmError(f"ran exactly: {done.attention.exact_because}")
        return Speed(
            prompt_tokens=done.prompt_tokens,
            prefill_s=done.timings.prompt_ms / 1e3,
            decode_ms=mean(token.total_ms for token in done.tokens),
        )

    def _must_be_sparse(self, token_ids: Sequence[int]) -> bool:
        """Whether more blocks than the budget come before the exact tail of the prompt."""
        sparse = self._sparse
        if sparse is None:
            return False
        return len(token_ids) > sparse.block_size * sparse.k + sparse.dense_tail

    def answer(self, prompt: Prompt, max_tokens: int) -> str | None:
        params = SamplingParams(max_tokens=max_tokens)
        return self._llm.generate(prompt.token_ids, params, sparse=self._sparse).text

    def close(self) -> None:
        """The model belongs to whoever made the arms."""
